"""Runs `generate` with the original code and with FastGen, and compares everything that comes back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

import fastgen
from fastgen import settings
from fastgen.optimizer.transformers.captured import loop

ENTRY_POINT = "transformers.generate"
TOLERANCE = 1e-4


def run(
    model: Any, inputs: dict[str, Any], options: dict[str, Any] | Callable[[], dict[str, Any]], seed: int = 0
) -> Any:
    """One call from a fixed random state, on copies of the inputs. Options that hold state come from a function."""
    torch.manual_seed(seed)
    arguments = copy.deepcopy(inputs)
    arguments.update(options() if callable(options) else copy.copy(options))
    return model.generate(**arguments)


def both(model: Any, inputs: dict[str, Any], options: dict[str, Any] | Callable[[], dict[str, Any]]) -> tuple[Any, Any]:
    """The results of the original code and of FastGen."""
    options = _for_a_captured_step(model, options)
    with fastgen.disabled():
        original = run(model, inputs, options)
    return original, run(model, inputs, options)


def _for_a_captured_step(
    model: Any, options: dict[str, Any] | Callable[[], dict[str, Any]]
) -> dict[str, Any] | Callable[[], dict[str, Any]]:
    """The options without the scores of each step, where a captured step may serve: it does not keep them.

    Where tokens are drawn they stay: with a captured step, other ones would be drawn.
    """
    if callable(options) or options.get("do_sample") or not loop._is_for(model.device):
        return options
    if settings.current().captured_step == "never" or any(options.get(name) for name in loop._RECORDS[1:]):
        return options
    return {**options, "output_scores": False}


def check(model: Any, inputs: dict[str, Any], options: dict[str, Any] | Callable[[], dict[str, Any]]) -> Any:
    """Asserts that both results are the same, and returns one of them."""
    original, ours = both(model, inputs, options)
    assert_same(original, ours)
    return ours


def assert_same(original: Any, ours: Any, where: str = "result") -> None:
    """Asserts that two results agree: integers and structure exactly, other numbers within the tolerance."""
    assert type(ours) is type(original), where
    if isinstance(original, torch.Tensor):
        assert (ours.shape, ours.dtype, ours.device) == (original.shape, original.dtype, original.device), where
        if original.is_floating_point():
            torch.testing.assert_close(
                ours, original, atol=TOLERANCE, rtol=0, equal_nan=True, msg=lambda m: f"{where}: {m}"
            )
        else:
            assert ours.tolist() == original.tolist(), where
    elif isinstance(original, dict):
        assert list(ours) == list(original), where
        for key, value in original.items():
            assert_same(value, ours[key], f"{where}.{key}")
    elif isinstance(original, (tuple, list)):
        assert len(ours) == len(original), where
        for index, (left, right) in enumerate(zip(original, ours, strict=True)):
            assert_same(left, right, f"{where}[{index}]")
    elif type(original).__module__.startswith("transformers."):
        # Caches and their layers, states of recurrent models.
        assert_same(vars(original), vars(ours), where)
    elif isinstance(original, MethodType):
        assert ours.__func__ is original.__func__, where
    else:
        assert ours == original, where


def accelerated() -> int:
    """Calls that ran accelerated since the last `fastgen.reset_stats()`."""
    return fastgen.stats().get(ENTRY_POINT, {}).get("accelerated", 0)


def fallbacks() -> dict[str, int]:
    """Calls that fell back since then, by reason."""
    return fastgen.stats().get(ENTRY_POINT, {}).get("fallback", {})
