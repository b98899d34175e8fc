"""The session of one user from the start of a process: calls of `generate`, all of them different.

Other workloads repeat one call, warmed up. Here each call has another prompt, another length and mostly another number
of inputs, and its time includes all one-time work (first uses of the library, conversion of weights, captured steps).
Every backend has a fresh process, and they alternate call by call (`benchmarks.lockstep`). Times exclude the import and
the loading of the model, which `first_call` measures.
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from benchmarks import ROOT, backends, lockstep, smollm2
from benchmarks.backends import BASELINE, SUBJECT, Backend, Job
from benchmarks.backends.generate import CAPTURED_STEP
from benchmarks.lockstep import Call, Session, Side
from benchmarks.machine import BUSY
from benchmarks.measure import summary
from benchmarks.record import Record
from benchmarks.workload import Context, Generation, Workload, check_code, check_tokens, skip
from benchmarks.workloads.shapes import bart_base, opus_mt
from benchmarks.workloads.smollm2_chat import smollm2_of_32_bits

FIRST_CALLS = 5
_TEXT = ROOT / "examples" / "data" / "heldout.ref.txt"


class Request(NamedTuple):
    """The sizes of a call: tokens of each input, and the number of new ones."""

    lengths: tuple[int, ...]
    new_tokens: int

    def __str__(self) -> str:
        return f"{len(self.lengths)} x {max(self.lengths)} tokens, {self.new_tokens} new"


@dataclass(frozen=True, kw_only=True)
class OrdinarySession(Workload):
    """The time of a backend is that of all calls of one process together; as a median, the sum of the calls' medians.

    A call that other load disturbed does not count if the same call of another process was undisturbed.

    Attributes:
        work: defines the longest call: `shortest` and `length` are the tokens of an input, `new_tokens` the most new
            ones; its batch is not used.
        fewest_new_tokens: of a call.
        batches: the numbers of inputs to draw from.
        calls: their number.
        seed: of the sizes and the inputs.
        further_backends: backends besides the library and FastGen.
        repetitions: processes of each backend.
    """

    work: Generation
    fewest_new_tokens: int
    batches: tuple[int, ...] = (1, 1, 1, 2, 4)
    calls: int = 24
    seed: int = 0
    further_backends: tuple[str, ...] = ()
    repetitions: int = 5

    group = "generation"

    def run(self, context: Context, record: Record) -> None:
        requests = self.requests()
        record.parameters = {**self.work.parameters(), "batches": list(self.batches), "seed": self.seed}
        made = {name: backends.make(name) for name in context.chosen_backends(self.further_backends)}
        with tempfile.TemporaryDirectory(prefix="fastgen-session-") as folder:
            calls, sides = self._prepare(context, record, requests, made, Path(folder))
            sessions = self._run(context, record, calls, sides)
        self._fill(record, requests, sessions, made)

    def requests(self) -> list[Request]:
        """Returns the sizes of the calls, all of them different."""
        drawn, sizes = random.Random(self.seed), set[tuple[int, int, int]]()
        found: list[Request] = []
        assert self.work.shortest is not None
        while len(found) < self.calls:
            batch = drawn.choice(self.batches)
            lengths = tuple(drawn.randint(self.work.shortest, self.work.length) for _ in range(batch))
            request = Request(lengths, drawn.randint(self.fewest_new_tokens, self.work.new_tokens))
            size = (batch, max(lengths), request.new_tokens)
            if size not in sizes:
                sizes.add(size)
                found.append(request)
        return found

    def _prepare(
        self, context: Context, record: Record, requests: list[Request], made: Mapping[str, Backend], folder: Path
    ) -> tuple[list[Call], dict[str, Side]]:
        """Returns the inputs, and the model in each backend's format. The model itself is then released."""
        context.log("building the model")
        torch.manual_seed(self.work.seed)
        model = self.work.make_model(context.device)
        record.parameters["model_parameters"] = sum(parameter.numel() for parameter in model.parameters())
        calls = [self._call(model, request, number) for number, request in enumerate(requests)]
        job = Job(self.work, model, {}, torch.get_num_threads())
        sides = {}
        for name, backend in made.items():
            (folder / name).mkdir()
            try:
                sides[name] = lockstep.side(backend, job, context.threads, folder / name)
            except Exception as error:
                skip(context, record, name, error)
            del backend.job
        del model, job
        gc.collect()
        return calls, sides

    def _call(self, model: Any, request: Request, number: int) -> Call:
        work = replace(
            self.work,
            batch=len(request.lengths),
            length=max(request.lengths),
            lengths=lambda batch, length: torch.tensor(request.lengths),
            new_tokens=request.new_tokens,
        )
        torch.manual_seed(1000 * self.seed + number)
        return Call({name: value.tolist() for name, value in work.make_inputs(model).items()}, request.new_tokens)

    def _run(
        self, context: Context, record: Record, calls: list[Call], sides: dict[str, Side]
    ) -> dict[str, list[Session]]:
        """Returns the processes of each backend. A backend that failed in one of them has none."""
        found: dict[str, list[Session]] = {name: [] for name in sides}

        def failed(name: str, error: Exception) -> None:
            skip(context, record, name, error)
            del found[name]

        repetitions = self.repetitions_in(context)
        for repetition in range(repetitions):
            context.log(f"processes {repetition + 1} of {repetitions}")
            ran = lockstep.run({name: sides[name] for name in found}, calls, failed, repetition, context.log)
            shapes = {name: [outcome.tokens.shape for outcome in session.outcomes] for name, session in ran.items()}
            for name, session in ran.items():
                if shapes[name] == shapes.get(BASELINE, shapes[name]):
                    found[name].append(session)
                else:
                    failed(name, RuntimeError("it made more or fewer tokens than the library"))
        return found

    def _fill(
        self,
        record: Record,
        requests: list[Request],
        sessions: dict[str, list[Session]],
        made: Mapping[str, Backend],
    ) -> None:
        """Fills in the record from these processes."""
        seconds = {name: numpy.array([run.seconds for run in runs]) for name, runs in sessions.items()}
        disturbed = {name: numpy.array([run.other_load for run in runs]) > BUSY for name, runs in sessions.items()}
        # The median of each call: other load may have disturbed different calls of each process.
        medians = {name: _medians(each, disturbed[name]) for name, each in seconds.items()}
        for name, runs in sessions.items():
            record.backends[name] = summary(seconds[name].sum(axis=1).tolist()) | {"version": runs[0].version}
            record.backends[name]["median"] = float(medians[name].sum())
        peaks = {name: statistics.median(run.peak_bytes for run in runs) for name, runs in sessions.items()}
        record.note_peaks(peaks, "resident set of the process (high-water mark)")
        record.compare(backends.pairs((made[name] for name in sessions), BASELINE, SUBJECT))
        outcomes = {name: [each for run in runs for each in run.outcomes] for name, runs in sessions.items()}
        check_code(record, self.work, made, outcomes)
        self._check_tokens(record, sessions, made)
        record.parameters["calls"] = [
            {
                "lengths": list(request.lengths),
                "new_tokens": request.new_tokens,
                "seconds": {name: float(times[number]) for name, times in medians.items()},
                "disturbed": any(bool(each[:, number].all()) for each in disturbed.values()),
            }
            for number, request in enumerate(requests)
        ]
        if {BASELINE, SUBJECT} <= sessions.keys():
            # A call's ratio is the median over the pairs of processes.
            pairs = seconds[BASELINE] / seconds[SUBJECT]
            ratios = _medians(pairs, disturbed[BASELINE] | disturbed[SUBJECT])
            first = [float(medians[name][:FIRST_CALLS].sum()) for name in (BASELINE, SUBJECT)]
            self._compare_calls(record, requests, ratios.tolist(), first[0] / first[1], sessions[SUBJECT])

    def _check_tokens(self, record: Record, sessions: dict[str, list[Session]], made: Mapping[str, Backend]) -> None:
        """Compares the tokens of each call with the library's."""
        same: dict[str, list[float]] = {}
        for number in range(self.calls):
            of_call = Record(name="", title="", group="")
            outcomes = {name: [run.outcomes[number] for run in runs] for name, runs in sessions.items()}
            check_tokens(of_call, self.work, made, outcomes)
            record.notes += [f"call {number + 1}, {note}" for note in of_call.notes]
            record.identical = of_call.identical if record.identical is not False else False
            for name, share in of_call.same.items():
                same.setdefault(name, []).append(share)
        record.same = {name: statistics.mean(shares) for name, shares in same.items()}
        if SUBJECT in same:
            equal = sum(share == 1.0 for share in same[SUBJECT])
            record.notes.append(f"{equal} of {self.calls} calls gave the same tokens")

    def _compare_calls(
        self, record: Record, requests: list[Request], ratios: list[float], first: float, ours: list[Session]
    ) -> None:
        """Compares FastGen with the library, call by call; `first` is the ratio of the first calls together."""
        stats = [[run.outcomes[number].stats.get(CAPTURED_STEP, {}) for run in ours] for number in range(self.calls)]
        captured = [all(each.get("accelerated") for each in of_call) for of_call in stats]
        for call, ratio, with_step in zip(record.parameters["calls"], ratios, captured, strict=True):
            call |= {"ratio": round(ratio, 3), "captured": with_step}
        slowest, mean = min(range(self.calls), key=ratios.__getitem__), statistics.mean(ratios)
        record.metrics |= {
            "first_calls": first,
            "mean_of_calls": mean,
            "slowest": ratios[slowest],
            "captured": sum(captured),
        }
        record.notes.append(
            f"calls 1 to {FIRST_CALLS}: {first:.2f} times as fast; the mean of the {self.calls} ratios is {mean:.2f}, "
            f"the smallest {ratios[slowest]:.2f} (call {slowest + 1}: {requests[slowest]}); {sum(captured)} calls had "
            "a captured step"
        )


