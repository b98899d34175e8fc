"""What the host does for a captured step, with the GPU's time left out.

Two runs of different lengths on a model with the layers of BART-large and hardly any width. The clock of the host runs
from start to end, less what passes inside of the calls that wait for the device (`Event.synchronize`,
`Stream.synchronize`, `torch.cuda.synchronize`): with these, all that is counted is the host's own work. The difference
of the two runs over the difference of their steps is the time per step; what a call does before and after its steps
cancels out, waiting for a tensor's value included. A wait in every step would not show here. It shows in
"waits_per_step", and in the times of all other workloads.

Methods of tensors are left alone: a step is not captured where one of those that a model's code names is replaced.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

import fastgen
from benchmarks.measure import summary
from benchmarks.record import Record, Target
from benchmarks.workload import CAPTURED_STEP, Context, Workload
from benchmarks.workloads.gpu_models import BART_LARGE, OnGpu

_WAITING: tuple[tuple[Any, str], ...] = (
    (torch.cuda.Event, "synchronize"),
    (torch.cuda.Stream, "synchronize"),
    (torch.cuda, "synchronize"),
)


class Waits:
    """How often the host waited for the device, and for how many seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.count = 0
        self._inside = False

    def timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time counted; a wait inside a wait counts once."""

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return original(*args, **kwargs)
            self._inside, start = True, time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self.count += 1
                self._inside = False

        return call


@contextmanager
def waits() -> Iterator[Waits]:
    """Counts what waits for the device inside the block."""
    found = Waits()
    own = [(holder, name, name in vars(holder), getattr(holder, name)) for holder, name in _WAITING]
    try:
        for holder, name, _, original in own:
            setattr(holder, name, found.timed(original))
        yield found
    finally:
        for holder, name, is_own, original in own:
            if is_own:
                setattr(holder, name, original)
            else:
                delattr(holder, name)


class _Run(NamedTuple):
    host: float
    wall: float
    waits: int


@dataclass(frozen=True, kw_only=True)
class HostTime(Workload):
    """Attributes: the `work`, whose number of new tokens is that of the long run, and the `short` run's."""

    work: OnGpu
    short: int
    needs_gpu: bool = True
    repetitions: int = 5

    group = "operator"
    entry_point = CAPTURED_STEP

    def run(self, context: Context, record: Record) -> None:
        record.baseline = record.subject
        record.parameters = {**self.work.parameters(), "short": self.short}
        model, inputs = self.work.build(context.device)
        lengths = (self.short, self.work.new_tokens)
        works = [replace(self.work, new_tokens=length) for length in lengths]
        for work in works * 2:  # captured by the second call at the latest
            work.generate(model, inputs)
        fastgen.reset_stats()
        found = []
        for _ in range(self.repetitions_in(context)):
            short, long = (_measure(lambda work=work: work.generate(model, inputs), context.device) for work in works)
            steps = lengths[1] - lengths[0]
            found.append(_Run(*((b - a) / steps for a, b in zip(short, long, strict=True))))
        record.backends["fastgen"] = summary([each.host for each in found])
        record.metrics["host_ms_per_step"] = record.backends["fastgen"]["median"] * 1e3
        record.metrics["wall_ms_per_step"] = summary([each.wall for each in found])["median"] * 1e3
        record.metrics["waits_per_step"] = summary([each.waits for each in found])["median"]
        counts = fastgen.stats().get(self.entry_point, {})
        left = counts.get("fallback") or counts.get("not used")
        record.accelerated = bool(counts.get("accelerated")) and not left
        reasons = {name: {**entry["fallback"], **entry.get("not used", {})} for name, entry in fastgen.stats().items()}
        record.fallbacks = {name: found for name, found in reasons.items() if found}
        if not record.accelerated:
            record.notes.append("no step was captured: the time is that of the hooks")


def _measure(work: Callable[[], Any], device: torch.device) -> _Run:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    with waits() as found:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        wall = time.perf_counter() - start
    return _Run(wall - found.seconds, wall, found.count)


HOST_TIME = HostTime(
    name="gpu-host-time",
    title="Host time per captured step, 12 layers",
    work=replace(
        BART_LARGE,
        name="host-time",
        batch=1,
        length=64,
        lengths=None,
        new_tokens=200,
        config={
            "vocab_size": 1024,
            "d_model": 128,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
        },
    ),
    short=72,
    seconds=20,
    targets=(Target("milliseconds of the host per step", "host_ms_per_step", at_most=0.1),),
)
