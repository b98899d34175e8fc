"""Runs a generator with FairSeq's own code and with FastGen, and compares all that comes back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

import fastgen

ENTRY_POINT = "fairseq.generate"
TOLERANCE = 1e-4

Hypotheses = list[list[dict[str, torch.Tensor]]]


def both(make: Callable[[], Any], sample: dict[str, Any], seed: int = 0, **arguments: Any) -> tuple[Any, Any]:
    """The hypotheses of FairSeq's own code and of FastGen, each from a new generator and the same random state."""

    def run() -> Hypotheses:
        generator = make()
        torch.manual_seed(seed)
        return generator.generate([], copy.deepcopy(sample), **copy.deepcopy(arguments))

    with fastgen.disabled():
        original = run()
    return original, run()


def check(make: Callable[[], Any], sample: dict[str, Any], seed: int = 0, **arguments: Any) -> Hypotheses:
    """Asserts that both give the same hypotheses, and returns them."""
    original, ours = both(make, sample, seed, **arguments)
    assert_same(original, ours)
    return ours


def assert_same(original: Hypotheses, ours: Hypotheses) -> None:
    """Asserts that tokens and alignments are equal, and scores and attention within the tolerance."""
    assert [len(hypotheses) for hypotheses in ours] == [len(hypotheses) for hypotheses in original]
    for source, (left, right) in enumerate(zip(original, ours, strict=True)):
        for rank, (want, have) in enumerate(zip(left, right, strict=True)):
            where = f"source {source}, hypothesis {rank}"
            assert have.keys() == want.keys(), where
            assert have["tokens"].tolist() == want["tokens"].tolist(), where
            for name in ("score", "positional_scores", "attention", "alignment"):
                assert_close(want[name], have[name], f"{where}: {name}")


def assert_close(want: Any, have: Any, where: str) -> None:
    if isinstance(want, list):  # a soft alignment: probabilities as text
        want, have = (torch.tensor([list(map(float, row)) for row in rows]) for rows in (want, have))
    if not isinstance(want, torch.Tensor):
        assert have == want, where
    elif want.is_floating_point():
        assert have.shape == want.shape and have.dtype == want.dtype, where
        torch.testing.assert_close(have, want, atol=TOLERANCE, rtol=1e-5, msg=lambda m: f"{where}: {m}")
    else:
        assert have.tolist() == want.tolist(), where


def accelerated() -> int:
    """Calls that ran accelerated since the last `fastgen.reset_stats()`."""
    return fastgen.stats().get(ENTRY_POINT, {}).get("accelerated", 0)


def fallbacks() -> dict[str, int]:
    """Calls that fell back since then, by reason."""
    return fastgen.stats().get(ENTRY_POINT, {}).get("fallback", {})
