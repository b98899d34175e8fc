"""Many requests whose outputs differ in length: static batches against `fastgen.Engine`.

Each request has a limit of its own, as a text has that ends somewhere. Static batches are sorted by the length of the
prompts; a criterion ends each row at its limit, and finished rows leave the batch where FastGen takes them out. Sides:

* transformers: `generate` unpatched;
* fastgen-static: the same, patched;
* fastgen: the engine, with as many rows.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

import fastgen
from benchmarks.backends import BASELINE, SUBJECT
from benchmarks.measure import alternate, summary
from benchmarks.record import Record, Target
from benchmarks.workload import Context, Workload
from benchmarks.workloads.shapes import bart_base, opus_mt
from benchmarks.workloads.smollm2_chat import is_without_model, smollm2_instruct_from_bfloat16

STATIC = "fastgen-static"


class _Limits(StoppingCriteria):
    """Ends each input at its own length."""

    def __init__(self, prompt: int, limits: list[int], rows: int) -> None:
        self._ends = torch.tensor(limits).repeat_interleave(rows) + prompt

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        # Of a beam search, all candidates of an input are asked about.
        return input_ids.shape[1] >= self._ends.repeat_interleave(len(input_ids) // len(self._ends))


@dataclass(frozen=True, kw_only=True)
class Continuous(Workload):
    """Requests of random lengths.

    Attributes:
        shape: makes the model.
        requests: how many.
        prompts, outputs: the shortest and the longest.
        slots: rows of a step.
        beams: of each request.
    """

    shape: Callable[..., Any]
    requests: int
    prompts: tuple[int, int]
    outputs: tuple[int, int]
    slots: int = 16
    beams: int = 1
    needs_smollm2: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    repetitions: int = 1
    quick_repetitions: int = 1

    group = "generation"

    def run(self, context: Context, record: Record) -> None:
        if self.needs_smollm2 and is_without_model(self, context, record):
            return
        model = self.shape(**self.config).to(context.device).eval()
        model.generation_config.eos_token_id = None
        model.generation_config.forced_eos_token_id = None
        model.generation_config.pad_token_id = 1
        numbers = random.Random(1)
        top = min(model.config.vocab_size, 30000)
        prompts = [
            [numbers.randrange(5, top) for _ in range(numbers.randint(*self.prompts))] for _ in range(self.requests)
        ]
        limits = [numbers.randint(*self.outputs) for _ in range(self.requests)]
        record.parameters = {"requests": self.requests, "prompts": self.prompts, "outputs": self.outputs}
        record.parameters |= {"slots": self.slots, "beams": self.beams}
        stats: dict[str, Any] = {}
        runs = {
            BASELINE: partial(self._unpatched, model, prompts, limits),
            STATIC: partial(self._static, model, prompts, limits),
            SUBJECT: partial(self._continuous, model, prompts, limits, stats),
        }
        if context.backends is not None:
            runs = {name: run for name, run in runs.items() if name in (*context.backends, STATIC)}
        made = alternate(runs, self.repetitions_in(context), context.log)
        record.backends = {name: summary([seconds for seconds, _ in found]) for name, found in made.items()}
        record.compare([(STATIC, SUBJECT)])
        tokens = {name: found[0][1] for name, found in made.items()}
        record.identical = all(each == tokens[SUBJECT] for each in tokens.values())
        for name, each in tokens.items():
            record.same[name] = sum(map(list.__eq__, each, tokens[SUBJECT])) / self.requests
        record.accelerated = bool(stats["steps"]) and not stats["repeated"]
        record.metrics["busy"] = stats["busy_row_steps"] / stats["row_steps"]
        record.notes.append(f"{stats['steps']} steps, {100 * record.metrics['busy']:.0f} % of their slots taken")

    def _unpatched(self, model: Any, prompts: list[list[int]], limits: list[int]) -> tuple[float, list[list[int]]]:
        with fastgen.disabled():
            return self._static(model, prompts, limits)

    def _static(self, model: Any, prompts: list[list[int]], limits: list[int]) -> tuple[float, list[list[int]]]:
        start, found = time.perf_counter(), [list[int]() for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        size = self.slots // self.beams
        for first in range(0, len(order), size):
            chosen = order[first : first + size]
            for number, row in zip(chosen, self._batch(model, prompts, limits, chosen), strict=True):
                found[number] = row
        return time.perf_counter() - start, found

    def _batch(self, model: Any, prompts: list[list[int]], limits: list[int], chosen: list[int]) -> list[list[int]]:
        has_encoder, longest = model.config.is_encoder_decoder, max(len(prompts[number]) for number in chosen)
        rows, masks = [], []
        for number in chosen:
            padding = [1] * (longest - len(prompts[number]))
            row, mask = prompts[number], [1] * len(prompts[number])
            rows.append(row + padding if has_encoder else padding + row)
            zeros = [0] * len(padding)
            masks.append(mask + zeros if has_encoder else zeros + mask)
        prompt, own = 1 if has_encoder else longest, [limits[number] for number in chosen]
        made = model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(masks),
            stopping_criteria=[_Limits(prompt, own, self.beams)],
            **self._options(max(own)),
        )
        return [row[prompt : prompt + limit].tolist() for row, limit in zip(made, own, strict=True)]

    def _continuous(
        self, model: Any, prompts: list[list[int]], limits: list[int], stats: dict[str, Any]
    ) -> tuple[float, list[list[int]]]:
        start = time.perf_counter()
        with fastgen.Engine(model, slots=self.slots) as engine:
            futures = [
                engine.submit(prompt, **self._options(limit)) for prompt, limit in zip(prompts, limits, strict=True)
            ]
            results = [future.result()[0].tolist() for future in futures]
            stats.update(engine.stats())
        begin = 1 if model.config.is_encoder_decoder else None
        found = [row[begin or len(prompt) :] for row, prompt in zip(results, prompts, strict=True)]
        return time.perf_counter() - start, found

    def _options(self, new_tokens: int) -> dict[str, Any]:
        return {"max_new_tokens": new_tokens, "num_beams": self.beams, "do_sample": False}


def _faster_than_static(times: float) -> tuple[Target, ...]:
    return (Target("times as fast as FastGen's static batches", f"{STATIC}/{SUBJECT}", at_least=times),)


WORKLOADS = [
    Continuous(
        name="continuous-smollm2",
        title="SmolLM2-135M, numbers of bfloat16, 16 slots, greedy, outputs of 5 to 200 tokens",
        shape=smollm2_instruct_from_bfloat16,
        needs_smollm2=True,
        requests=160,
        prompts=(10, 60),
        outputs=(5, 200),
        targets=_faster_than_static(1.35),
    ),
    Continuous(
        name="continuous-smollm2-beams",
        title="SmolLM2-135M, numbers of bfloat16, 16 slots, 4 beams, outputs of 5 to 200 tokens",
        shape=smollm2_instruct_from_bfloat16,
        needs_smollm2=True,
        requests=40,
        prompts=(10, 60),
        outputs=(5, 200),
        beams=4,
        targets=_faster_than_static(1.25),
    ),
    Continuous(
        name="continuous-opus-mt",
        title="opus-mt's shape, 32 slots, 4 beams, sentences of 5 to 60 tokens",
        shape=opus_mt,
        requests=96,
        prompts=(5, 60),
        outputs=(5, 60),
        slots=32,
        beams=4,
        targets=_faster_than_static(1.25),
    ),
    Continuous(
        name="continuous-bart-base",
        title="BART-base's shape, 32 slots, 4 beams, summaries of 20 to 140 tokens",
        shape=bart_base,
        requests=48,
        prompts=(200, 500),
        outputs=(20, 140),
        slots=32,
        beams=4,
        targets=_faster_than_static(1.25),
    ),
]
