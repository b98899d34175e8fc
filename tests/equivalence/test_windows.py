"""Sliding windows that a call exceeds: a captured step reads no more than the library; without one, its layers do."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from fastgen import counters, releases
from fastgen.decoding.layer_forms import FloatLinear
from fastgen.ops.linear import choose
from fastgen.optimizer.transformers.cache_layers import SharedLayer
from fastgen.optimizer.transformers.captured import graph_cache, key
from tests import near_ties
from tests.equivalence.captured import captures, need_programs, reasons, record_from
from tests.equivalence.cases import draws_others
from tests.equivalence.check import accelerated, cache_with, check, fallbacks
from tests.equivalence.models import BY_NAME, LONG
from tests.equivalence.others import KNOWN
from tests.noting import noted

pytestmark = pytest.mark.sampled(skips=draws_others)

BEYOND = "more positions than the sliding window"
FAMILIES = {**BY_NAME, **KNOWN}
NAMES = ["mistral-short-window", "gemma2", "gemma3", "gpt-oss", "starcoder2"]
NEW: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "sequences": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "ends": {"eos_token_id": list(range(11, 40))},
    "returned": {"return_dict_in_generate": True, "output_scores": True},
}


def _behind_a_filled_cache(model: Any, inputs: dict[str, Any], filled: int, options: dict[str, Any]) -> Any:
    cache = cache_with(model, inputs["input_ids"][:, :filled])
    cache.batch_repeat_interleave(options.get("num_beams", 1))
    result = model.generate(**inputs, **{**NEW, **options}, **releases.with_cache(cache))
    return result, [(layer.get_seq_length(), layer.keys, layer.values) for layer in cache.layers]


def _record_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is recorded, and none is there."""
    record_from(monkeypatch, 10**6)
    graph_cache.drop_all()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("length", [3, LONG], ids=["short", "long"])
