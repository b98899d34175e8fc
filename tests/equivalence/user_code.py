"""Code of the user's: what raises, what listens, and the loops that call it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import fastgen
from tests.equivalence.captured import on_the_cpu
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


class Never(StoppingCriteria):
    """Ends no sequence."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Listens(BaseStreamer):
    """Keeps what it is given, for any number of sequences."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        self.heard.append(value.tolist())

    def end(self) -> None:
        self.heard.append("end")


@contextlib.contextmanager
def loop_of(where: str) -> Iterator[None]:
    """The library's loop, or a captured step."""
    with on_the_cpu() if where == "captured" else contextlib.nullcontext():
        fastgen.enable(captured_step="auto" if where == "captured" else "never")
        yield


def assert_passed_on(family: Any, options: dict[str, Any], mine: Raises, calls: int = AT) -> None:
    """Asserts that the very object that is raised reaches the caller, and nothing is called again or reported."""
    with warnings.catch_warnings(), pytest.raises(type(mine.error)) as raised:
        warnings.simplefilter("error", RuntimeWarning)
        run(family.build(), family.make_inputs(batch=1), lambda: options)
    assert raised.value is mine.error
    assert mine.calls == calls
    assert fallbacks() == {}
