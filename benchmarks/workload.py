"""The workload base class, and the most common kind: one `generate` call on a model with random weights."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastgen
from benchmarks import backends
from benchmarks.backends import BASELINE, SUBJECT, Backend, Job, Unsupported
from benchmarks.backends.generate import CAPTURED_STEP
from benchmarks.measure import alternate, format_seconds, timed
from benchmarks.memory import DevicePeaks
from benchmarks.record import Record


@dataclass(frozen=True)
class Context:
    """The options of a run of the benchmarks.

    Attributes:
        device: of the models.
        threads: of torch; None for torch's default.
        repetitions: overrides that of the workloads.
        quick: fewer repetitions.
        backends: the backends of generation; None for those of each workload.
        log: gets progress lines.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    threads: int | None = None
    repetitions: int | None = None
    quick: bool = False
    backends: tuple[str, ...] | None = None
    log: Callable[[str], None] = lambda line: None

    def chosen_backends(self, further: Iterable[str] = ()) -> list[str]:
        """Returns the backends to measure, for a workload with these besides the two main ones."""
        return backends.in_order((BASELINE, SUBJECT, *further) if self.backends is None else self.backends)


@dataclass(frozen=True, kw_only=True)
class Workload(ABC):
    """A measurement.

    Attributes:
        name: short, for `--only` and as the key of the results.
        title: for tables and the chart.
        quick: part of `--quick`.
        repetitions, quick_repetitions: runs of each backend.
        entry_point: the entry point of `fastgen.stats()` that the subject's runs must have accelerated.
        needs_gpu: it is not meaningful on a CPU, and is skipped there.
        needs_smollm2: it uses the model that `benchmarks.smollm2` makes.
        baseline, subject: the backends of the main comparison.
        exact: whether other backends must produce the baseline's tokens. In half precision they depend on the order of
            summation.
    """

    name: str
    title: str
    quick: bool = False
    repetitions: int = 3
    quick_repetitions: int = 2
    needs_gpu: bool = False
    needs_smollm2: bool = False
    baseline: str = BASELINE
    subject: str = SUBJECT

    group = "other"
    exact = True
    entry_point = "transformers.generate"

    @abstractmethod
    def run(self, context: Context, record: Record) -> None:
        """Measures, and fills in the record as it proceeds: an exception keeps the entries so far."""

    def new_record(self) -> Record:
        """Returns an empty record of this workload."""
        about = {"name": self.name, "title": self.title, "group": self.group}
        return Record(**about, baseline=self.baseline, subject=self.subject)

    def repetitions_in(self, context: Context) -> int:
        """Returns the number of runs of each backend."""
        return context.repetitions or (self.quick_repetitions if context.quick else self.repetitions)