@pytest.mark.parametrize("name", NAMES)
def test_steps_are_captured(name: str, length: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the prompt is longer than the window, or what is generated goes beyond it. Rows have padding in front."""
    monkeypatch.setattr(key, "_MAX_FIRST_NEW", 16)
    family = FAMILIES[name]
    window = family.config["sliding_window"]
    assert window < LONG
    check(family.build(), family.make_inputs(3, length), {**NEW, "max_new_tokens": max(60, 2 * window), **options})
    assert captures() == accelerated() == 1, (reasons(), fallbacks())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("knows_model", [True, False], ids=["for-the-model", "plain"])
@pytest.mark.parametrize("more", [1, 4, 200])
@pytest.mark.parametrize("first", [5, LONG], ids=["short", "long"])
@pytest.mark.parametrize("name", ["mistral-short-window", "gemma3"])
def test_turns_of_a_chat(name: str, first: int, more: int, knows_model: bool) -> None:
    """The cache has what the library leaves there behind each call: the next one goes on behind that. One that is made
    without the model's config has no windows: it is the masks that have.
    """
    family = FAMILIES[name]
    model, inputs = family.build(), family.make_inputs(1, first, padding=None)
    question = family.make_inputs(1, more, padding=None)["input_ids"]

    def call() -> Any:
        cache = DynamicCache(config=model.config) if knows_model else DynamicCache()
        tokens, found = inputs["input_ids"], []
        for _ in range(3):
            tokens = model.generate(tokens, attention_mask=torch.ones_like(tokens), **NEW, **releases.with_cache(cache))
            layers = [(type(x), x.get_seq_length(), x.keys.clone(), x.values.clone()) for x in cache.layers]
            found.append((tokens, layers))
            tokens = torch.cat([tokens, question], dim=1)
        return found

    near_ties.check(call)
    without = reasons().get("a cache that is passed in without the model's sliding window", 0)
    assert (captures(), without) == ((3, 0) if knows_model else (0, 3)), (reasons(), fallbacks())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 2, "max_new_tokens": 8}], ids=["long", "short"])
@pytest.mark.parametrize("filled", [5, 43])
@pytest.mark.parametrize("name", ["mistral-short-window", "gemma3"])
def test_beams_behind_a_filled_cache(name: str, filled: int, options: dict[str, Any]) -> None:
    family = FAMILIES[name]
    model, inputs = family.build(), family.make_inputs(2, LONG, padding=None)
    assert filled < LONG
    near_ties.check(lambda: _behind_a_filled_cache(model, inputs, filled, options))
    assert captures() == 1, (reasons(), fallbacks())


@pytest.mark.parametrize("options", ["greedy", "sampling", "beams", "ends", "returned"])
@pytest.mark.parametrize("name", ["mistral-short-window", "gemma3"])
def test_without_a_captured_step_the_librarys_layers_go_on(
    name: str, options: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the prefill that has been made already. So it is in calls that come before recording pays."""
    need_programs(device, monkeypatch)
    _record_never(monkeypatch)
    family = FAMILIES[name]
    updates = noted(monkeypatch, SharedLayer, "update", lambda layer, keys, *given, **more: keys.shape[2])
    new = {**NEW, "max_new_tokens": 2 * family.config["sliding_window"], **WAYS[options]}
    for calls in (1, 2):
        check(family.build(), family.make_inputs(2, LONG), new)
        assert not captures() and not accelerated() and fallbacks() == {BEYOND: calls}
        assert list(reasons()) == [counters.NOT_YET]
        assert 1 not in updates, "a step was made on FastGen's store"


@pytest.mark.parametrize("is_recorded_later", [False, True], ids=["few", "many"])
@pytest.mark.parametrize("name", ["mistral-short-window", "gpt-oss"])
def test_without_a_captured_step_layers_are_fast(
    name: str, is_recorded_later: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefill and the steps run on FastGen's linear layers and experts, whoever has made the prefill."""
    need_programs(device, monkeypatch)
    _record_never(monkeypatch)
    model, inputs = FAMILIES[name].build(), FAMILIES[name].make_inputs(2, LONG)
    new = 20 if is_recorded_later else 3
    products = noted(monkeypatch, FloatLinear, "_product")
    of_experts = noted(monkeypatch, choose, "expert_linear")
    check(model, inputs, {**NEW, "max_new_tokens": new})
    assert fallbacks() == {BEYOND: 1}
    linear = sum(type(module) is torch.nn.Linear for module in model.modules())
    assert len(products) == linear * new
    has_experts = choose.gemv_rows(torch.float32, choose.Layout.ROWS, 1) is not None and name == "gpt-oss"
    assert len(of_experts) == (2 * model.config.num_hidden_layers * new if has_experts else 0)


def test_a_failure_of_a_fast_layer_beyond_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's code repeats the call, with its own layers."""
    _record_never(monkeypatch)
    family = FAMILIES["mistral-short-window"]

    def fails(*given: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(FloatLinear, "__call__", fails)
    with pytest.warns(RuntimeWarning, match="planted"):
        check(family.build(), family.make_inputs(2, LONG), {**NEW, "max_new_tokens": 3})
    assert fallbacks().pop(BEYOND) == 1 and "planted" in " ".join(fallbacks())


def test_a_users_cache_beyond_the_window_is_not_filled_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library's loop has stored in it could not be undone, so no layer that may fail has a faster form."""
    _record_never(monkeypatch)
    family = FAMILIES["mistral-short-window"]
    model, inputs = family.build(), family.make_inputs(1, LONG, padding=None)
    product, calls = FloatLinear.__call__, itertools.count(1)

    def fails(*given: Any) -> torch.Tensor:
        if next(calls) == 10:
            raise RuntimeError("planted")
        return product(*given)

    monkeypatch.setattr(FloatLinear, "__call__", fails)
    near_ties.check(lambda: _behind_a_filled_cache(model, inputs, 30, {"max_new_tokens": 3}))
    assert fallbacks() == {BEYOND: 1} and next(calls) == 1


def test_a_filled_cache_without_a_captured_step(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    need_programs(device, monkeypatch)
    _record_never(monkeypatch)
    family = FAMILIES["gemma3"]
    model, inputs = family.build(), family.make_inputs(1, LONG, padding=None)
    for options in ({}, {"num_beams": 2, "max_new_tokens": 8}):
        near_ties.check(lambda options=options: _behind_a_filled_cache(model, inputs, 43, options))


def test_the_window_is_that_of_the_layers(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-Neo's layers do not read the config again, and a user may replace their masks."""
    need_programs(device, monkeypatch)
    family = FAMILIES["gpt-neo"]
    model, inputs = copy.deepcopy(family.build()), family.make_inputs(2, LONG)
    masks = [block.attn.attention.bias for block in model.transformer.h]
    model.config.window_size = 3
    check(model, inputs, NEW)
    for mask in masks:
        mask.triu_(-4)
    check(model, inputs, NEW)
    assert captures() == 2
    for mask in masks:
        mask[..., 0] = True
    check(model, inputs, NEW)
    assert captures() == 2 and list(reasons()) == ["a mask of a layer that is no sliding window"]


def test_within_the_window_steps_need_not_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    _record_never(monkeypatch)
    family = FAMILIES["gemma3"]
    check(family.build(), family.make_inputs(2, 3), {**NEW, "max_new_tokens": 20})
    assert accelerated() == 1 and not fallbacks()
