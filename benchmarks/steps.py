"""Captured steps on the CPU: where the time of a step goes, what a step reads, and what recording costs a first call.

    python -m benchmarks.steps NAME [NAME ...] [--calls N] [--models N] [--threads N] [--help]

A name is that of a workload (`python -m benchmarks --list`). Its calls run with captured steps, every operator of
which is timed. In as many calls before, steps are timed as they are: there, several operators are one call from Python,
a plan. A step is from one replay to the next one, so it has the loop around the operators, too. The time outside of
kernels is what these calls do not take, and for each operator the time that the smallest one of FastGen's takes, by
itself or in a plan.

The floor is the bytes of the weights that a step reads, at the rate of a large copy (bytes read and written), which is
measured right after the calls. Reading alone can be faster than a copy, so a share above 1 is possible. Weights that
are read from copies, in fewer bits, are not among these bytes.

First calls are those of new models: without FastGen, without captured steps, by default, and with a step from the
first call on. The last line is a later call of that model.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fastgen
from benchmarks.measure import copy_bandwidth, format_seconds, seconds_of, timed
from benchmarks.workload import Generation
from benchmarks.workloads import all_workloads
from fastgen import settings
from fastgen.decoding.captured.program import Program
from fastgen.ops import _plan

_CPU = torch.device("cpu")
_COPY_BYTES = 2**28
_RUN_PLAN = torch.ops.fastgen.run_plan.default
PRODUCTS = "products with weights"
# By a part of the operator's name; those of torch are "addmm" and "mm".
_KINDS = {
    **dict.fromkeys(("gemv", "gemm", "linear", "mm.", "Step.estimate"), PRODUCTS),
    "attention": "attention",
    "elementwise": "small operators",
}
OTHERS = "search and the rest"
# How first calls run: what they are called, and the setting; None for the library alone.
FIRST_CALLS = (
    ("without FastGen", None),
    ("without captured steps", "never"),
    ("by default", "auto"),
    ("captured at once", "always"),
)


class Smallest(NamedTuple):
    """Seconds of an operator that does next to nothing: called from Python, and as one of many in a plan."""

    alone: float
    in_plan: float


@dataclass
class Steps:
    """What was seen of the steps of some calls.

    Attributes:
        seconds: of each step, from its beginning to that of the next one in the same call.
        inside: of each of these, in the calls that it makes.
        operators: seconds of each step in operators, by kind; of other calls than those of `seconds`.
        calls: operators of a step.
        alone: of these, those that are no part of a plan.
        weights: the memory of weights that a step reads, by address.
        by_operator: whether operators are timed, or steps.
    """

    seconds: list[float] = field(default_factory=list)
    inside: list[float] = field(default_factory=list)
    operators: list[dict[str, float]] = field(default_factory=list)
    calls: int = 0
    alone: int = 0
    weights: dict[int, int] = field(default_factory=dict)
    by_operator: bool = False
    _first: Program | None = None
    _began: float | None = None
    _inside: float = 0.0

    def begin(self, program: Program) -> None:
        """A program is about to be executed: if it is the first part of a step, a step begins."""
        if self._first is None:
            self._first = program
        if program is not self._first:
            return
        now = time.perf_counter()
        if self.by_operator:
            self.operators.append(defaultdict(float))
            self.calls = 0
        else:
            if self._began is not None:
                self.seconds.append(now - self._began)
                self.inside.append(self._inside)
            self.alone = 0
        self._began, self._inside = now, 0.0

    def end_call(self) -> None:
        """The last step of a call has nothing behind it, so it is left out."""
        if self._began is not None and self.by_operator:
            del self.operators[-1]
        self._first = self._began = None

    def execute(self, call: Callable[[], object]) -> None:
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        if self.by_operator:
            self.operators[-1][kind(call)] += seconds
            self.calls += 1
        else:
            self._inside += seconds
            self.alone += _innermost(call).func is not _RUN_PLAN

    def share_outside(self, smallest: Smallest) -> float:
        """The part of the time that is in no kernel, if an operator that does next to nothing takes so long."""
        idle = smallest.alone * self.alone + smallest.in_plan * (self.calls - self.alone)
        return 1 - (statistics.median(self.inside) - idle) / statistics.median(self.seconds)

    def rows(self) -> list[tuple[str, float]]:
        """Median seconds of each kind of operator, and of the whole step."""
        names = [*dict.fromkeys(_KINDS.values()), OTHERS]
        medians = [(name, statistics.median(each[name] for each in self.operators)) for name in names]
        return [*medians, ("the step", statistics.median(self.seconds))]


def kind(call: Callable[[], object]) -> str:
    """Of what operator a call of a program is."""
    name = str(_innermost(call).func)
    return next((title for part, title in _KINDS.items() if part in name), OTHERS)


def _innermost(call: Any) -> partial[object]:
    """The operator and what it gets; where its result is copied, it is an argument itself."""
    inside = next((each for each in call.args if isinstance(each, partial)), None)
    return call if inside is None else _innermost(inside)


@contextmanager
def watched(steps: Steps, model: torch.nn.Module) -> Iterator[None]:
    """Inside this, steps of the model are timed operator by operator."""
    storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in model.parameters()}
    calls_of = Program.calls

    def read(call: Callable[[], object]) -> Iterator[int]:
        operator = _innermost(call)
        if not any(name in str(operator.func) for name in ("embedding", "index_select")):  # they read a few lines
            for each in tree_leaves((operator.args, operator.keywords)):
                if isinstance(each, Tensor):
                    yield each.untyped_storage().data_ptr()

    def timed_calls(program: Program, planned: bool) -> Sequence[Callable[[], object]]:
        """The program's own calls with a clock around them."""
        steps.begin(program)
        calls = calls_of(program, planned and not steps.by_operator)
        if steps.by_operator:
            last[program] = calls
        return [partial(steps.execute, call) for call in calls]

    last: dict[Program, Sequence[Callable[[], object]]] = {}  # one by one, as in the last step of each program
    Program.calls = timed_calls  # type: ignore[method-assign]
    try:
        yield
    finally:
        Program.calls = calls_of  # type: ignore[method-assign]
        addresses = (address for calls in last.values() for call in calls for address in read(call))
        steps.weights |= {address: storages[address] for address in addresses if address in storages}