def _medians(values: numpy.ndarray, disturbed: numpy.ndarray) -> numpy.ndarray:
    """Returns medians [calls] of values [processes, calls] over undisturbed processes; over all if none is."""
    left_out = disturbed & ~disturbed.all(axis=0)
    return numpy.nanmedian(numpy.where(left_out, numpy.nan, values), axis=0)


@cache
def _text() -> Tensor:
    """Returns the tokens of the example text in SmolLM2's vocabulary."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2.folder())
    return tokenizer(_TEXT.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"][0]


@dataclass(frozen=True, kw_only=True)
class _Continuation(Generation):
    """Takes prompts from a text, whose tokens a trained model knows."""

    def _draw_tokens(self, model: Any) -> Tensor:
        text = _text()
        starts = torch.randint(0, len(text) - self.length, (self.batch,)).tolist()
        return torch.stack([text[start : start + self.length] for start in starts])


def _session(work: Generation, title: str, than: str, fewest_new_tokens: int = 12, **changes: Any) -> OrdinarySession:
    return OrdinarySession(
        name=f"ordinary-session-{work.name}",
        title=f"Session, {title}",
        work=work,
        further_backends=(than,),
        fewest_new_tokens=fewest_new_tokens,
        **changes,
    )


_SENTENCES: dict[str, Any] = {"batch": 4, "shortest": 8, "length": 160, "new_tokens": 96}
_SUMMARIES: dict[str, Any] = {"batch": 8, "shortest": 100, "length": 500, "new_tokens": 70}
_GREEDY, _BEAMS = {"do_sample": False}, {"do_sample": False, "num_beams": 4}
_chat = partial(_Continuation, title="SmolLM2-135M", shape=smollm2_of_32_bits, options=_GREEDY, **_SENTENCES)
_translation = Generation(name="opus-mt", title="opus-mt", shape=opus_mt, options=_BEAMS, **_SENTENCES)
_summaries = Generation(name="bart-base", title="BART-base", shape=bart_base, options=_BEAMS, **_SUMMARIES)

WORKLOADS = [
    _session(_chat(name="smollm2"), "SmolLM2-135M, 32-bit weights, greedy", "openvino", needs_smollm2=True),
    _session(
        _chat(name="smollm2-bfloat16", dtype="bfloat16"),
        "SmolLM2-135M, bfloat16, greedy",
        "openvino",
        needs_smollm2=True,
    ),
    _session(_translation, "opus-mt, 4 beams", "ctranslate2"),
    _session(
        _summaries,
        "BART-base, 4 beams, 1 to 8 documents of 100 to 500 tokens",
        "ctranslate2",
        fewest_new_tokens=20,
        batches=tuple(range(1, 9)),
    ),
]
