"""What a workload is, and the kind that most are: one `generate` call on a model with random weights."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastgen
from benchmarks import memory
from benchmarks.measure import PATCHED, SIDES, UNPATCHED, Side, alternate, summary, timed
from benchmarks.record import Record, Target

NEVER_SLOWER = Target(
    "not slower, where a run takes over a second", "ratio", at_least=0.95, when=("baseline_seconds", 1.0)
)


@dataclass(frozen=True)
class Context:
    """How this run of the benchmarks is made.

    Attributes:
        device: where the models are.
        threads: of torch; None leaves torch's default.
        repetitions: overrides that of the workloads.
        quick: fewer repetitions, and memory only where it is cheap.
        log: gets progress lines.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    threads: int | None = None
    repetitions: int | None = None
    quick: bool = False
    log: Callable[[str], None] = lambda line: None


@dataclass(frozen=True, kw_only=True)
class Workload(ABC):
    """Something to measure.

    Attributes:
        name: short, for `--only` and as the key of the results.
        title: for tables and the chart.
        quick: part of `--quick`.
        repetitions, quick_repetitions: runs of each side.
        targets: what its metrics have to reach.
    """

    name: str
    title: str
    quick: bool = False
    repetitions: int = 3
    quick_repetitions: int = 2
    targets: tuple[Target, ...] = ()

    group = "other"

    @abstractmethod
    def run(self, context: Context, record: Record) -> None:
        """Measures, and fills in the record as far as it gets: what is there when an exception ends it is kept."""

    def new_record(self) -> Record:
        """An empty record of this workload."""
        return Record(name=self.name, title=self.title, group=self.group)

    def repetitions_in(self, context: Context) -> int:
        """How often each side runs."""
        return context.repetitions or (self.quick_repetitions if context.quick else self.repetitions)


