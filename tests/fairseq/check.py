"""Runs a generator with FairSeq's own code and with FastGen, and compares all that comes back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

import fastgen
from tests import near_ties
from tests.near_ties import assert_same  # noqa: F401  (for the tests)

ENTRY_POINT = "fairseq.generate"

Hypotheses = list[list[dict[str, torch.Tensor]]]


def caller(
    make: Callable[[], Any], sample: dict[str, Any], seed: int = 0, **arguments: Any
) -> Callable[[], Hypotheses]:
    """A call of a new generator, from the same random state each time."""

    def call() -> Hypotheses:
        generator = make()
        torch.manual_seed(seed)
        return generator.generate([], copy.deepcopy(sample), **copy.deepcopy(arguments))

    return call


def both(make: Callable[[], Any], sample: dict[str, Any], **arguments: Any) -> tuple[Hypotheses, Hypotheses]:
    """The hypotheses of FairSeq's own code and of FastGen."""
    call = caller(make, sample, **arguments)
    with fastgen.disabled():
        original = call()
    return original, call()


def check(make: Callable[[], Any], sample: dict[str, Any], **arguments: Any) -> Hypotheses:
    """Asserts that both give the same hypotheses, near-ties excepted, and returns them."""
    return near_ties.check(caller(make, sample, **arguments))


def accelerated() -> int:
    """Calls that ran accelerated since the last `fastgen.reset_stats()`."""
    return fastgen.stats().get(ENTRY_POINT, {}).get("accelerated", 0)


def fallbacks() -> dict[str, int]:
    """Calls that fell back since then, by reason."""
    return fastgen.stats().get(ENTRY_POINT, {}).get("fallback", {})
