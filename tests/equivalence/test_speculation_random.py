"""Speculative decoding against the original code, over models, prompts, options and drafts that are drawn at random.

`make test-long` runs 200 of them, `make test` a sample.
"""

from __future__ import annotations

import random

import pytest

from tests.equivalence.models import FIRST_WORD, VOCABULARY
from tests.equivalence.speculation import (
    DRAFTS,
    EARLY_EXIT,
    KNOWN,
    assert_speculates,
    draft_any_lengths,
    draft_of,
    same,
)
from tests.equivalence.test_captured_random import draw_control, draw_inputs

SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(8, 200))]
DECODERS = ["llama", "gpt2", "bloom", "qwen2", "gemma", "opt", "gpt-neox", "mixtral"]
WITH_ENCODER = ["bart", "t5", "marian", "whisper", "m2m100", "mbart", "pegasus", "flan-t5"]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_calls(seed: int, speculates_at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One case, called twice, because the second call finds what the first has recorded."""
    draw = random.Random(seed)
    name = draw.choice([*DECODERS, *WITH_ENCODER])
    family, model = KNOWN[name], KNOWN[name].build()
    draft = draw.choice(DRAFTS if name in EARLY_EXIT else DRAFTS[:-1])
    # Some say the same words over and over, which is what prompt lookup looks for.
    inputs = draw_inputs(draw, family, range(1, 6), [VOCABULARY, FIRST_WORD + 8])
    options = {"num_beams": 1, "do_sample": False, "max_new_tokens": draw.choice([9, 20, 30, 50]), **draw_control(draw)}
    options.pop("logits_processor", None)
    asked = draft_of(draft, model, spread=draw.choice([0.0, 0.01, 0.1]))
    if draft == "lookup":
        asked = {"prompt_lookup_num_tokens": draw.choice([2, 4, 8])}
    if draw.random() < 0.7:
        draft_any_lengths(monkeypatch)
    for _ in range(2):
        same(model, inputs, options, **asked)
    assert_speculates(2)
