"""Captured steps against the original code, over random sequences of calls of the same models.

Steps are kept from one call to the next. A call finds what others have left: other prompts, batches, lengths and
options, larger buffers, steps that were dropped, weights that have changed.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import fastgen
from fastgen.optimizer.transformers import loop
from fastgen.optimizer.transformers.captured import graph_cache, key
from tests.equivalence.captured import BY_RELEASE, reasons
from tests.equivalence.check import check
from tests.equivalence.models import BY_NAME, EOS, FIRST_WORD, LONG, PAD, VOCABULARY

CALLS = 4
# Models of each test and a seed, chosen so that no two candidates of a search are nearly equal.
SESSIONS = {
    "bart": 1, "mbart gpt2": 0, "t5": 2, "flan-t5 llama": 1, "whisper": 0, "gpt2": 0, "opt qwen2": 0, "bloom": 0,
    "pegasus gpt-neox": 0, "prophetnet m2m100": 0, "mistral-long-window led": 0,
}  # fmt: skip
LARGE_BUFFERS = {"opt qwen2"}


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They grow in the middle of a call, and few steps are kept."""
    monkeypatch.setattr(key, "_FIRST_NEW", 8)
    monkeypatch.setattr(key, "_MAX_FIRST_NEW", 8)
    monkeypatch.setattr(key, "_MULTIPLE", 16)
    monkeypatch.setattr(graph_cache, "MOST", 2)


class OwnProcessor(LogitsProcessor):
    """A processor that cannot be captured, and looks at every token of its row."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter_add(1, (input_ids.sum(1, keepdim=True) % VOCABULARY), torch.full_like(scores[:, :1], 2.0))


def draw_inputs(
    draw: random.Random, family: Any, batches: Sequence[int] = (1, 3, 4, 4), words: Sequence[int] = (VOCABULARY,)
) -> dict[str, torch.Tensor]:
    """Prompts or sources of any lengths, padded on either side, with one of these sizes of the vocabulary."""
    generator = torch.Generator().manual_seed(draw.randrange(10**6))
    batch = draw.choice(batches)
    if family.inputs == "audio":
        return {"input_features": torch.randn(batch, 8, 2 * LONG, generator=generator)}
    length = draw.choice([1, 9, 14, 15, LONG])
    ids = torch.randint(FIRST_WORD, draw.choice(words), (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    from_left = draw.random() < (0.2 if family.encoder_decoder else 0.8)
    for row in range(batch):
        missing = draw.randint(0, length - 1) if draw.random() < 0.6 else 0
        where = slice(0, missing) if from_left else slice(length - missing, length)
        ids[row, where], mask[row, where] = PAD, 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if family.encoder_decoder and draw.random() < 0.2:
        inputs["decoder_input_ids"] = torch.randint(FIRST_WORD, VOCABULARY, (batch, 3), generator=generator)
    return inputs


def draw_options(draw: random.Random) -> dict[str, Any]:
    """Options of a call that leave one choice for each token."""
    beams = draw.choice([1, 2, 3, 4])
    options: dict[str, Any] = {"num_beams": beams, "do_sample": False, "max_new_tokens": draw.choice([9, 12, 20, 30])}
    if beams > 1:
        options["num_return_sequences"] = draw.randint(1, beams)
        options["early_stopping"] = draw.choice([True, False, "never"])
        options["length_penalty"] = draw.choice([-1.0, 0.0, 0.5, 1.0, 2.0])
    elif draw.random() < 0.3:
        options.update(do_sample=True, top_k=1, num_return_sequences=draw.randint(1, 3))
    return options | draw_control(draw)


def draw_control(draw: random.Random) -> dict[str, Any]:
    """Options that change scores, or decide when to stop."""
    options: dict[str, Any] = {}
    for share, name, values in (
        (0.3, "min_new_tokens", range(1, 12)),
        (0.3, "no_repeat_ngram_size", (1, 2, 3)),
        (0.2, "encoder_no_repeat_ngram_size", (1, 2)),
        (0.2, "repetition_penalty", (0.8, 1.3)),
        (0.1, "bad_words_ids", ([[7], [12, 13], [50, 51, 52]],)),
        (0.1, "sequence_bias", ([[[10], -8.0], [[20, 21], 6.0], [[30], 4.0]], [[[EOS], 1000.0]])),
        (0.1, "suppress_tokens", ([*range(40, 90)],)),
        (0.1, "forced_bos_token_id", (11,)),
        (0.1, "forced_eos_token_id", (EOS,)),
        (0.1, "exponential_decay_length_penalty", ((3, 1.4),)),
        (0.1, "eos_token_id", ([EOS, 10, 20, 30], [EOS, 9])),
        (0.1, "renormalize_logits", (True,)),
        (0.1, "logits_processor", (LogitsProcessorList([OwnProcessor()]),)),
    ):
        if draw.random() < share:
            options[name] = draw.choice(values)
    return options


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("names", "seed"), SESSIONS.items())
def test_session(names: str, seed: int, device: torch.device, request: pytest.FixtureRequest) -> None:
    if names not in LARGE_BUFFERS:
        request.getfixturevalue("small_buffers")
    draw = random.Random(f"{names} {seed}")
    families = [BY_NAME[name] for name in names.split()]
    models = [copy.deepcopy(family.build(draw.choice(family.attentions()))).to(device) for family in families]
    options = draw_options(draw)
    tokens, left_out = set(), 0
    for _ in range(CALLS):
        which = draw.randrange(len(models))
        if draw.random() < 0.2:  # mostly the same options, so that steps are used again
            options = draw_options(draw)
        if draw.random() < 0.2:  # training goes on
            for parameter in models[which].parameters():
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
                parameter.detach().mul_(1 + 0.1 * noise.to(device))
        inputs = {name: value.to(device) for name, value in draw_inputs(draw, families[which]).items()}
        if device.type == "cuda":
            left_out += options["do_sample"]  # `check` runs these without a captured step
            if "min_new_tokens" in options:  # a ban times a penalty is NaN, and a GPU has no order of those
                options.pop("exponential_decay_length_penalty", None)
        tokens.add(str(check(models[which], inputs, options).tolist()))
    if reasons() and BY_RELEASE & {family.name for family in families}:
        pytest.skip(f"not captured in this release: {', '.join(reasons())}")
    assert not reasons()
    assert fastgen.stats().get(loop.ENTRY_POINT, {}).get("accelerated", 0) == CALLS - left_out
    assert len(tokens) > 1
