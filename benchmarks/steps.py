"""Where the time of a captured step goes, on the CPU.

    python -m benchmarks.steps NAME [NAME ...] [--calls N] [--threads N] [--help]

A name is that of a workload (`python -m benchmarks --list`). Its calls run with captured steps, every operator of
which is timed. In as many calls before, steps are timed as they are: there, several operators are one call from Python,
a command list. A step is from one replay to the next one, so it has the loop around the operators, too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

import fastgen
from benchmarks.measure import format_seconds
from benchmarks.workload import Generation
from benchmarks.workloads import all_workloads
from fastgen import settings
from fastgen.decoding.captured.program import Program

PRODUCTS, SEARCH = "products with weights", "search and the rest"
# By a part of the operator's name; those of torch are "addmm" and "mm".
_KINDS = {
    **dict.fromkeys(("gemv", "gemm", "linear", "mm.", "Head.multiply"), PRODUCTS),
    "attention": "attention",
    "elementwise": "small operators",
}


class Steps:
    """What was seen of the steps of some calls.

    Attributes:
        seconds: of each step, from its beginning to that of the next one in the same call.
        operators: seconds of each step in operators, by kind; of other calls than those of `seconds`.
        by_operator: whether operators are timed, or steps.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.operators: list[dict[str, float]] = []
        self.by_operator = False
        self._first: Program | None = None
        self._began: float | None = None

    def begin(self, program: Program) -> None:
        """A program is about to be executed: if it is the first part of a step, a step begins."""
        self._first = self._first or program
        if program is not self._first:
            return
        now = time.perf_counter()
        if self.by_operator:
            self.operators.append(defaultdict(float))
        elif self._began is not None:
            self.seconds.append(now - self._began)
        self._began = now

    def end_call(self) -> None:
        """The last step of a call has nothing behind it, so it is left out."""
        if self._began is not None and self.by_operator:
            del self.operators[-1]
        self._first = self._began = None

    def execute(self, call: Callable[[], object]) -> None:
        start = time.perf_counter()
        call()
        self.operators[-1][kind(call)] += time.perf_counter() - start

    def rows(self) -> list[tuple[str, float]]:
        """Median seconds of each kind of operator, and of the whole step."""
        names = [*dict.fromkeys(_KINDS.values()), SEARCH]
        medians = [(name, statistics.median(each[name] for each in self.operators)) for name in names]
        return [*medians, ("the step", statistics.median(self.seconds))]


def kind(call: Any) -> str:
    """Of what operator a call of a program is; where its result is copied, the operator is an argument itself."""
    inside = next((each for each in call.args if isinstance(each, partial)), None)
    if inside is not None:
        return kind(inside)
    return next((title for part, title in _KINDS.items() if part in str(call.func)), SEARCH)


@contextmanager
def watched(steps: Steps) -> Iterator[None]:
    """Inside this, steps are timed, as a whole or operator by operator."""
    calls_of = Program.calls

    def timed_calls(program: Program, planned: bool) -> Sequence[Callable[[], object]]:
        steps.begin(program)
        calls = calls_of(program, planned and not steps.by_operator)
        return [partial(steps.execute, call) for call in calls] if steps.by_operator else calls

    Program.calls = timed_calls  # type: ignore[method-assign]
    try:
        yield
    finally:
        Program.calls = calls_of  # type: ignore[method-assign]


def measure_steps(workload: Generation, calls: int) -> Steps:
    """The steps of some calls.

    Raises:
        RuntimeError: its calls have no captured steps.
    """
    model, inputs = workload.build(torch.device("cpu"))
    steps = Steps()
    with settings.changed(captured_step="always"):
        workload.generate(model, inputs)
        with watched(steps):
            for steps.by_operator in (False, True):
                for _ in range(calls):
                    workload.generate(model, inputs)
                    steps.end_call()
    if not steps.seconds:
        raise RuntimeError(f"{workload.name} has no captured steps: {fastgen.stats()}")
    return steps


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description=__doc__.split("\n")[0])
    known = {each.name: each for each in all_workloads() if isinstance(each, Generation) and not each.needs_gpu}
    parser.add_argument("names", nargs="+", metavar="NAME", choices=sorted(known), help="of a workload on the CPU")
    parser.add_argument("--calls", type=int, default=3, metavar="N", help="with timed steps (default: %(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch (default: torch's)")
    given = parser.parse_args(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    for name in given.names:
        print(f"\n### {known[name].title}\n\n| | of a step |\n| --- | --- |")
        for title, seconds in measure_steps(known[name], given.calls).rows():
            print(f"| {title} | {format_seconds(seconds)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
