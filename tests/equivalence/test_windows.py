"""Sliding windows that a call exceeds: a captured step reads no more than the library; without one, its layers do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import fastgen
from fastgen import counters, releases
from fastgen.optimizer.transformers.cache import SharedLayer
from fastgen.optimizer.transformers.captured import sizes
from tests import near_ties
from tests.equivalence.captured import captures, need_programs, reasons, record_from
from tests.equivalence.check import accelerated, check, fallbacks, run
from tests.equivalence.models import BY_NAME, LONG
from tests.equivalence.others import KNOWN

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


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("length", [3, LONG], ids=["short", "long"])
@pytest.mark.parametrize("name", NAMES)
def test_steps_are_captured(
    name: str, length: int, options: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the prompt is longer than the window, or what is generated goes beyond it. Rows have padding in front."""
    if "do_sample" in WAYS[options] and request.getfixturevalue("way") == "graphs":
        pytest.skip("other samples are drawn there")
    monkeypatch.setattr(sizes, "_MAX_FIRST_NEW", 16)
    family = FAMILIES[name]
    window = family.config["sliding_window"]
    assert window < LONG
    inputs = family.make_inputs(3, length)
    new = max(60, 2 * window)
    check(family.build(), inputs, {**NEW, "max_new_tokens": new, **WAYS[options]})
    assert captures() == accelerated() == 1, (reasons(), fallbacks())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ["mistral-short-window", "gemma3"])
def test_a_cache_of_the_users(name: str) -> None:
    """It has as many positions behind the call as the library leaves there: the next call goes on behind them."""
    family = FAMILIES[name]
    model, inputs = family.build(), family.make_inputs(1, LONG, padding=None)

    def call() -> Any:
        cache = DynamicCache(config=model.config)
        tokens = model.generate(**inputs, **NEW, **releases.with_cache(cache))
        lengths = [(type(layer), layer.get_seq_length(), layer.keys.shape[2]) for layer in cache.layers]
        more = torch.cat([tokens, inputs["input_ids"][:, :4]], dim=1)
        again = model.generate(more, attention_mask=torch.ones_like(more), **NEW, **releases.with_cache(cache))
        return tokens, lengths, again

    near_ties.check(call)
    assert captures() >= 1, (reasons(), fallbacks())


@pytest.mark.parametrize("options", ["greedy", "sampling", "beams", "ends", "returned"])
@pytest.mark.parametrize("name", ["mistral-short-window", "gemma3"])
def test_without_a_captured_step_the_librarys_layers_go_on(
    name: str, options: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the prefill that has been made already. So it is in calls that come before recording pays."""
    need_programs(device, monkeypatch)
    record_from(monkeypatch, 10**6)
    family = FAMILIES[name]
    model, updates = family.build(), list[int]()
    extend = SharedLayer.update

    def update(layer: SharedLayer, keys: torch.Tensor, *given: Any, **more: Any) -> Any:
        updates.append(keys.shape[2])
        return extend(layer, keys, *given, **more)

    monkeypatch.setattr(SharedLayer, "update", update)
    inputs = family.make_inputs(2, LONG)
    new = {**NEW, "max_new_tokens": 2 * family.config["sliding_window"]}
    check(model, inputs, {**new, **WAYS[options]})
    assert not captures() and not accelerated() and fallbacks() == {BEYOND: 1}
    assert list(reasons()) == [counters.NOT_YET]
    assert 1 not in updates, "a step was made on FastGen's store"
    with fastgen.disabled():
        expected = run(model, inputs, {**new, **WAYS[options]})
    near_ties.assert_same(expected, run(model, inputs, {**new, **WAYS[options]}))


def test_within_the_window_steps_need_not_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    record_from(monkeypatch, 10**6)
    family = FAMILIES["gemma3"]
    check(family.build(), family.make_inputs(2, 3), {**NEW, "max_new_tokens": 20})
    assert accelerated() == 1 and not fallbacks()
