"""Processors and criteria that write into the tokens that they are given: that counts as in the library's loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria, StoppingCriteriaList

import fastgen
from fastgen import releases, settings
from fastgen.optimizer.transformers.captured import host
from tests.equivalence.captured import BEAMS, GREEDY, build, captures, reasons
from tests.equivalence.check import run
from tests.equivalence.models import BY_NAME, EOS
from tests.equivalence.test_programs import programs  # noqa: F401 (steps are recorded at once)

pytestmark = pytest.mark.sampled(4)

CPU = torch.device("cpu")
SAMPLES = {**GREEDY, "do_sample": True}


class _Writes:
    """Writes into the tokens that it is given, at some calls, in the way that `write` does."""

    def __init__(self, write: Callable[[torch.Tensor], None], at: tuple[int, ...]) -> None:
        self.write, self.at, self.seen = write, at, []

    def note(self, tokens: torch.Tensor) -> None:
        self.seen.append(tokens.tolist())
        if len(self.seen) in self.at:
            self.write(tokens)


class WritingProcessor(_Writes, LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.note(input_ids)
        return scores.scatter_add(1, input_ids.sum(1, keepdim=True) % 50 + 5, torch.full_like(scores[:, :1], 3.0))


class WritingCriterion(_Writes, StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.note(input_ids)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _write_last(tokens: torch.Tensor) -> None:
    tokens[:, -1] = 9


def _write_end(tokens: torch.Tensor) -> None:
    tokens[0, -1] = tokens[0, -1] * 0 + EOS


def _write_first(tokens: torch.Tensor) -> None:
    tokens[0, 1] = 11


def _write_memory(tokens: torch.Tensor) -> None:
    """Which torch does not count."""
    tokens.cpu().numpy()[:, -2:] = 17


WRITES = [_write_last, _write_end, _write_first, _write_memory]


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode], ids=["plain", "inference"])
@pytest.mark.parametrize("name", ["llama", "bart"])
@pytest.mark.parametrize("options", [GREEDY, BEAMS, SAMPLES], ids=["rows", "beams", "sampling"])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("where", ["processor", "criterion", "both"])
def test_tokens_that_the_users_code_writes(
    where: str, write: Any, options: dict[str, Any], name: str, mode: Any
) -> None:
    model, inputs = build(BY_NAME[name], CPU)
    host._writers.clear()
    found = []
    for context in (fastgen.disabled(), contextlib.nullcontext()):
        processor, criterion = WritingProcessor(write, (2, 4, 7)), WritingCriterion(write, (2, 7))
        given: dict[str, Any] = {}
        if where != "criterion":
            given["logits_processor"] = [processor]
        if where != "processor":
            given["stopping_criteria"] = StoppingCriteriaList([criterion])
        with context, mode():
            result = run(model, inputs, {**options, "max_new_tokens": 12, **given})
        found.append((result.tolist(), processor.seen, criterion.seen))
    assert found[0] == found[1]
    begins_again = where != "processor" and options is BEAMS
    assert captures() == int(not begins_again), reasons()


@pytest.mark.parametrize("captured", ["always", "never"])
def test_a_cache_of_the_users_that_its_code_writes_to(captured: str) -> None:
    class Scales(LogitsProcessor):
        def __init__(self, cache: Any) -> None:
            self.cache, self.seen = cache, []

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            layer = self.cache.layers[0]
            self.seen.append((tuple(layer.keys.shape), self.cache.get_seq_length()))
            if len(self.seen) in (2, 5):
                layer.keys, layer.values = layer.keys * -3.0, layer.values.flip(1)
            return scores

    model, inputs = build(BY_NAME["llama"], CPU)
    found = []
    for context in (fastgen.disabled(), settings.changed(captured_step=captured)):
        cache = DynamicCache(config=model.config)
        given = releases.with_cache(cache)
        processor = Scales(cache)
        with context:
            result = model.generate(**inputs, **GREEDY | {"max_new_tokens": 12}, logits_processor=[processor], **given)
        found.append((result.tolist(), processor.seen, cache.layers[1].keys.shape))
    assert found[0] == found[1]
