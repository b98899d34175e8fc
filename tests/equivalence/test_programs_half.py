"""The captured step on the CPU in half precision: its tokens are those that the model prefers, within the rounding.

The same tokens are not promised: where two are nearly as good, the order of a sum decides. So what is compared are the
numbers by which the original code, given these tokens, chooses: in half precision and in float32.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

import fastgen
from tests.equivalence.captured import BEAMS, GREEDY, build, captures, reasons
from tests.equivalence.check import run
from tests.equivalence.models import Family
from tests.equivalence.options import FAMILIES
from tests.equivalence.test_programs import CPU, Program, programs, replays  # noqa: F401 (fixtures)
from tests.ops.torch_attention import skipped_where_torch_fails

pytestmark = pytest.mark.sampled(3)
# How many times the difference that half precision makes to the original's numbers.
ROUNDING = 2


class Forced(LogitsProcessor):
    """Goes through given sequences, and keeps the numbers that would have been chosen from."""

    def __init__(self, sequences: Tensor) -> None:
        self.sequences = sequences
        self.found: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.found.append(scores.float().clamp(min=-1e4))
        chosen = self.sequences[:, input_ids.shape[1], None]
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


def numbers_of(model: Any, inputs: dict[str, Any], sequences: Tensor, steps: int) -> Tensor:
    """[rows, steps, vocabulary]: what the original code chooses from along these sequences."""
    forced = Forced(sequences)
    with fastgen.disabled():
        model.generate(
            **inputs, max_new_tokens=steps, do_sample=False, num_beams=1, logits_processor=LogitsProcessorList([forced])
        )
    return torch.stack(forced.found, 1)


def up_to_the_end(model: Any, tokens: Tensor) -> Tensor:
    """[rows, steps]: which tokens count."""
    ends = torch.isin(tokens, torch.tensor(model.generation_config.eos_token_id or [])).int()
    return ends.cumsum(1) == ends


def score(numbers: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
    """[rows]: the mean log-probability of the tokens that count."""
    likely = numbers.log_softmax(2).gather(2, tokens[..., None])[..., 0]
    return (likely * counts).sum(1) / counts.sum(1)


@pytest.mark.parametrize("options", [GREEDY, BEAMS], ids=["greedy", "beams"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_tokens_are_as_good(
    family: Family,
    dtype: torch.dtype,
    options: dict[str, Any],
    replays: list[Program],  # noqa: F811
) -> None:
    exact, inputs = build(family, CPU)
    model = copy.deepcopy(exact).to(dtype)
    rounded = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    with skipped_where_torch_fails(dtype):
        compare(exact, model, inputs, rounded, options, replays)


def compare(
    exact: Any,
    model: Any,
    inputs: dict[str, Any],
    rounded: dict[str, Any],
    options: dict[str, Any],
    replays: list[Program],  # noqa: F811
) -> None:
    for _ in range(2):
        ours = run(model, rounded, options)
    assert captures() == 2 and len(set(replays)) == 1, reasons()
    with fastgen.disabled():
        original = run(model, rounded, options)

    given = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    tokens, steps = ours[:, given:], ours.shape[1] - given
    found, wanted = numbers_of(model, rounded, ours, steps), numbers_of(exact, inputs, ours, steps)
    bound = ROUNDING * (found - wanted).abs().max()
    assert bound < (wanted.amax(2) - wanted.median(2).values).mean() / 2  # or many a token would do
    counts = up_to_the_end(model, tokens)
    if options is GREEDY:
        chosen = wanted.gather(2, tokens[..., None])[..., 0]
        assert (chosen >= wanted.amax(2) - bound)[counts].all()
    else:
        others = original[:, given:]
        numbers = numbers_of(exact, inputs, original, others.shape[1])
        best = score(numbers, others, up_to_the_end(model, others))
        # A beam that is lost by rounding may have been on the way to the best end.
        assert (score(wanted, tokens, counts) >= best - bound).all()
