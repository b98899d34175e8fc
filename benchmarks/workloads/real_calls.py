"""Many small calls on real models, for the promise that no call is slower, in float32 and in half precision.

The models are those of examples/models, and SmolLM2-135M-Instruct where it is there (`benchmarks.smollm2`). Each call
is short, as calls of an interactive program are: one to sixteen inputs, up to four beams.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastgen
from benchmarks import smollm2
from benchmarks.backends import BASELINE, SUBJECT
from benchmarks.machine import ROOT
from benchmarks.measure import alternate, summary, timed
from benchmarks.record import Record, Target
from benchmarks.workload import Context, Workload

_EXAMPLES = ROOT / "examples"
_PROMPT_WORDS = 12


class Call(NamedTuple):
    """One call: of which model, how many inputs and new tokens, and the options of `generate`."""

    model: str
    batch: int
    new_tokens: int
    options: Mapping[str, Any]

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.model}, batch {self.batch}, {self.new_tokens} new{', ' + options if options else ''}"


def _calls(model: str, new_tokens: int) -> list[Call]:
    beams = {"num_beams": 4}
    return [
        Call(model, 1, new_tokens, {}),
        Call(model, 4, new_tokens, {}),
        Call(model, 16, new_tokens, {}),
        Call(model, 1, new_tokens, beams),
        Call(model, 4, new_tokens, beams),
        Call(model, 8, new_tokens, {"num_beams": 2}),
        Call(model, 1, new_tokens, {**beams, "no_repeat_ngram_size": 3}),
        Call(model, 1, new_tokens, {"do_sample": True}),
        Call(model, 2, new_tokens, {"do_sample": True, "num_return_sequences": 4}),
    ]


_CALLS = [*_calls("kjv-bart", 24), *_calls("kjv-gpt2", 24), *_calls("smollm2", 24)]


@dataclass(frozen=True, kw_only=True)
class RealCalls(Workload):
    """The times of the two backends are those of all calls together; "slowest" is the smallest ratio of a call.

    Attributes:
        dtype: of the models, by its name in torch.
        calls: what is measured.
        repeated_for: seconds. A call is run so often that the runs of a backend take so long.
    """

    dtype: str
    calls: tuple[Call, ...] = field(default=tuple(_CALLS))
    repeated_for: float = 2.5
    repetitions: int = 5
    targets: tuple[Target, ...] = (Target("no call slower", "slowest", at_least=0.97),)

    group = "small calls"

    def run(self, context: Context, record: Record) -> None:
        record.parameters = {"dtype": self.dtype, "repeated_for": self.repeated_for}
        totals: dict[str, float] = {}
        ratios: dict[str, float] = {}
        different = 0
        for call, model, inputs in self._prepared(context, record):
            seconds, same = self._measure(context, call, model, inputs)
            # Of pairs: a machine that is slow for a while is so for both.
            pairs = zip(seconds[BASELINE], seconds[SUBJECT], strict=True)
            ratios[str(call)] = statistics.median(baseline / subject for baseline, subject in pairs)
            context.log(f"{call}: {ratios[str(call)]:.2f}")
            different += not same
            for name, found in seconds.items():
                totals[name] = totals.get(name, 0.0) + statistics.median(found)
        record.backends = {name: summary([found]) for name, found in totals.items()}
        record.compare()
        record.parameters["ratios"] = {call: round(ratio, 3) for call, ratio in ratios.items()}
        record.metrics["slowest"] = min(ratios.values())
        slowest = min(ratios, key=lambda call: ratios[call])
        record.notes.append(f"{len(ratios)} calls; the one that gains least, {ratios[slowest]:.2f}: {slowest}")
        if self.dtype == "float32":
            record.identical = different == 0
        else:
            record.notes.append(f"{len(ratios) - different} of {len(ratios)} calls gave the same tokens")

    def _prepared(self, context: Context, record: Record) -> Iterator[tuple[Call, Any, dict[str, Tensor]]]:
        """Each call with its model and inputs; a model is loaded once."""
        for name in dict.fromkeys(call.model for call in self.calls):
            folder = smollm2.folder() if name == "smollm2" else _EXAMPLES / "models" / name
            if folder is None:
                record.skipped[name] = smollm2.MISSING
                continue
            context.log(f"loading {name}")
            model, tokenizer = _load(folder, self.dtype, context.device)
            for call in self.calls:
                if call.model == name:
                    yield call, model, _inputs(call, model, tokenizer)

    def _measure(
        self, context: Context, call: Call, model: Any, inputs: dict[str, Tensor]
    ) -> tuple[dict[str, list[float]], bool]:
        """Seconds of a call by backend, and whether both gave the same tokens."""
        options = {"do_sample": False, **call.options, "min_new_tokens": call.new_tokens}

        def measured(accelerated: bool) -> tuple[float, Tensor]:
            with fastgen.disabled() if not accelerated else nullcontext():
                return timed(partial(self._run, model, inputs, call, options), context.device)

        backends = {BASELINE: partial(measured, False), SUBJECT: partial(measured, True)}
        alternate(backends, 1)  # warms up
        once = min(seconds for (seconds, _), *_ in alternate(backends, 1).values())
        results = alternate(backends, max(math.ceil(self.repeated_for / once), self.repetitions_in(context)))
        seconds = {name: [each for each, _ in runs] for name, runs in results.items()}
        return seconds, torch.equal(results[BASELINE][0][1], results[SUBJECT][0][1])

    def _run(self, model: Any, inputs: dict[str, Tensor], call: Call, options: dict[str, Any]) -> Tensor:
        torch.manual_seed(0)
        return model.generate(**inputs, max_new_tokens=call.new_tokens, **options)


def _load(folder: Path, dtype: str, device: torch.device) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    is_encoder_decoder = AutoConfig.from_pretrained(folder).is_encoder_decoder
    kind = AutoModelForSeq2SeqLM if is_encoder_decoder else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=getattr(torch, dtype)).eval().to(device)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right" if is_encoder_decoder else "left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def _inputs(call: Call, model: Any, tokenizer: Any) -> dict[str, Tensor]:
    """The first sources of the example data; for a language model their first words."""
    lines = (_EXAMPLES / "data" / "heldout.src.txt").read_text(encoding="utf-8").splitlines()[: call.batch]
    if not model.config.is_encoder_decoder:
        lines = [" ".join(line.split()[:_PROMPT_WORDS]) for line in lines]
    encoded = tokenizer(lines, return_tensors="pt", padding=True)
    return {name: encoded[name].to(model.device) for name in ("input_ids", "attention_mask")}


WORKLOADS = [
    RealCalls(name=f"real-calls-{dtype}", title=f"Small calls on real models, {dtype}", dtype=dtype)
    for dtype in ("float32", "bfloat16", "float16")
]