class Outcome(NamedTuple):
    """The result of one run of a backend: its tokens, and FastGen's counts meanwhile."""

    tokens: Tensor
    stats: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Generation(Workload):
    """`model.generate`, unpatched and patched, on random weights and random tokens.

    Every run starts from the same seed, and generates exactly `new_tokens` tokens: no sequence ends early.

    Attributes:
        shape: makes the model; a module-level function that takes changes to the configuration.
        batch: inputs.
        length: tokens of the source, or of the prompt.
        shortest: if set, the lengths of the inputs range from this to `length`, and the batch is padded.
        lengths: if set, makes the lengths of a batch, from the number of inputs and `length`.
        new_tokens: to generate.
        options: further arguments of `generate`.
        config: changes to the configuration of the shape.
        further_backends: backends besides unpatched and patched `generate`.
        dtype: of the model, by its name in torch.
        warm_ups: runs of each backend, or of some steps of it, before it is timed.
    """

    shape: Callable[..., Any]
    batch: int
    length: int
    new_tokens: int
    shortest: int | None = None
    lengths: Callable[[int, int], Tensor] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    further_backends: tuple[str, ...] = ()
    dtype: str = "float32"
    warm_ups: int = 1
    seed: int = 0

    group = "generation"

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return self.dtype == "float32"

    def build(self, device: torch.device) -> tuple[Any, dict[str, Tensor]]:
        """Returns the model and the inputs of `generate`."""
        torch.manual_seed(self.seed)
        model = self.make_model(device)
        return model, self.make_inputs(model)

    def make_inputs(self, model: Any) -> dict[str, Tensor]:
        """Returns tokens for the model, and their mask, on its device."""
        tokens = self._draw_tokens(model)
        mask = torch.ones_like(tokens)
        lengths = self._lengths()
        if lengths is not None:
            lengths = lengths.unsqueeze(1)
            positions = torch.arange(self.length)
            # A prompt is continued at its end, and is therefore padded on the left.
            padding = positions >= lengths if model.config.is_encoder_decoder else positions < self.length - lengths
            mask.masked_fill_(padding, 0)
            tokens.masked_fill_(padding, model.generation_config.pad_token_id)
        return {"input_ids": tokens.to(model.device), "attention_mask": mask.to(model.device)}

    def _draw_tokens(self, model: Any) -> Tensor:
        """Draws tokens [batch, length], on the CPU."""
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        # Special tokens are at both ends of the vocabularies.
        return torch.randint(10, vocabulary - 10, (self.batch, self.length))

    def make_model(self, device: torch.device) -> Any:
        if self.dtype == "float32":
            return self.shape(**self.config).eval().to(device)
        # Uses its own precision and device from the start: 7 billion weights take minutes in float32 on the CPU.
        default = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, self.dtype))
        try:
            with device:
                return self.shape(**self.config).eval()
        finally:
            torch.set_default_dtype(default)

    def _lengths(self) -> Tensor | None:
        """Returns the lengths [batch]; None if all inputs have the maximum length."""
        if self.lengths is not None:
            return self.lengths(self.batch, self.length)
        if self.shortest is not None:
            return torch.linspace(self.shortest, self.length, self.batch).round().long()
        return None

    def generate(self, model: Any, inputs: dict[str, Tensor], new_tokens: int | None = None, **more: Any) -> Tensor:
        """Runs the model's own `generate` once, optionally with more options; returns the tokens."""
        length = self.new_tokens if new_tokens is None else new_tokens
        torch.manual_seed(self.seed + 1)
        with torch.no_grad():
            return model.generate(**inputs, min_new_tokens=length, max_new_tokens=length, **self.options, **more)

    def backends_in(self, context: Context) -> list[str]:
        """Returns the names of the backends to measure."""
        return context.chosen_backends(self.further_backends)

    def run(self, context: Context, record: Record) -> None:
        record.parameters = self.parameters()
        context.log("building the model")
        model, inputs = self.build(context.device)
        record.parameters["model_parameters"] = sum(parameter.numel() for parameter in self.weights(model))
        job = Job(self, model, inputs, torch.get_num_threads())
        peaks = DevicePeaks(context.device)
        with ExitStack() as stack:
            ready = open_backends(stack, self.backends_in(context), job, context, record, peaks)
            outcomes = time_backends(ready, self.repetitions_in(context), context, record, peaks)
            record.compare(backends.pairs((ready[name] for name in outcomes), self.baseline, self.subject))
            record.note_peaks({name: peaks.bytes[name] for name in outcomes if name in peaks.bytes}, peaks.method)
            self.finish(context, record, model)
        self.check(record, ready, outcomes)

    def weights(self, model: Any) -> Iterable[Tensor]:
        """Returns the parameters of the result of `build`."""
        return model.parameters()

    def check(self, record: Record, ready: Mapping[str, Backend], outcomes: Mapping[str, list[Outcome]]) -> None:
        """Checks that the backends ran the intended code, and produced the required tokens."""
        check_code(record, self, ready, outcomes)
        check_tokens(record, self, ready, outcomes)

    def finish(self, context: Context, record: Record, model: Any) -> None:
        """Adds the workload's own metrics, after the backends are timed."""

    def parameters(self) -> dict[str, Any]:
        """Returns the sizes and options, for the record."""
        return {
            "shape": self.shape.__name__,
            "batch": self.batch,
            "length": self.length,
            **({"shortest": self.shortest} if self.shortest is not None else {}),
            **({"lengths": self.lengths.__name__} if self.lengths is not None else {}),
            "new_tokens": self.new_tokens,
            "options": dict(self.options),
            **({"config": dict(self.config)} if self.config else {}),
            "dtype": self.dtype,
        }


def open_backends(
    stack: ExitStack, names: Iterable[str], job: Job, context: Context, record: Record, peaks: DevicePeaks
) -> dict[str, Backend]:
    """Sets the backends up and warms them up. Those that cannot do the job go to `record.skipped`, with the reason.

    Args:
        stack: closes them.
        peaks: measures the memory on the device.
    """
    ready = {}
    for name in names:
        backend = backends.make(name)
        stack.callback(backend.close)
        try:
            with peaks.of(name):
                backend.setup(job)
                start = time.perf_counter()
                backend.warm_up()
        except Exception as error:
            skip(context, record, name, error)
            continue
        backend.warm_up_seconds = time.perf_counter() - start
        context.log(f"{name} is ready, after {format_seconds(backend.warm_up_seconds)} of warming up")
        ready[name] = backend
    return ready


