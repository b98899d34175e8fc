"""Requests with pictures in slots: what is shared of prompts is shared by their tokens, which pictures are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastgen
from fastgen import releases
from fastgen.engine import continuous
from tests.engine.conftest import alone, run
from tests.engine.conftest import make as make_request
from tests.equivalence import multimodal
from tests.equivalence.models import BY_NAME, VOCABULARY
from tests.equivalence.multimodal import PLACEHOLDER

pytestmark = pytest.mark.skipif(
    releases.ENCODED not in releases.read_in_prefill(), reason="this release reads pictures in the model's first step"
)
TOKENS = {"Gemma3": 4, "Llava": 4, "Mistral3": 4, "InternVL": 1, "SmolVLM": 1}


def with_picture(name: str, number: int, length: int) -> dict[str, torch.Tensor]:
    """One of several requests that have the same tokens, each with a picture of its own."""
    ids = torch.randint(4, VOCABULARY - 5, (1, length), generator=torch.Generator().manual_seed(0))
    ids[:, -12 : TOKENS[name] - 12] = PLACEHOLDER
    pixels = 9 * torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(number))
    made = {"input_ids": ids, "pixel_values": pixels.unsqueeze(0) if name == "SmolVLM" else pixels}
    if name == "Mistral3":
        made["image_sizes"] = torch.tensor([[16, 16]])
    if name == "Gemma3":
        made["token_type_ids"] = (ids == PLACEHOLDER).long()
    return made


@pytest.mark.parametrize("name", TOKENS)
def test_prompts_of_the_same_tokens_and_other_pictures(name: str) -> None:
    """Longer than what is shared, and than a chunk, while others go on."""
    model = multimodal.build(name)
    inputs: list[Any] = [with_picture(name, number, 150) for number in range(3)]
    inputs += [{"input_ids": each["input_ids"].clamp(max=PLACEHOLDER - 1)} for each in inputs[:1]]
    options = [{"max_new_tokens": count} for count in (12, 16, 9, 12)]
    executor = continuous.ContinuousBatches(model, 4, max_stall=1e-4)
    requests = [make_request(model, each, None, given, None, 4) for each, given in zip(inputs, options, strict=True)]
    run(executor, requests)
    results = [request.future.result(0) for request in requests]
    with fastgen.disabled():
        expected = [alone(model, each, **given) for each, given in zip(inputs, options, strict=True)]
    assert all(map(torch.equal, results, expected))
    assert len({tuple(each[0, 150:159].tolist()) for each in expected}) > 1, "pictures make a difference"
    assert executor.counts["busy_row_steps"] and not executor.alone


def test_positions_that_are_given_are_not_those_of_others() -> None:
    model = BY_NAME["llama"].build()
    ids = torch.randint(4, VOCABULARY, (1, 100), generator=torch.Generator().manual_seed(0))
    inputs = [{"input_ids": ids, "position_ids": torch.arange(100).unsqueeze(0) * step} for step in (1, 2, 1)]
    executor = continuous.ContinuousBatches(model, 4)
    requests = [make_request(model, each, None, {"max_new_tokens": 12}, None, 4) for each in inputs]
    run(executor, requests)
    with fastgen.disabled():
        expected = [alone(model, each, max_new_tokens=12) for each in inputs]
    assert all(map(torch.equal, [request.future.result(0) for request in requests], expected))
    assert not torch.equal(*expected[:2])
