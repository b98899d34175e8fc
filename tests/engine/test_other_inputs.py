"""Requests whose prompts are more than tokens: pictures, embeddings, positions."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import fastgen
from fastgen import releases
from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.options import make
from fastgen.engine.prefills import LEAST_SHARED
from tests.engine.conftest import alone, run
from tests.equivalence.models import BY_NAME, VOCABULARY
from tests.equivalence.multimodal import PLACEHOLDER, build

needs_pictures = pytest.mark.skipif(
    releases.ENCODED not in releases.read_in_prefill(), reason="this release reads pictures in the model's first step"
)
_TOKENS = torch.arange(10, 10 + LEAST_SHARED + 20).unsqueeze(0)
# How many tokens stand for a picture.
_LENGTHS = {"Gemma3": 4, "Llava": 4, "Mistral3": 4, "InternVL": 1, "SmolVLM": 1}


def with_picture(name: str, number: int, length: int) -> dict[str, torch.Tensor]:
    """One of several requests that have the same tokens, each with a picture of its own."""
    ids = torch.randint(4, VOCABULARY - 5, (1, length), generator=torch.Generator().manual_seed(0))
    ids[:, -12 : _LENGTHS[name] - 12] = PLACEHOLDER
    pixels = 9 * torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(number))
    made = {"input_ids": ids, "pixel_values": pixels.unsqueeze(0) if name == "SmolVLM" else pixels}
    if name == "Mistral3":
        made["image_sizes"] = torch.tensor([[16, 16]])
    if name == "Gemma3":
        made["token_type_ids"] = (ids == PLACEHOLDER).long()
    return made


# ---- what is shared of prompts is shared by their tokens, which the rest is not


@needs_pictures
@pytest.mark.parametrize("name", _LENGTHS)
def test_prompts_of_the_same_tokens_and_other_pictures(name: str) -> None:
    """Longer than what is shared, and than a chunk, while others go on."""
    model = build(name)
    inputs: list[Any] = [with_picture(name, number, 150) for number in range(3)]
    inputs += [{"input_ids": each["input_ids"].clamp(max=PLACEHOLDER - 1)} for each in inputs[:1]]
    options = [{"max_new_tokens": count} for count in (12, 16, 9, 12)]
    executor = ContinuousBatches(model, 4, max_stall=1e-4)
    requests = [make(model, each, None, given, None, 4) for each, given in zip(inputs, options, strict=True)]
    run(executor, requests)
    results = [request.future.result(0) for request in requests]
    with fastgen.disabled():
        expected = [alone(model, each, **given) for each, given in zip(inputs, options, strict=True)]
    assert all(map(torch.equal, results, expected))
    assert len({tuple(each[0, 150:159].tolist()) for each in expected}) > 1, "pictures make a difference"
    assert executor.counts["busy_row_steps"] and not executor.alone


def _check(model: Any, inputs: list[dict[str, Any]]) -> None:
    """One after the other: what the first ones leave, the others would find."""
    executor, made = ContinuousBatches(model, 4), list[Any]()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for each in inputs:
            request = make(model, each, None, {"max_new_tokens": 12}, None, 4)
            run(executor, [request])
            made.append(request.future.result(0))
    with fastgen.disabled():
        expected = [alone(model, each, max_new_tokens=12) for each in inputs]
    assert all(map(torch.equal, made, expected))
    assert not torch.equal(made[0][:, -12:], made[1][:, -12:])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_embeddings_and_positions(name: str) -> None:
    model = BY_NAME[name].build()
    others = model.get_input_embeddings()(_TOKENS.flip(1)).detach()
    positions = torch.arange(_TOKENS.shape[1]).unsqueeze(0) * 2
    _check(model, [{"input_ids": _TOKENS, "inputs_embeds": others}, {"input_ids": _TOKENS}])
    _check(model, [{"input_ids": _TOKENS, "position_ids": positions}, {"input_ids": _TOKENS}])
    _check(model, [{"input_ids": _TOKENS}, {"input_ids": _TOKENS, "position_ids": positions}])


# ---- the budget


def test_embeddings_count_for_the_budget() -> None:
    """They are more than the tokens behind them, of which there may be none."""
    model = BY_NAME["llama"].build()
    of_a_position = 2 * sum(each.self_attn.k_proj.out_features for each in model.model.layers) * 4
    embedded = model.get_input_embeddings()(_TOKENS).detach()
    executor = ContinuousBatches(model, 4, cache_bytes=50 * of_a_position)
    request = make(model, {"inputs_embeds": embedded}, None, {"max_new_tokens": 4}, None, 4)
    run(executor, [request])
    with pytest.raises(MemoryError, match="cache_gib"):
        request.future.result(0)


# ---- requests that begin again


def _run_short_of_memory(model: Any, inputs: list[dict[str, Any]], **options: Any) -> list[Any]:
    """The results of requests of which some have begun again for want of room."""
    peaks = list[int]()
    while True:
        executor = ContinuousBatches(model, 16, cache_bytes=peaks[0] * 2 // 3 if peaks else None)
        requests = [make(model, each, None, options, None, 16) for each in copy.deepcopy(inputs)]
        run(executor, requests, at_once=8)
        if peaks:
            assert executor.counts["preempted"] and not executor.alone
            return [request.future.result(0) for request in requests]
        peaks.append(executor.stats()["kv_bytes"])


@needs_pictures
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
@pytest.mark.parametrize("name", ["Llava", "Gemma3"])
def test_pictures_are_read_again(name: str, options: dict[str, Any]) -> None:
    model, options = build(name), {**options, "max_new_tokens": 40, "eos_token_id": None}
    inputs = [with_picture(name, number, 20 + number) for number in range(4)]
    found = _run_short_of_memory(model, inputs, **options)
    with fastgen.disabled():
        expected = [alone(model, each, **options) for each in inputs]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", [pytest.param("Llava", marks=needs_pictures), "bart"])
def test_what_the_user_has_encoded_is_repeated_once(name: str) -> None:
    """The library does so in place, for each sequence of an input."""
    options, inputs = {"num_beams": 2, "max_new_tokens": 40, "eos_token_id": None}, list[dict[str, Any]]()
    with torch.no_grad():
        if name == "bart":
            model = BY_NAME[name].build()
            for length in range(6, 10):
                encoded = model.get_encoder()(torch.arange(10, 10 + length).unsqueeze(0))
                inputs.append({"encoder_outputs": encoded, "attention_mask": torch.ones(1, length, dtype=torch.int64)})
        else:
            model = build(name)
            for number in range(4):
                given: dict[str, Any] = with_picture(name, number, 20 + number)
                encoded = model.get_image_features(given.pop("pixel_values"), return_dict=True)
                inputs.append({**given, releases.ENCODED: {"image": encoded}})
    found = _run_short_of_memory(model, inputs, **options)
    with fastgen.disabled():
        expected = [alone(model, each, **options) for each in inputs]
    assert all(map(torch.equal, found, expected))