def time_backends(
    ready: Mapping[str, Backend], repetitions: int, context: Context, record: Record, peaks: DevicePeaks
) -> dict[str, list[Outcome]]:
    """Interleaves runs of the backends, puts their times into the record, and returns their outcomes."""
    shapes: list[tuple[int, ...]] = []

    def one_run(name: str, backend: Backend) -> tuple[float, Outcome]:
        fastgen.reset_stats()
        with peaks.of(name):
            seconds, tokens = timed(lambda: backend.run(backend.job.workload.new_tokens), context.device)
        shapes.append(tuple(tokens.shape))
        if not backend.fastgen and shapes[-1] != shapes[0]:
            # Less work than the first one: its time is meaningless.
            raise RuntimeError(f"it made tokens of shape {shapes[-1]} instead of {shapes[0]}")
        return seconds, Outcome(tokens.cpu(), fastgen.stats())

    results = alternate(
        {name: partial(one_run, name, backend) for name, backend in ready.items()},
        repetitions,
        context.log,
        lambda name, error: skip(context, record, name, error),
    )
    outcomes = record.take(results)
    for name, found in record.backends.items():
        found["warm_up_seconds"] = ready[name].warm_up_seconds
        if ready[name].version is not None:
            found["version"] = ready[name].version
    return outcomes


def skip(context: Context, record: Record, name: str, error: Exception) -> None:
    """Records why a backend has no results. Without one of the two main backends, the workload fails."""
    if name in (record.baseline, record.subject):
        raise error
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    record.skipped[name] = said if isinstance(error, Unsupported) else f"{type(error).__name__}: {said}"
    context.log(f"{name} is not measured: {record.skipped[name]}")


def check_code(
    record: Record, work: Workload, ready: Mapping[str, Backend], outcomes: Mapping[str, list[Outcome]]
) -> None:
    """Checks that each backend ran the intended code, and whether the subject was accelerated.

    Raises:
        RuntimeError: a backend that is compared with FastGen ran FastGen's code.
    """
    for name, runs in outcomes.items():
        for outcome in runs:
            if outcome.stats and not ready[name].fastgen:
                raise RuntimeError(f"the unpatched backend ran FastGen's code: {name}: {outcome.stats}")
    for name, runs in outcomes.items():
        if ready[name].fastgen and name != record.subject and not all(_was_accelerated(run.stats) for run in runs):
            record.notes.append(f"{name} was not accelerated throughout: {dict(runs[0].stats)}")
        drafts = [run.stats["transformers.speculation"] for run in runs if "transformers.speculation" in run.stats]
        if verifies := sum(each.get("verifies", 0) for each in drafts):
            accepted = sum(each.get("accepted", 0) for each in drafts) / verifies
            record.notes.append(f"{name}: {accepted:.2f} tokens are accepted in a verify")
    if record.subject not in outcomes:
        return
    record.accelerated = True
    for outcome in outcomes[record.subject]:
        counts = outcome.stats.get(work.entry_point, {})
        if not counts.get("accelerated") or counts.get("fallback") or counts.get("not used"):
            record.accelerated = False
        record.count_fallbacks(outcome.stats)


def _was_accelerated(stats: Mapping[str, Any]) -> bool:
    # A call without a captured step still counts as accelerated; some backends exist to show the difference.
    entries = [entry for name, entry in stats.items() if name != CAPTURED_STEP]
    return any(entry["accelerated"] for entry in entries) and not any(entry["fallback"] for entry in entries)


def check_tokens(
    record: Record, work: Workload, ready: Mapping[str, Backend], outcomes: Mapping[str, list[Outcome]]
) -> None:
    """Checks that every backend produced the required tokens, and computes the share of equal sequences of the others.

    If the workload is not exact, nothing is required, and `record.identical` stays None.
    """
    if record.baseline not in outcomes:
        return
    expected = outcomes[record.baseline][0].tokens
    for name, runs in outcomes.items():
        if work.exact and ready[name].exact:
            for number, outcome in enumerate(runs, 1):
                if not torch.equal(outcome.tokens, expected):
                    record.identical = False
                    record.notes.append(f"run {number} of {name}: {_difference(expected, outcome.tokens)}")
        elif name != record.baseline:
            record.same[name] = min((expected == run.tokens).all(dim=1).float().mean().item() for run in runs)
    if work.exact and record.identical is None:
        record.identical = True


def _difference(expected: Tensor, found: Tensor) -> str:
    if expected.shape != found.shape:
        return f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    rows, positions = (expected != found).nonzero(as_tuple=True)
    return (
        f"{rows.unique().numel()} of {expected.shape[0]} sequences differ, the first at position {int(positions.min())}"
    )
