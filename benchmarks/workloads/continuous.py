"""Many requests with outputs of different lengths: static batches against `fastgen.Engine`.

Each request has its own limit, to stand for a text's end. Static batches are sorted by the length of the prompts; a
criterion ends each row at its limit, and finished rows leave the batch if FastGen compacts it. Sides:

* transformers: `generate` unpatched;
* fastgen-static: the same, patched;
* fastgen: the engine, with the same number of rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import StoppingCriteria

import fastgen
from benchmarks.backends import BASELINE, SUBJECT
from benchmarks.measure import alternate, timed
from benchmarks.record import Record
from benchmarks.workload import Context, Workload
from benchmarks.workloads.shapes import bart_base, opus_mt
from benchmarks.workloads.smollm2_chat import smollm2_instruct_from_bfloat16

STATIC = "fastgen-static"
_PADDING = 1


class _Limits(StoppingCriteria):
    """Ends each input at its own length."""

    def __init__(self, prompt: int, limits: list[int], rows: int) -> None:
        self._ends = torch.tensor(limits).repeat_interleave(rows) + prompt

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        # Beam search evaluates all candidates of an input.
        return input_ids.shape[1] >= self._ends.repeat_interleave(len(input_ids) // len(self._ends))


class _Requests(NamedTuple):
    """Requests to a model. Attributes: the `prompts` and the `limits` of new tokens, for each."""

    model: Any
    prompts: list[list[int]]
    limits: list[int]
    slots: int
    beams: int

    def unpatched(self) -> list[list[int]]:
        """Returns the new tokens of each request."""
        with fastgen.disabled():
            return self.static()

    def static(self) -> list[list[int]]:
        found = [list[int]() for _ in self.prompts]
        order = sorted(range(len(self.prompts)), key=lambda number: len(self.prompts[number]))
        size = self.slots // self.beams
        for first in range(0, len(order), size):
            chosen = order[first : first + size]
            for number, row in zip(chosen, self._batch(chosen), strict=True):
                found[number] = row
        return found

    def _batch(self, chosen: list[int]) -> list[list[int]]:
        has_encoder, own = self.model.config.is_encoder_decoder, [self.limits[number] for number in chosen]
        prompts = [torch.tensor(self.prompts[number]) for number in chosen]
        pad = partial(pad_sequence, batch_first=True, padding_side="right" if has_encoder else "left")
        rows = pad(prompts, padding_value=_PADDING)
        prompt = 1 if has_encoder else rows.shape[1]
        made = self.model.generate(
            rows,
            attention_mask=pad([torch.ones_like(each) for each in prompts]),
            stopping_criteria=[_Limits(prompt, own, self.beams)],
            **self._options(max(own)),
        )
        return [row[prompt : prompt + limit].tolist() for row, limit in zip(made, own, strict=True)]

    def continuous(self, stats: dict[str, Any]) -> list[list[int]]:
        with fastgen.Engine(self.model, slots=self.slots) as engine:
            pairs = zip(self.prompts, self.limits, strict=True)
            futures = [engine.submit(prompt, **self._options(limit)) for prompt, limit in pairs]
            results = [future.result()[0].tolist() for future in futures]
            stats.update(engine.stats())
        begin = 1 if self.model.config.is_encoder_decoder else None
        return [row[begin or len(prompt) :] for row, prompt in zip(results, self.prompts, strict=True)]

    def _options(self, new_tokens: int) -> dict[str, Any]:
        return {"max_new_tokens": new_tokens, "num_beams": self.beams, "do_sample": False}


@dataclass(frozen=True, kw_only=True)
class Continuous(Workload):
    """Requests of random lengths.

    Attributes:
        shape: makes the model.
        requests: their number.
        prompts, outputs: the shortest and the longest length.
        slots: rows of a step.
        beams: of each request.
    """

    shape: Callable[..., Any]
    requests: int
    prompts: tuple[int, int]
    outputs: tuple[int, int]
    slots: int = 16
    beams: int = 1
    repetitions: int = 1
    quick_repetitions: int = 1

    group = "generation"

    def run(self, context: Context, record: Record) -> None:
        record.parameters = {"requests": self.requests, "prompts": self.prompts, "outputs": self.outputs}
        record.parameters |= {"slots": self.slots, "beams": self.beams}
        requests, stats = self.drawn(context), dict[str, Any]()
        works = {BASELINE: requests.unpatched, STATIC: requests.static, SUBJECT: partial(requests.continuous, stats)}
        chosen = works if context.backends is None else (*context.backends, STATIC)
        runs = {name: partial(timed, work) for name, work in works.items() if name in chosen}
        found = record.take(alternate(runs, self.repetitions_in(context), context.log), [(STATIC, SUBJECT)])
        expected = found[SUBJECT][0]
        for name, (tokens, *_) in found.items():
            record.same[name] = sum(map(list.__eq__, tokens, expected)) / self.requests
        record.identical = all(share == 1 for share in record.same.values())
        record.accelerated = bool(stats["steps"]) and not stats["repeated"]
        record.metrics["busy"] = stats["busy_row_steps"] / stats["row_steps"]
        record.notes.append(f"{stats['steps']} steps, {100 * record.metrics['busy']:.0f} % of their slots taken")

    def drawn(self, context: Context) -> _Requests:
        """Returns the model, and requests to it."""
        model = self.shape().to(context.device).eval()
        model.generation_config.eos_token_id = None
        model.generation_config.forced_eos_token_id = None
        model.generation_config.pad_token_id = _PADDING
        numbers, top = random.Random(1), min(model.config.vocab_size, 30000)
        prompts = [
            [numbers.randrange(5, top) for _ in range(numbers.randint(*self.prompts))] for _ in range(self.requests)
        ]
        limits = [numbers.randint(*self.outputs) for _ in range(self.requests)]
        return _Requests(model, prompts, limits, self.slots, self.beams)


_SMOLLM2: dict[str, Any] = {"prompts": (10, 60), "outputs": (5, 200), "needs_smollm2": True}
_WIDE = {"slots": 32, "beams": 4}
WORKLOADS = [
    Continuous(
        name="continuous-smollm2",
        title="SmolLM2-135M, numbers of bfloat16, 16 slots, greedy, outputs of 5 to 200 tokens",
        shape=smollm2_instruct_from_bfloat16,
        requests=160,
        **_SMOLLM2,
    ),
    Continuous(
        name="continuous-smollm2-beams",
        title="SmolLM2-135M, numbers of bfloat16, 16 slots, 4 beams, outputs of 5 to 200 tokens",
        shape=smollm2_instruct_from_bfloat16,
        requests=40,
        beams=4,
        **_SMOLLM2,
    ),
    Continuous(
        name="continuous-opus-mt",
        title="opus-mt's shape, 32 slots, 4 beams, sentences of 5 to 60 tokens",
        shape=opus_mt,
        requests=96,
        prompts=(5, 60),
        outputs=(5, 60),
        **_WIDE,
    ),
    Continuous(
        name="continuous-bart-base",
        title="BART-base's shape, 32 slots, 4 beams, summaries of 20 to 140 tokens",
        shape=bart_base,
        requests=48,
        prompts=(200, 500),
        outputs=(20, 140),
        **_WIDE,
    ),
]
