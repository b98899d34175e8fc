"""Speculative decoding against the original code, over models, prompts, options and drafts that are drawn at random.

`make test-long` runs 200 of them, `make test` a sample.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from fastgen.optimizer.transformers.speculation import batch_compaction
from tests.equivalence.models import FIRST_WORD, LONG, PAD, VOCABULARY
from tests.equivalence.speculation import (
    DRAFTS,
    EARLY_EXIT,
    KNOWN,
    assert_speculates,
    draft_any_lengths,
    draft_of,
    same,
)
from tests.equivalence.test_captured_random import draw_control

SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(8, 200))]
DECODERS = ["llama", "gpt2", "bloom", "qwen2", "gemma", "opt", "gpt-neox", "mixtral"]
WITH_ENCODER = ["bart", "t5", "marian", "whisper", "m2m100", "mbart", "pegasus", "flan-t5"]


def draw_inputs(draw: random.Random, family: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(draw.randrange(10**6))
    batch = draw.randint(1, 5)
    if family.inputs == "audio":
        return {"input_features": torch.randn(batch, 8, 2 * LONG, generator=generator)}
    length = draw.choice([1, 9, 15, LONG])
    # Some say the same words over and over, which is what prompt lookup looks for.
    words = draw.choice([VOCABULARY, FIRST_WORD + 8])
    ids = torch.randint(FIRST_WORD, words, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(batch):
        missing = draw.randint(0, length - 1) if draw.random() < 0.6 else 0
        where = slice(length - missing, length) if family.encoder_decoder else slice(0, missing)
        ids[row, where], mask[row, where] = PAD, 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("seed", SEEDS)
def test_random_calls(seed: int, speculates_at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One case, called twice, because the second call finds what the first has recorded."""
    draw = random.Random(seed)
    name = draw.choice([*DECODERS, *WITH_ENCODER])
    family, model = KNOWN[name], KNOWN[name].build()
    draft, inputs = draw.choice(DRAFTS if name in EARLY_EXIT else DRAFTS[:-1]), draw_inputs(draw, family)
    options = {"num_beams": 1, "do_sample": False, "max_new_tokens": draw.choice([9, 20, 30, 50]), **draw_control(draw)}
    options.pop("logits_processor", None)
    asked = draft_of(draft, model, spread=draw.choice([0.0, 0.01, 0.1]))
    if draft == "lookup":
        asked = {"prompt_lookup_num_tokens": draw.choice([2, 4, 8])}
    if draw.random() < 0.7:
        draft_any_lengths(monkeypatch)
    if draw.random() < 0.7:
        monkeypatch.setattr(batch_compaction, "pays", lambda *_: True)
    for _ in range(2):
        same(model, inputs, options, **asked)
    assert_speculates(2)