def smallest_operator() -> Smallest:
    operator = torch.ops.fastgen.rms_norm_out.default
    with torch.inference_mode():
        x = torch.zeros(1, 1)
        calls: list[Callable[[], object]] = [partial(operator, torch.zeros(1, 1), x, x[0], 1e-6, 0.0, False)] * 1000
        (plan,) = _plan.planned(calls)
        return Smallest(seconds_of(calls, _CPU), seconds_of([plan], _CPU) / len(calls))


def measure_steps(workload: Generation, calls: int) -> tuple[Steps, float]:
    """The steps of some calls, and the rate of a copy right after them.

    Raises:
        RuntimeError: its calls have no captured steps.
    """
    model, inputs = workload.build(_CPU)
    steps = Steps()
    with settings.changed(captured_step="always"):
        workload.generate(model, inputs)
        with watched(steps, model):
            for steps.by_operator in (False, True):
                for _ in range(calls):
                    workload.generate(model, inputs)
                    steps.end_call()
    if not steps.seconds:
        raise RuntimeError(f"{workload.name} has no captured steps: {fastgen.stats()}")
    return steps, copy_bandwidth(_CPU, _COPY_BYTES)


def first_calls(workload: Generation, models: int) -> list[tuple[str, float]]:
    """Median seconds of the first calls of new models, in turn; and of a later call."""
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(models):
        for name, setting in FIRST_CALLS:
            model, inputs = workload.build(_CPU)
            run = partial(workload.generate, model, inputs)
            with fastgen.disabled() if setting is None else settings.changed(captured_step=setting):
                found[name].append(timed(run)[0])
                if setting == "always":
                    found["a later call"].append(timed(run)[0])
            del model, inputs, run
            gc.collect()
    return [(name, statistics.median(seconds)) for name, seconds in found.items()]


def report(workload: Generation, calls: int, models: int) -> Iterator[str]:
    """Lines of Markdown."""
    steps, speed = measure_steps(workload, calls)
    yield f"\n### {workload.title}\n\n| | of a step |\n| --- | --- |"
    for name, seconds in steps.rows():
        yield f"| {name} | {format_seconds(seconds)} |"
    outside, read = steps.share_outside(smallest_operator()), sum(steps.weights.values())
    step = statistics.median(steps.seconds)
    yield f"| outside of kernels ({steps.calls} operators, {steps.alone} of them in no plan) | {outside:.1%} |"
    yield f"| weights read, at {speed / 1e9:.1f} GB/s of a copy | {read / 1e6:.0f} MB, {format_seconds(read / speed)} |"
    yield f"| bytes of weights per second, as a part of a copy | {read / step / speed:.2f} |"
    if models:
        yield "\n| first call | |\n| --- | --- |"
        for name, seconds in first_calls(workload, models):
            yield f"| {name} | {format_seconds(seconds)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description=__doc__.split("\n")[0])
    known = {each.name: each for each in all_workloads() if isinstance(each, Generation) and not each.needs_gpu}
    parser.add_argument("names", nargs="+", metavar="NAME", choices=sorted(known), help="of a workload on the CPU")
    parser.add_argument("--calls", type=int, default=3, metavar="N", help="with timed steps (default: %(default)s)")
    parser.add_argument(
        "--models", type=int, default=3, metavar="N", help="new ones for each kind of first call (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="of torch (default: torch's)")
    given = parser.parse_args(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    for name in given.names:
        for line in report(known[name], given.calls, given.models):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