class _Outcome(NamedTuple):
    tokens: Tensor
    stats: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Generation(Workload):
    """`model.generate`, unpatched and patched, on random weights and random tokens. Instances can be pickled.

    Every run starts from the same seed, and generates exactly `new_tokens` tokens: no sequence ends early.

    Attributes:
        shape: makes the model; a function at the top of a module that takes changes to the configuration.
        batch: inputs.
        length: tokens of the source, or of the prompt.
        shortest: if set, the lengths of the inputs go from this to `length`, and the batch is padded.
        new_tokens: to generate.
        options: further arguments of `generate`.
        config: changes to the configuration of the shape.
        memory, quick_memory: measure memory in a full run, and in a quick one.
    """

    shape: Callable[..., Any]
    batch: int
    length: int
    new_tokens: int
    shortest: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    memory: bool = True
    quick_memory: bool = False
    seed: int = 0

    group = "generation"

    def build(self, device: torch.device) -> tuple[Any, dict[str, Tensor]]:
        """The model and what `generate` gets as input."""
        torch.manual_seed(self.seed)
        model = self.shape(**self.config).eval().to(device)
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        # Special tokens are at the two ends of the vocabularies.
        tokens = torch.randint(10, vocabulary - 10, (self.batch, self.length))
        mask = torch.ones_like(tokens)
        if self.shortest is not None:
            lengths = torch.linspace(self.shortest, self.length, self.batch).round().long().unsqueeze(1)
            places = torch.arange(self.length)
            # A prompt is continued at its end, so it is padded on the left.
            padding = places >= lengths if model.config.is_encoder_decoder else places < self.length - lengths
            mask.masked_fill_(padding, 0)
            tokens.masked_fill_(padding, model.generation_config.pad_token_id)
        return model, {"input_ids": tokens.to(device), "attention_mask": mask.to(device)}

    def smallest(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The shortest useful part of the inputs, for a warm-up."""
        return {name: value[:1, -min(8, value.shape[1]) :] for name, value in inputs.items()}

    def generate(self, model: Any, inputs: dict[str, Tensor], new_tokens: int | None = None) -> Tensor:
        """One run; returns the tokens."""
        length = self.new_tokens if new_tokens is None else new_tokens
        torch.manual_seed(self.seed + 1)
        with torch.no_grad():
            return model.generate(**inputs, min_new_tokens=length, max_new_tokens=length, **self.options)

    def run(self, context: Context, record: Record) -> None:
        record.parameters = self._parameters()
        tokens = self._time(context, record)
        # The processes that measure memory build the model again: this one's must be gone.
        gc.collect()
        if self.quick_memory if context.quick else self.memory:
            self._measure_memory(context, record, memory.digest(tokens))

    def _time(self, context: Context, record: Record) -> Tensor:
        """Times the sides, checks what they did, and returns the tokens of the unpatched side."""
        context.log("building the model")
        model, inputs = self.build(context.device)
        record.parameters["model_parameters"] = sum(parameter.numel() for parameter in model.parameters())

        def one_run(side: Side, new_tokens: int | None = None) -> tuple[float, _Outcome]:
            fastgen.reset_stats()
            with side.active():
                seconds, tokens = timed(lambda: self.generate(model, inputs, new_tokens), context.device)
            return seconds, _Outcome(tokens.cpu(), fastgen.stats())

        for side in SIDES.values():
            # A few steps touch all code and weights, and give caches of prepared weights the time to fill.
            one_run(side, min(3, self.new_tokens))
        results = alternate(
            {side.name: partial(one_run, side) for side in SIDES.values()}, self.repetitions_in(context), context.log
        )
        record.sides = {name: summary([seconds for seconds, _ in runs]) for name, runs in results.items()}
        record.compare()
        reference = results[UNPATCHED.name][0][1].tokens
        _check(record, {name: [outcome for _, outcome in runs] for name, runs in results.items()}, reference)
        return reference

    def _measure_memory(self, context: Context, record: Record, digest: str) -> None:
        for side in SIDES:
            context.log(f"memory of {side}")
            try:
                record.memory[side] = memory.measure_in_process(self, side, str(context.device), context.threads)
            except RuntimeError as error:
                record.errors.append(str(error))
                continue
            if record.memory[side]["digest"] != digest:
                record.identical = False
                record.notes.append(f"the process that measured the memory of {side} generated other tokens")
        if len(record.memory) == len(SIDES):
            unpatched, patched = record.memory[UNPATCHED.name], record.memory[PATCHED.name]
            for metric, key in (
                ("kv_ratio", "kv_bytes_at_end"),
                ("kv_largest_ratio", "kv_bytes_largest"),
                ("peak_ratio", "peak_bytes"),
            ):
                if unpatched[key]:
                    record.metrics[metric] = patched[key] / unpatched[key]

    def _parameters(self) -> dict[str, Any]:
        return {
            "shape": self.shape.__name__,
            "batch": self.batch,
            "length": self.length,
            **({"shortest": self.shortest} if self.shortest is not None else {}),
            "new_tokens": self.new_tokens,
            "options": dict(self.options),
            **({"config": dict(self.config)} if self.config else {}),
            "dtype": "float32",
        }


def _check(record: Record, outcomes: dict[str, list[_Outcome]], reference: Tensor) -> None:
    """Whether the tokens are the same in all runs, and whether each side ran the code that it stands for."""
    record.identical = True
    for name, runs in outcomes.items():
        for number, outcome in enumerate(runs):
            if not torch.equal(outcome.tokens, reference):
                record.identical = False
                record.notes.append(f"run {number + 1} of {name}: {_difference(reference, outcome.tokens)}")
    for outcome in outcomes[UNPATCHED.name]:
        if outcome.stats:
            raise RuntimeError(f"the unpatched side ran FastGen's code: {outcome.stats}")
    record.accelerated = True
    for outcome in outcomes[PATCHED.name]:
        counts = outcome.stats.get("transformers.generate", {})
        if not counts.get("accelerated") or counts.get("fallback"):
            record.accelerated = False
        for entry_point, entry in outcome.stats.items():
            for reason, calls in entry["fallback"].items():
                reasons = record.fallbacks.setdefault(entry_point, {})
                reasons[reason] = reasons.get(reason, 0) + calls


def _difference(expected: Tensor, found: Tensor) -> str:
    if expected.shape != found.shape:
        return f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    rows, places = (expected != found).nonzero(as_tuple=True)
    return f"{rows.unique().numel()} of {expected.shape[0]} sequences differ, the first at position {int(places.min())}"
