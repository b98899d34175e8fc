"""The state of one running call of `generate`, which its hooks share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D

from fastgen import counters, releases
from fastgen.decoding.captured.recording import is_capturing
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.decoding.layers import LINEAR, FastLayers
from fastgen.interrupts import cached_property, undoing
from fastgen.ops import elementwise
from fastgen.ops._library import warn_if_missing
from fastgen.optimizer.transformers import row_adapters
from fastgen.optimizer.transformers.cache import ExchangedLayers
from fastgen.optimizer.transformers.models import rows_depend_on_each_other
from fastgen.optimizer.transformers.user_code import Errors

ENTRY_POINT = counters.GENERATE
BEYOND_WINDOW = releases.Usual("more positions than the sliding window")

# Classes of linear layers, and whether they store their weight transposed.
LINEAR_LAYERS = {**LINEAR, Conv1D: True}


def _gelu_tanh(x: Tensor) -> Tensor:
    # A recording contains torch's operator, which a graph pass replaces by FastGen's later.
    has_memory = not (is_capturing() or torch._C._functorch.is_functorch_wrapped_tensor(x))
    return elementwise.gelu_tanh(x) if has_memory else F.gelu(x, approximate="tanh")


# Activations that run as a sequence of elementwise operations, and the single operation that replaces each.
_ACTIVATIONS: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {NewGELUActivation: _gelu_tanh}


def fast_layers(model: Any) -> FastLayers:
    """Returns a context that gives the model's layers their faster forms."""
    return FastLayers.of(model, LINEAR_LAYERS, _ACTIVATIONS, row_adapters.form_of)


class NotAccelerated(Exception):
    """The call is not supported; the argument says why. Nothing has been changed yet."""


class Unexpected(CannotBeCaptured):
    """A step cannot be captured because the model does something that no tested release does."""


class DoesNotPay(CannotBeCaptured):
    """The call is too short for capturing its step. `note` is called with the number of tokens that it generated."""

    def __init__(self, note: Callable[[int], None]) -> None:
        super().__init__(counters.NOT_YET)
        self.note = note


def fall_back(model: Any, reason: str) -> None:
    """Records that a call of the model falls back to the original code. Raises FallbackError in strict mode."""
    counters.count_fallback(ENTRY_POINT, reason)
    releases.note(model, reason)


@dataclass(eq=False)
class Call:
    """State of one `generate` call. Hooks find it through a context variable, so that threads do not interfere."""

    _active: ClassVar[ContextVar[Call | None]] = ContextVar("fastgen_call", default=None)

    model: Any
    scores_are_private: bool  # only the decoding loop holds the scores that processors get
    cache_is_the_users: bool  # the cache was passed in, and is read after the call
    in_inference_mode: bool = field(default_factory=torch.is_inference_mode_enabled)  # the mode in which the call began
    users_errors: Errors = field(default_factory=Errors)  # what the user's processors, criteria and other code raised
    runs_user_code: bool | None = None  # None until the decoding loop begins and finds out
    accelerated: bool = False
    declined: bool = False
    has_failed: bool = False  # FastGen's own code raised while it decided
    has_intervened: bool = False  # FastGen has changed the library's computation, so an error may be FastGen's
    takes_best: bool = False  # an accelerated beam search that takes the best continuations, and does not sample
    store: ExchangedLayers | None = None  # set once the call is accelerated
    compaction: Any = None  # a `BatchCompaction`: the rows that the model runs on, if finished inputs may leave
    entering: Any = None  # an `Entering`, if the call's inputs are to enter slots
    draft: Any = None  # the method of drafting that the call asks for
    prefilled: Any = None  # the outputs of a prefill made before the library's loop
    is_to_be_captured: bool = False  # the prefill is for a captured step
    reads_too_much: bool = False  # then only a captured step may go on after the prefill
    is_of_own_generate: bool = False  # the model's own `generate` has begun the loop, with inputs of its choice
    cache_is_dropped: bool = False  # nobody reads the cache that the call returns
    _returns_cache: bool = False
    _packed: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.layers = fast_layers(self.model)

    @cached_property
    def rows_depend_on_each_other(self) -> bool:
        """Whether the model's output for one input depends on the other inputs of the batch."""
        return rows_depend_on_each_other(self.model)

    @contextlib.contextmanager
    def decides(self) -> Iterator[None]:
        """A context in which FastGen decides, and changes nothing: any exception is its own failure."""
        try:
            yield
        except (NotAccelerated, CannotBeCaptured):
            raise
        except Exception as error:
            self.has_failed = not self.users_errors.caused(error)
            raise

    @classmethod
    def current(cls, model: Any = None) -> Call | None:
        """Returns the innermost call that runs in this thread; with a model, only if it is a call of that model."""
        call = cls._active.get()
        return call if call is not None and model in (None, call.model) else None

    def __enter__(self) -> Call:
        self._leaving = undoing(partial(self._leave, Call._active.get()))
        self._leaving.__enter__()
        with self.decides():
            self._packed.callback(self.layers.enter().leaving.close)
        Call._active.set(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._leaving.__exit__(*exception)

    def _leave(self, before: Call | None) -> None:
        Call._active.set(before)
        self._packed.close()
        self.users_errors.forget()

    @property
    def returns_cache(self) -> bool:
        """Whether the cache may be read after the call: because the call returns it, or because it is the user's."""
        return self.cache_is_the_users or (self._returns_cache and not self.cache_is_dropped)

    def decline(self, reason: str) -> None:
        """Makes this call continue with the original code. Beyond a sliding window, layers keep their faster forms,
        unless the cache is the user's: if one failed, what the library has stored there could not be undone.
        """
        self.accelerated, self.declined = False, True
        self.takes_best = False
        if reason is BEYOND_WINDOW:
            self.has_intervened = not self.cache_is_the_users
        if reason is not BEYOND_WINDOW or self.cache_is_the_users:
            self._packed.close()
        fall_back(self.model, reason)

    def hand_back(self) -> None:
        """Returns the call to the library's loop if no captured step follows and hooks would read too much."""
        if self.reads_too_much and self.store is not None:
            self.store.hand_over()
            self.store = self.compaction = None
            self.decline(BEYOND_WINDOW)

    def accelerate(self, config: Any) -> None:
        """Makes this call, with this generation config, continue with FastGen's layers in its cache."""
        self.accelerated = self.has_intervened = True
        self.takes_best = config.num_beams > 1 and not config.do_sample
        self._returns_cache = bool(config.return_dict_in_generate)

    def finish(self) -> None:
        """Finishes the call: gives the cache the library's own layers back."""
        if self.store is None:
            if not self.declined:
                fall_back(self.model, "the decoding loop did not go through _prefill")
            return
        if self.returns_cache:
            self.store.hand_over()
        else:
            self.store.restore()
        counters.count_accelerated(ENTRY_POINT)
        warn_if_missing(self.model.device)

    def abandon(self) -> None:
        """Restores everything to the state before the call, because FastGen's part of it failed."""
        self._packed.close()
        self.compaction, self.prefilled, self.takes_best = None, None, False
        if self.store is not None:
            self.store.restore()
            self.store = None

    def break_off(self) -> None:
        """Ends a call that was interrupted, or whose user code raised. A cache of the user's keeps what was stored."""
        if self.store is not None and self.cache_is_the_users:
            self.store.hand_over()
            self.store = None
        self.abandon()
