"""What the tests of speculative decoding share."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import fastgen
from fastgen.decoding import layers
from fastgen.decoding.speculation import draft_length
from fastgen.decoding.speculation.draft_length import DraftLength
from fastgen.ops import gpu as operators
from fastgen.optimizer.transformers.captured import graph_cache
from fastgen.optimizer.transformers.speculation import decoding
from fastgen.optimizer.transformers.speculation.decoding import ENTRY_POINT
from fastgen.optimizer.transformers.speculation.drafting import LENGTHS
from fastgen.optimizer.transformers.speculation.drafts import SelfDraft
from tests import near_ties
from tests.equivalence.captured import record_from
from tests.equivalence.models import LONG
from tests.equivalence.others import KNOWN, made

GREEDY = {"do_sample": False, "num_beams": 1, "max_new_tokens": 24}
LOOKUP = {"prompt_lookup_num_tokens": 4}
DRAFTS = ["int8", "int4", "lookup", "assistant", "early exit"]
# Models of which the library drafts with the first layers.
EARLY_EXIT = ("llama", "qwen2", "gemma", "opt")


def record_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are recorded in the first call, and layers of any size have low-bit drafts, in calls of any length."""
    record_from(monkeypatch, 0)
    monkeypatch.setattr(decoding, "can_begin", lambda *_: True)
    monkeypatch.setattr(draft_length, "MOST_CALLS", 0)
    # Tests share models, and what drafts gained in others, by the clock, is not for this one to know.
    monkeypatch.setattr(decoding, "_back_offs", weakref.WeakKeyDictionary())
    monkeypatch.setattr(layers, "MIN_NARROW", 1)
    monkeypatch.setattr(SelfDraft, "is_prepared", False)
    monkeypatch.setattr(operators, "is_interpreted", lambda: False)
    fastgen.enable(assisted_sampling="fastgen")
    graph_cache.drop_all()
    fastgen.reset_stats()


def draft_any_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations draft different numbers of tokens, none among them, whatever that gains."""
    lengths = itertools.cycle([4, 0, 8, 2, 4, 4, 0, 0, 2, 8, 0, 0, 0, 4])

    def choose(self: DraftLength, rows: Any, most: int, available: Any = None) -> int:
        wanted, costs = next(lengths), self.costs
        if costs.is_ragged:
            return costs.lengths[wanted.bit_length() - (wanted > 0)] if any(available or ()) else 0
        chosen = min(wanted, most, max(available, default=0) if available is not None else most)
        if available is not None:
            return min(length for length in LENGTHS if length >= chosen)
        return max(length for length in LENGTHS if length <= chosen and costs.allows(length))

    monkeypatch.setattr(DraftLength, "choose", choose)


def counts() -> dict[str, int]:
    return {"accelerated": 0, "accepted": 0, "drafted": 0, "verifies": 0} | fastgen.stats().get(ENTRY_POINT, {})


def not_used() -> dict[str, int]:
    """Why calls did not draft."""
    return fastgen.stats()[ENTRY_POINT].get("not used", {})


def assert_speculates(calls: int) -> None:
    found = counts()
    assert found["accelerated"] == calls, fastgen.stats()
    assert not found.get("not used"), found


def disturbed(model: Any, spread: float) -> Any:
    """A model that mostly says the same."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + spread * torch.randn(parameter.shape, generator=generator))
    return other


def draft_of(draft: str, model: Any = None, spread: float = 0.01) -> dict[str, Any]:
    """The options of a call that drafts in this way; FastGen's own drafts are on or off after it.

    Args:
        model: what an assistant is made of, with weights that differ by `spread`.
    """
    fastgen.enable(self_speculation=draft if draft.startswith("int") else "off")
    if draft == "lookup":
        return {"prompt_lookup_num_tokens": 8}
    if draft == "assistant":
        return {"assistant_model": disturbed(model, spread)}
    return {"assistant_early_exit": 1} if draft == "early exit" else {}


def of_its_own(name: str, *args: Any, **inputs: Any) -> tuple[Any, dict[str, Any]]:
    """A model of the test's own, and inputs for it: see `Family.make_inputs`."""
    model, given = made(name, *args, **inputs)
    return copy.deepcopy(model), given


def configured(name: str, **config: Any) -> Any:
    """A model of this family with another configuration."""
    family = KNOWN[name]
    return dataclasses.replace(family, config=family.config | config).build()


def same(model: Any, inputs: dict[str, Any], options: dict[str, Any], **draft: Any) -> None:
    """Asserts that a greedy call returns the tokens of the original code without a draft, near-ties excepted."""

    def run() -> Any:
        asked = draft if fastgen.patching.is_active() else {}
        return model.generate(**copy.deepcopy(inputs), **{**GREEDY, **options, **asked})

    near_ties.check(run)


def all_speculate(model: Any, inputs: dict[str, Any], options: dict[str, Any], calls: int = 2, **draft: Any) -> None:
    """Asserts that each of some equal calls drafts, and is as `same` wants it."""
    for _ in range(calls):
        same(model, inputs, options, **draft)
    assert_speculates(calls)


def speculates(
    name: str, draft: str, options: dict[str, Any] | None = None, batches: Sequence[int] = (3, 3), length: int = LONG
) -> None:
    """Asserts that calls of a model on so many inputs each draft, and are as `same` wants them."""
    model, asked = KNOWN[name].build(), draft_of(draft, KNOWN[name].build())
    for batch in batches:
        same(model, KNOWN[name].make_inputs(batch, length), options or {}, **asked)
    assert_speculates(len(batches))
