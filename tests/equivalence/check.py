"""Runs `generate` with the original code and with FastGen, and compares everything that comes back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

import fastgen
from fastgen import settings
from fastgen.decoding.captured import graph
from fastgen.optimizer.transformers import loop
from fastgen.optimizer.transformers.captured import graph_cache
from tests import near_ties
from tests.near_ties import assert_same  # noqa: F401  (for the tests)

ENTRY_POINT = "transformers.generate"


def run(
    model: Any, inputs: dict[str, Any], options: dict[str, Any] | Callable[[], dict[str, Any]], seed: int = 0
) -> Any:
    """One call from a fixed random state, on copies of the inputs. Options that hold state come from a function."""
    torch.manual_seed(seed)
    arguments = copy.deepcopy(inputs)
    arguments.update(options() if callable(options) else copy.copy(options))
    return model.generate(**arguments)


def _for_a_captured_step(
    model: Any, options: dict[str, Any] | Callable[[], dict[str, Any]]
) -> dict[str, Any] | Callable[[], dict[str, Any]]:
    """The options without the scores of each step, where a captured step may serve: it does not keep them.

    Where tokens are drawn they stay: with a captured step on a GPU, other ones would be drawn.
    """
    draws_others = graph.waits(model.device) and not callable(options) and options.get("do_sample")
    if callable(options) or draws_others or (model.device.type == "cpu" and graph_cache.PAYS_FROM):
        return options
    if settings.current().captured_step == "never" or any(options.get(name) for name in loop._RECORDS[1:]):
        return options
    return {**options, "output_scores": False}


def check(model: Any, inputs: dict[str, Any], options: dict[str, Any] | Callable[[], dict[str, Any]]) -> Any:
    """Asserts that both results are the same, near-ties excepted, and returns that of FastGen."""
    options = _for_a_captured_step(model, options)
    return near_ties.check(lambda: run(model, inputs, options))


def accelerated() -> int:
    """Calls that ran accelerated since the last `fastgen.reset_stats()`."""
    return fastgen.stats().get(ENTRY_POINT, {}).get("accelerated", 0)


def fallbacks() -> dict[str, int]:
    """Calls that fell back since then, by reason."""
    return fastgen.stats().get(ENTRY_POINT, {}).get("fallback", {})
