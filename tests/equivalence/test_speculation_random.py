"""Speculative decoding against the original code, over models, prompts, options and drafts that are drawn at random.

The suite runs the first cases. `python -m tests.equivalence.test_speculation_random 200` runs more, and counts.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections import Counter
from typing import Any

import pytest
import torch

import fastgen
from fastgen.optimizer.transformers.speculation import batch_compaction
from tests import near_ties
from tests.equivalence import speculation
from tests.equivalence.models import EOS, FIRST_WORD, LONG, PAD, VOCABULARY
from tests.equivalence.speculation import KNOWN, counts, disturbed

CASES = 16
DECODERS = ["llama", "gpt2", "bloom", "qwen2", "gemma", "opt", "gpt-neox", "mixtral"]
WITH_ENCODER = ["bart", "t5", "marian", "whisper", "m2m100", "mbart", "pegasus", "flan-t5"]
DRAFTS = ["int8", "int4", "lookup", "assistant", "early exit"]


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


def draw_options(draw: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {"num_beams": 1, "do_sample": False, "max_new_tokens": draw.choice([9, 20, 30, 50])}
    for share, name, values in (
        (0.3, "min_new_tokens", range(1, 12)),
        (0.2, "no_repeat_ngram_size", (1, 2, 3)),
        (0.2, "repetition_penalty", (0.8, 1.3)),
        (0.1, "bad_words_ids", ([[7], [12, 13], [50, 51, 52]],)),
        (0.1, "sequence_bias", ([[[10], -8.0], [[20, 21], 6.0], [[30], 4.0]], [[[EOS], 1000.0]])),
        (0.1, "suppress_tokens", ([*range(40, 90)],)),
        (0.1, "forced_eos_token_id", (EOS,)),
        (0.1, "exponential_decay_length_penalty", ((3, 1.4),)),
        (0.2, "eos_token_id", ([EOS, 10, 20, 30], [EOS, *range(50, 70)])),
        (0.1, "renormalize_logits", (True,)),
    ):
        if draw.random() < share:
            options[name] = draw.choice(values)
    return options


@functools.cache
def assistant_of(name: str, spread: float) -> Any:
    return disturbed(KNOWN[name].build(), spread)


def run_case(seed: int) -> Counter[str]:
    """One case, called twice, because the second call finds what the first has recorded.

    Returns:
        What has happened: "identical" or "explained by a near-tie", and the counts of the calls.

    Raises:
        AssertionError: the tokens are others, and no near-tie explains it.
    """
    draw = random.Random(seed)
    name = draw.choice([*DECODERS, *WITH_ENCODER])
    family, model = KNOWN[name], KNOWN[name].build()
    drafts = DRAFTS if name in ("llama", "qwen2", "gemma", "opt") else DRAFTS[:4]
    draft, inputs, options = draw.choice(drafts), draw_inputs(draw, family), draw_options(draw)
    fastgen.enable(self_speculation=draft if draft.startswith("int") else "off")
    asked: dict[str, Any] = {}
    if draft == "lookup":
        asked = {"prompt_lookup_num_tokens": draw.choice([2, 4, 8])}
    elif draft == "early exit":
        asked = {"assistant_early_exit": 1}
    elif draft == "assistant":
        asked = {"assistant_model": assistant_of(name, draw.choice([0.0, 0.01, 0.1]))}
    found: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        if draw.random() < 0.7:
            speculation.draft_any_lengths(patch)
        if draw.random() < 0.7:
            patch.setattr(batch_compaction, "pays", lambda *_: True)
        speculation.record_at_once(patch)

        def call() -> Any:
            more = asked if fastgen.patching.is_active() else {}
            return model.generate(**copy.deepcopy(inputs), **copy.deepcopy(options), **more)

        with fastgen.disabled():
            original = call()
        for _ in range(2):
            ours = call()
            try:
                near_ties.assert_same(original, ours)
                found["identical"] += 1
            except AssertionError as difference:
                near_ties.settle(call, original, ours, difference)
                found["explained by a near-tie"] += 1
        for what, number in counts().items():
            found.update(
                {what: number} if isinstance(number, int) else {f"not used: {key}": n for key, n in number.items()}
            )
    found["rows"] = 2 * original.shape[0]
    found["tokens"] = 2 * original.numel()
    return found


@pytest.mark.parametrize("seed", range(CASES))
def test_random_calls(seed: int) -> None:
    found = run_case(seed)
    assert found["accelerated"] == 2, found


if __name__ == "__main__":
    total: Counter[str] = Counter()
    for case in range(int(sys.argv[1])):
        total.update(run_case(case))
        print(case, dict(total), flush=True)
