"""Code of the user's that raises: the forms that it comes in, and the places where `generate` calls it."""

from __future__ import annotations

import contextlib
import functools
import operator
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import PrefixConstrainedLogitsProcessor
from transformers.generation.streamers import BaseStreamer

import fastgen
from tests.equivalence.captured import on_the_cpu
from tests.equivalence.cases import BEAM, SAMPLE
from tests.equivalence.check import fallbacks, run
from tests.equivalence.models import BY_NAME

BART, LLAMA = BY_NAME["bart"], BY_NAME["llama"]


AT = 3  # the call of the user's code that raises


class MyError(Exception):
    pass


class Raises:
    """Counts how often it is called, and raises the third time, from a function further down."""

    def __init__(self, error: BaseException) -> None:
        self.calls = 0
        self.error = error

    def hit(self, result: Any = None) -> Any:
        self.calls += 1
        if self.calls == AT:
            self.fail()
        return result

    def fail(self) -> None:
        raise self.error


class Listens(BaseStreamer):
    """Keeps what it is given, for any number of sequences."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        self.heard.append(value.tolist())

    def end(self) -> None:
        self.heard.append("end")


# ---- the forms that callable code comes in, for a function that is given `positional` arguments


def _function(mine: Raises, body: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        mine.hit()
        return body(*args)

    return function


def partial_form(mine: Raises, body: Callable[..., Any]) -> Any:
    def function(mine: Raises, *args: Any, **kwargs: Any) -> Any:
        mine.hit()
        return body(*args)

    return functools.partial(function, mine)


def _callable_object(mine: Raises, body: Callable[..., Any]) -> Any:
    class Callable:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            mine.hit()
            return body(*args)

    return Callable()


def _method_without_self(mine: Raises, body: Callable[..., Any]) -> Any:
    class Owner:
        def method(this, *args: Any, **kwargs: Any) -> Any:
            mine.hit()
            return body(*args)

    return Owner().method


def _class_method(mine: Raises, body: Callable[..., Any]) -> Any:
    class Owner:
        @classmethod
        def method(cls, *args: Any, **kwargs: Any) -> Any:
            mine.hit()
            return body(*args)

    return Owner.method


def _decorated(mine: Raises, body: Callable[..., Any]) -> Any:
    @functools.cache
    def cached(*args: Any) -> Any:
        mine.hit()
        return body(*args)

    return cached


def _mock(mine: Raises, body: Callable[..., Any]) -> Any:
    return Mock(spec=lambda *args: None, side_effect=_function(mine, body))


def _without_frames(mine: Raises, body: Callable[..., Any]) -> Any:
    """Nothing of it leaves a frame of its own on the stack: `methodcaller` and `partial` are written in C."""

    class Steps:
        def __len__(this) -> int:
            return mine.hit(1)

    steps = Steps()

    class Callable(functools.partial):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            operator.length_hint(steps)
            return body(*args)

    return Callable(print)


FORMS = {
    "function": _function,
    "partial": partial_form,
    "callable object": _callable_object,
    "method without self": _method_without_self,
    "class method": _class_method,
    "decorated": _decorated,
    "mock": _mock,
    "subclass of partial": _without_frames,
}


# ---- where the code goes


def _as_processor(call: Callable[..., Any]) -> dict[str, Any]:
    return {**BEAM, "logits_processor": [call]}


def _as_criterion(call: Callable[..., Any]) -> dict[str, Any]:
    return {**SAMPLE, "stopping_criteria": [call]}


def _as_prefix(call: Callable[..., Any]) -> dict[str, Any]:
    return {**BEAM, "prefix_allowed_tokens_fn": call}


def _as_prefix_of_a_processor(call: Callable[..., Any]) -> dict[str, Any]:
    return {**BEAM, "logits_processor": [PrefixConstrainedLogitsProcessor(call, 4)]}


def _as_streamer(call: Callable[..., Any]) -> dict[str, Any]:
    return {"streamer": SimpleNamespace(put=call, end=lambda: None)}


PLACES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "processor": (_as_processor, lambda tokens, scores: scores),
    "criterion": (_as_criterion, lambda tokens, scores: torch.zeros(tokens.shape[0], dtype=torch.bool)),
    "prefix": (_as_prefix, lambda row, tokens: list(range(20))),
    "prefix of a processor": (_as_prefix_of_a_processor, lambda row, tokens: list(range(20))),
    "streamer": (_as_streamer, lambda value: None),
}


@contextlib.contextmanager
def loop_of(where: str) -> Iterator[None]:
    """The library's loop, or a captured step."""
    with on_the_cpu() if where == "captured" else contextlib.nullcontext():
        fastgen.enable(captured_step="auto" if where == "captured" else "never")
        yield


def assert_passed_on(family: Any, options: dict[str, Any], mine: Raises, calls: int = AT) -> None:
    """What is raised reaches the caller, the very object, and nothing is called again or reported."""
    with warnings.catch_warnings(), pytest.raises(type(mine.error)) as raised:
        warnings.simplefilter("error", RuntimeWarning)
        run(family.build(), family.make_inputs(batch=1), lambda: options)
    assert raised.value is mine.error
    assert mine.calls == calls
    assert fallbacks() == {}
