"""Jobs that run on `fastgen.Engine`, whatever the model makes of them."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fastgen
from fastgen.memory import free_host_memory
from fastgen_serve.errors import Unavailable
from fastgen_serve.jobs import ModelInfo
from fastgen_serve.settings import ServeSettings

# The part of the memory that is free that K and V of all models may take, where nobody says how much; the rest is for
# copies of weights and what steps compute. And the bytes that a model has in any case.
SHARE_FOR_CACHE, LEAST_CACHE = 0.25, 2**26


class EngineWorker(ABC):
    """Runs jobs on an engine.

    Args:
        model: of Transformers.
        options: further ones of the engine.
    """

    info: ModelInfo

    def __init__(self, model: Any, settings: ServeSettings, **options: Any) -> None:
        self._model, self._slots = model, settings.slots
        # A request that comes now may be cancelled before others are done: what waits is bounded by the server.
        cache_gib = settings.cache_gib or cache_share(len(settings.models))
        self._engine = fastgen.Engine(
            model,
            slots=settings.slots,
            max_waiting=2**20,
            cache_gib=None if math.isinf(cache_gib) else cache_gib,
            **options,
        )

    def _info(self, path: str, task: str, **others: Any) -> ModelInfo:
        """What the model at a path is, that does this."""
        defaults = self._model.generation_config.to_diff_dict()
        return ModelInfo(
            name=os.path.basename(path.rstrip("/")),
            kind="encoder-decoder" if self._model.config.is_encoder_decoder else "decoder-only",
            tasks=(task,),
            slots=self._slots,
            defaults={name: value for name, value in defaults.items() if value is not None},
            **others,
        )

    def _as_read(self, value: Any) -> Any:
        """An array as a tensor, numbers in the model's own type; anything else as it is."""
        made = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        is_float = isinstance(made, Tensor) and made.is_floating_point()
        return made.to(self._model.dtype) if is_float else made

    @abstractmethod
    def _start(self, job: Any, on_delta: Callable[[Any], object] | None) -> tuple[Future[Any], Callable[[Any], Any]]:
        """Hands a job to the engine. Returns its future, and what makes the job's result of what that has.

        Raises:
            BadRequest: it cannot be run.
            ValueError: `generate` would refuse it.
        """

    def submit(
        self,
        job: Any,
        on_done: Callable[[Any], object],
        on_error: Callable[[BaseException], object],
        on_delta: Callable[[Any], object] | None = None,
    ) -> Future[Any]:
        """Takes a job; `cancel()` of what is returned frees its slots at the next step.

        Raises:
            BadRequest: it cannot be run.
            ValueError: `generate` would refuse it.
            Unavailable: the engine has failed.
        """
        if self._engine.failure is not None:
            raise _failed()
        try:
            future, result_of = self._start(job, on_delta)
        except ValueError as error:
            if self._engine.failure is not None:  # meanwhile, and so the engine is closed
                raise _failed() from error
            raise
        future.add_done_callback(partial(self._settle, result_of, on_done, on_error))
        return future

    def stats(self) -> dict[str, Any]:
        return self._engine.stats()

    def close(self) -> None:
        self._engine.close(cancel=True)

    def _settle(
        self,
        result_of: Callable[[Any], Any],
        on_done: Callable[[Any], object],
        on_error: Callable[[BaseException], object],
        future: Future[Any],
    ) -> None:
        """The request is over. The thread of the engine calls this."""
        if future.cancelled():
            return
        error = future.exception()
        try:
            made = None if error is not None else result_of(future.result())
        except Exception as failure:  # the thread goes on with other requests, and this one fails alone
            error, made = failure, None
        if made is None:
            assert error is not None
            on_error(_failed() if error is self._engine.failure else error)
        else:
            on_done(made)


def cache_share(models: int) -> float:
    """GiB of K and V for one of so many models, of what is free once its weights are read."""
    return max(SHARE_FOR_CACHE * free_host_memory() / max(models, 1), LEAST_CACHE) / 2**30


def _failed() -> Unavailable:
    """For the requests of an engine that has failed: its process ends, and the server starts another one."""
    return Unavailable("the process of the model has failed: try again", retry_after=5)
