"""One call of `generate` while it runs: what the hooks know of each other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
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
from fastgen.interrupts import undoing
from fastgen.ops import elementwise
from fastgen.ops._library import warn_if_missing
from fastgen.optimizer.transformers import row_adapters
from fastgen.optimizer.transformers.cache import ExchangedLayers
from fastgen.optimizer.transformers.compaction import BatchCompaction
from fastgen.optimizer.transformers.models import rows_depend_on_each_other
from fastgen.optimizer.transformers.user_code import Errors

ENTRY_POINT = counters.GENERATE
BEYOND_WINDOW = releases.Usual("more positions than the sliding window")

# The classes of linear layers, and whether their weight is stored transposed.
LINEAR_LAYERS = {**LINEAR, Conv1D: True}


def _gelu_tanh(x: Tensor) -> Tensor:
    # What is recorded is torch's operator: it becomes FastGen's later.
    has_memory = not (is_capturing() or torch._C._functorch.is_functorch_wrapped_tensor(x))
    return elementwise.gelu_tanh(x) if has_memory else F.gelu(x, approximate="tanh")


# Activations that pass over their input operation by operation, and the one operation that they are.
_ACTIVATIONS: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {NewGELUActivation: _gelu_tanh}


def fast_layers(model: Any) -> FastLayers:
    """The faster form of the model's layers, a context."""
    return FastLayers.of(model, LINEAR_LAYERS, _ACTIVATIONS, row_adapters.form_of)


class NotAccelerated(Exception):
    """This call is not supported; its argument says why. Nothing has been changed yet."""


class Unexpected(CannotBeCaptured):
    """A step cannot be captured because a model does something that those of tested releases do not do."""


class DoesNotPay(CannotBeCaptured):
    """The call is too short for recording its step. `note` gets how many tokens it has generated."""

    def __init__(self, note: Callable[[int], None]) -> None:
        super().__init__(counters.NOT_YET)
        self.note = note


def fall_back(model: Any, reason: str) -> None:
    """A call of the model goes to the original code. Raises FallbackError in strict mode."""
    counters.count_fallback(ENTRY_POINT, reason)
    releases.note(model, reason)


@dataclass(eq=False)
class Call:
    """State of one `generate` call, found by the inner hooks through a context variable: threads do not meet."""

    _active: ClassVar[ContextVar[Call | None]] = ContextVar("fastgen_call", default=None)

    model: Any
    scores_are_private: bool  # nobody but the decoding loop holds those that the processors get
    cache_is_the_users: bool  # it was passed in, and is looked at after the call
    in_inference_mode: bool = field(default_factory=torch.is_inference_mode_enabled)  # what made it
    users_errors: Errors = field(default_factory=Errors)  # what processors, criteria and other code of theirs raised
    runs_user_code: bool | None = None  # None until the decoding loop has begun, where that is looked at
    accelerated: bool = False
    declined: bool = False
    has_failed: bool = False  # FastGen's own code has raised something while it decided
    has_intervened: bool = False  # what the library computes is no longer all its own: an error may be FastGen's
    takes_best: bool = False  # it is an accelerated beam search that takes the best continuations, and draws none
    store: ExchangedLayers | None = None  # once the call is accelerated
    compaction: BatchCompaction | None = None  # the rows that the model runs on, where finished inputs may leave
    entering: Any = None  # an `Entering`, where its inputs are to enter slots
    draft: Any = None  # what the call asks to draft its tokens with
    prefilled: Any = None  # the outputs of the prefill, made ahead of the library's loop
    is_to_be_captured: bool = False  # the prefill is for a captured step
    reads_too_much: bool = False  # so that only a captured step is to go on from there
    is_of_own_generate: bool = False  # the model's own `generate` has begun the loop, with whatever inputs that takes
    cache_is_dropped: bool = False  # nobody looks at the one that the call returns
    _returns_cache: bool = False
    _packed: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.layers = fast_layers(self.model)

    @cached_property
    def rows_depend_on_each_other(self) -> bool:
        """Whether what the model says of one input depends on the others of the batch."""
        return rows_depend_on_each_other(self.model)

    @contextlib.contextmanager
    def decides(self) -> Iterator[None]:
        """Inside this block FastGen decides, and changes nothing: whatever is raised is its own failure."""
        try:
            yield
        except (NotAccelerated, CannotBeCaptured):
            raise
        except Exception as error:
            self.has_failed = not self.users_errors.caused(error)
            raise

    @classmethod
    def current(cls, model: Any = None) -> Call | None:
        """The innermost call that runs in this thread; with a model, only if it is a call of that model."""
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
        """Whether somebody may look at the cache behind the call: it is in what that returns, or the user's."""
        return self.cache_is_the_users or (self._returns_cache and not self.cache_is_dropped)

    def decline(self, reason: str) -> None:
        """This call goes on with the original code."""
        self.accelerated, self.declined = False, True
        self.takes_best = False
        self._packed.close()
        fall_back(self.model, reason)

    def hand_back(self) -> None:
        """No captured step goes on from the prefill: where others would read too much, the library's loop does."""
        if self.reads_too_much and self.store is not None:
            self.store.hand_over()
            self.store = self.compaction = None
            self.decline(BEYOND_WINDOW)

    def accelerate(self, config: Any) -> None:
        """This call, of this generation config, goes on with FastGen's store in its cache."""
        self.accelerated = self.has_intervened = True
        self.takes_best = config.num_beams > 1 and not config.do_sample
        self._returns_cache = bool(config.return_dict_in_generate)

    def finish(self) -> None:
        """The call is done: the cache gets the library's own layers back."""
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
        """FastGen's part of the call failed: everything back as it was before."""
        self._packed.close()
        self.compaction, self.prefilled, self.takes_best = None, None, False
        if self.store is not None:
            self.store.restore()
            self.store = None

    def break_off(self) -> None:
        """The call was interrupted, or the user's code raised: a cache of the user's keeps what was stored so far."""
        if self.store is not None and self.cache_is_the_users:
            self.store.hand_over()
            self.store = None
        self.abandon()
