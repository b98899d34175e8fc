"""Runs jobs on `fastgen.Engine`, for any kind of model that generates."""

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

# By default, the share of free memory for the KV caches of all models, which leaves the rest to copies of weights and
# to activations; and the minimum bytes for each model.
SHARE_FOR_CACHE, LEAST_CACHE = 0.25, 2**26


class EngineWorker(ABC):
    """Runs jobs on an engine.

    Args:
        model: of Transformers.
        options: further options of the engine.
    """

    info: ModelInfo

    def __init__(self, model: Any, settings: ServeSettings, **options: Any) -> None:
        self._model, self._slots = model, settings.slots
        # The engine's queue must not refuse a request while cancelled ones are still in it: the server bounds the
        # queue.
        cache_gib = settings.cache_gib or cache_share(len(settings.models))
        self._engine = fastgen.Engine(
            model,
            slots=settings.slots,
            max_waiting=2**20,
            cache_gib=None if math.isinf(cache_gib) else cache_gib,
            **options,
        )

    def _info(self, path: str, task: str, **others: Any) -> ModelInfo:
        """Returns the description of the model at a path, for this task."""
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
        """Converts an array to a tensor, floats in the model's dtype; returns any other value unchanged."""
        made = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        is_float = isinstance(made, Tensor) and made.is_floating_point()
        return made.to(self._model.dtype) if is_float else made

    @abstractmethod
    def _start(self, job: Any, on_delta: Callable[[Any], object] | None) -> tuple[Future[Any], Callable[[Any], Any]]:
        """Submits a job to the engine. Returns its future, and a function that makes the job's result of the future's.

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
        """Submits a job. `cancel()` of the returned future frees its slots at the next step.

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
            if self._engine.failure is not None:  # it failed meanwhile, and is therefore closed
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
        """Reports a finished request. The engine's thread calls this."""
        if future.cancelled():
            return
        error = future.exception()
        try:
            made = None if error is not None else result_of(future.result())
        except Exception as failure:  # only this request fails: the thread serves the others
            error, made = failure, None
        if made is None:
            assert error is not None
            on_error(_failed() if error is self._engine.failure else error)
        else:
            on_done(made)


def cache_share(models: int) -> float:
    """Returns the GiB of KV cache for one of this many models, from the memory that is free with its weights loaded."""
    return max(SHARE_FOR_CACHE * free_host_memory() / max(models, 1), LEAST_CACHE) / 2**30


def _failed() -> Unavailable:
    """Returns the error for requests of a failed engine: its process ends, and the server starts another one."""
    return Unavailable("the process of the model has failed: try again", retry_after=5)
