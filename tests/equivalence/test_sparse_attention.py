"""Sparse attention, whose indexer chooses the positions that attention reads (DeepSeek V3.2, GLM-5)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import fastgen
from fastgen import releases, settings
from fastgen.decoding.kv import growing
from fastgen.optimizer.transformers.index_layers import StepIndexedLayer
from tests import near_ties
from tests.equivalence import speculation
from tests.equivalence.captured import captures, reasons, record_programs
from tests.equivalence.check import accelerated, chat, check, fallbacks
from tests.equivalence.others import KNOWN, LATER
from tests.noting import noted

NAMES = [family.name for family in LATER if "index_topk" in family.config]
NEW = {"max_new_tokens": 20, "min_new_tokens": 16}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True},
    "several samples": {"do_sample": True, "num_return_sequences": 2},
}
SCORES = {"return_dict_in_generate": True, "output_scores": True}

pytestmark = pytest.mark.skipif(not NAMES, reason="this release has no such model")


@pytest.fixture(autouse=True)
def programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    record_programs(device, monkeypatch)


@pytest.mark.parametrize("step", ["always", "never"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_the_librarys(name: str, way: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the prefix of an input is shared, and where fewer positions are stored than are chosen."""
    monkeypatch.setattr(growing, "MIN_SHARED_BYTES", 0)
    fastgen.enable(captured_step=step)
    model = KNOWN[name].build()
    for shape in ({}, {"length": 60}, {"length": 6, "batch": 2}, {"batch": 1}):
        check(model, KNOWN[name].make_inputs(**shape), {**NEW, **WAYS[way], **SCORES})
    assert accelerated() == 4 and not fallbacks()
    assert captures() == (4 if step == "always" else 0), reasons()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("way", ["greedy", "beams"])
def test_attention_implementations(attention: str, way: str) -> None:
    family = KNOWN[NAMES[0]]
    check(family.build(attention), family.make_inputs(), {**NEW, **WAYS[way]})
    assert captures() == 1, reasons()


def test_a_step_that_chose_all_positions_serves_longer_sequences() -> None:
    """Its mask said nothing new while it was watched."""
    family = KNOWN[NAMES[0]]
    for length in (4, 5, 40):
        check(family.build(), family.make_inputs(length=length), {**NEW, "do_sample": False})
    assert captures() == 3, reasons()


def test_more_tokens_than_buffers_have_at_first() -> None:
    family = KNOWN[NAMES[0]]
    check(family.build(), family.make_inputs(batch=2), {"max_new_tokens": 90, "min_new_tokens": 90, "do_sample": False})
    check(family.build(), family.make_inputs(batch=2, length=150), {**NEW, "do_sample": False})
    assert captures() == 2, reasons()


@pytest.mark.parametrize("name", NAMES[:2])
def test_a_cache_is_handed_on(name: str) -> None:
    """From turn to turn, with the keys of the indexer."""
    model, tokens = KNOWN[name].build(), KNOWN[name].make_inputs(batch=1, padding=None)["input_ids"]

    def turns() -> Any:
        cache = DynamicCache(config=model.config)
        found = chat(model, tokens, cache, lambda turn: {**NEW, "do_sample": False})
        return [found, [getattr(layer, "indexer_keys", None) for layer in cache.layers]]

    near_ties.check(turns)
    assert accelerated() == 3 and not fallbacks(), fallbacks()


@pytest.mark.parametrize("way", WAYS)
def test_a_returned_cache(way: str) -> None:
    family = KNOWN[NAMES[0]]
    check(family.build(), family.make_inputs(), {**NEW, **WAYS[way], "return_dict_in_generate": True})
    assert captures() == 1, reasons()


def test_zeros_are_chosen_as_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """All scores of the indexer are zero, and which of them `topk` returns depends on the number of scores."""
    family = KNOWN[NAMES[0]]
    model = copy.deepcopy(family.build())
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.indexer.weights_proj.weight)
    steps = noted(monkeypatch, StepIndexedLayer, "update_indexer", lambda layer, keys: keys.shape)
    for length in (44, 37, 21):
        for way in ("greedy", "beams"):
            check(model, family.make_inputs(length=length), {**NEW, **WAYS[way], **SCORES})
    assert captures() == 6 and steps, reasons()


def test_positions_of_an_indexer_are_left_to_the_library() -> None:
    family = KNOWN[NAMES[0]]
    cache = DynamicCache(config=family.build().config)
    cache.layers[0].indexer_position_ids = torch.zeros(3, 1, 0, dtype=torch.int64)
    inputs = {**family.make_inputs(batch=1), **releases.with_cache(cache)}
    family.build().generate(**inputs, **NEW, do_sample=False)
    assert not accelerated() and list(fallbacks()) == ["the cache has layers of type DynamicIndexedLayer"]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_drafts(name: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows accept different numbers of tokens, and keep rejected ones in their memory for a while."""
    speculation.record_at_once(monkeypatch)
    speculation.draft_any_lengths(monkeypatch)
    options = {"do_sample": False, "max_new_tokens": 40, "min_new_tokens": 20}
    with settings.changed(self_speculation="int8"):
        check(KNOWN[name].build(), KNOWN[name].make_inputs(batch=batch), options)
    speculation.assert_speculates(1)
    assert speculation.counts()["accepted"] < speculation.counts()["drafted"]
