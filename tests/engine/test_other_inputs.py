"""Requests whose prompts are more than tokens share nothing with others of the same tokens."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from fastgen import releases
from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.options import make
from fastgen.engine.prefills import LEAST_SHARED
from tests.engine.conftest import alone, run
from tests.equivalence.models import BY_NAME
from tests.equivalence.multimodal import PLACEHOLDER, build

_TOKENS = torch.arange(10, 10 + LEAST_SHARED + 20).unsqueeze(0)


def _check(model: Any, inputs: list[dict[str, Any]]) -> None:
    """One after the other: what the first ones leave, the others would find."""
    executor, made = ContinuousBatches(model, 4), list[Any]()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for each in inputs:
            request = make(model, each, None, {"max_new_tokens": 12}, None, 4)
            run(executor, [request])
            made.append(request.future.result(0))
    for each, found in zip(inputs, made, strict=True):
        assert torch.equal(found.flatten(), alone(model, each, max_new_tokens=12).flatten())


@pytest.mark.skipif(not releases.read_in_prefill(), reason="this release does not say what is read in the prefill")
@pytest.mark.parametrize("name", ["Llava", "InternVL", "Mistral3"])
def test_pictures(name: str) -> None:
    model, draws = build(name), torch.Generator().manual_seed(0)
    tokens, count = _TOKENS.clone(), 1 if name == "InternVL" else 4
    tokens[0, 5 : 5 + count] = PLACEHOLDER
    more = {"image_sizes": torch.tensor([[16, 16]])} if name == "Mistral3" else {}
    pictures = [torch.randn(1, 3, 16, 16, generator=draws) for _ in range(3)]
    _check(model, [{"input_ids": tokens, "pixel_values": each, **more} for each in pictures])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_embeddings_and_positions(name: str) -> None:
    model = BY_NAME[name].build()
    others = model.get_input_embeddings()(_TOKENS.flip(1)).detach()
    positions = torch.arange(_TOKENS.shape[1]).unsqueeze(0) + 7
    _check(model, [{"input_ids": _TOKENS, "inputs_embeds": others}, {"input_ids": _TOKENS}])
    _check(model, [{"input_ids": _TOKENS, "position_ids": positions}, {"input_ids": _TOKENS}])
    _check(model, [{"input_ids": _TOKENS}, {"input_ids": _TOKENS, "position_ids": positions}])


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
