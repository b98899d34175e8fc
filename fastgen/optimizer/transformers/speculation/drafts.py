"""What drafts tokens: the model itself, with its weights in few bits or with fewer layers, or what is in the prompt."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from fastgen.decoding.shared import CannotBeCaptured
from fastgen.decoding.speculation.draft_length import Schedule
from fastgen.decoding.speculation.own_weights import OwnWeights, versions
from fastgen.optimizer.transformers.call import LINEAR_LAYERS


class DraftKey(NamedTuple):
    """What of a draft is frozen in a captured step."""

    kind: Hashable
    samples: bool  # it draws its tokens, as the model does
    together: bool  # all rows take as many tokens as each other


class Draft:
    """Drafts tokens for the rows of one call.

    Attributes:
        kind: what of it is frozen in a captured step.
        is_model: it draws its tokens where the model does.
        schedule: how many tokens to draft, where the user has said it.
        asked_for: the call itself asks for a draft; a step is recorded for it whether or not others follow.
    """

    kind: Hashable
    is_model = True
    asked_for = False
    schedule: Schedule | None = None

    def begin(self, step: Any, prompt: Any) -> None:
        """The first token has been chosen."""

    def propose(self, step: Any, model: Any, most: int) -> int:
        """Writes tokens behind the rows of `step`, and into `step.counts` how many; returns the most of any row."""
        raise NotImplementedError

    def take(self, step: Any) -> None:
        """The check is done: the rows have gone on."""


class _OwnModelDraft(Draft):
    """The model itself, in a context in which it takes less time."""

    def _context(self) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def propose(self, step: Any, model: Any, most: int) -> int:
        for _ in range(most):
            step.draft(model, self._context)
        step.counts.fill_(most)
        return most


class OwnWeightsDraft(_OwnModelDraft):
    """The model with its own weights in few bits."""

    def __init__(self, model: Any, precision: str, group_size: int) -> None:
        if model.device.type != "cpu":
            raise CannotBeCaptured("a draft with weights in few bits needs a CPU")
        self._model, self._form = model, (precision, group_size)
        self._weights: OwnWeights | None = None

    @property
    def kind(self) -> Hashable:
        return "own weights", *self._form, versions(self._model)

    def begin(self, step: Any, prompt: Any) -> None:
        try:
            self._weights = OwnWeights.of(self._model, LINEAR_LAYERS, *self._form)
        except ValueError as error:
            raise CannotBeCaptured(str(error)) from error

    def _context(self) -> AbstractContextManager[Any]:
        assert self._weights is not None, "begin comes first"
        return self._weights.used()


class EarlyExitDraft(_OwnModelDraft):
    """The first layers of the model, and its output layer (`assistant_early_exit` of `generate`)."""

    asked_for = True

    def __init__(self, model: Any, count: int) -> None:
        self._base, self._count = getattr(model, model.base_model_prefix), count
        self.kind = "early exit", count

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        config = self._base.config
        layers, config.num_hidden_layers = config.num_hidden_layers, self._count
        try:
            yield
        finally:
            config.num_hidden_layers = layers
