"""What `import fastgen` costs, each measured in a fresh interpreter by its own clock.

Backends:

* import torch;
* import fastgen: in an interpreter that has imported nothing else;
* import fastgen after torch: what it adds to a program that uses torch;
* import fastgen after transformers: what it adds where the patches are applied at once, operators loaded.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.machine import ROOT
from benchmarks.measure import alternate, summary
from benchmarks.memory import child_environment
from benchmarks.record import Record, Target
from benchmarks.workload import Context, Workload

_TORCH = "import torch"
_FASTGEN = "import fastgen"
# (name, imported before the clock starts, imported while it runs)
_BACKENDS = (
    (_TORCH, "pass", _TORCH),
    (_FASTGEN, "pass", _FASTGEN),
    (f"{_FASTGEN} after torch", _TORCH, _FASTGEN),
    (f"{_FASTGEN} after transformers", "from transformers import GenerationMixin", _FASTGEN),
)


@dataclass(frozen=True, kw_only=True)
class Imports(Workload):
    """Seconds of imports in fresh processes."""

    repetitions: int = 7
    quick_repetitions: int = 3
    quick: bool = True

    group = "import"

    def new_record(self) -> Record:
        record = super().new_record()
        record.baseline, record.subject = _TORCH, _FASTGEN
        return record

    def run(self, context: Context, record: Record) -> None:
        environment = child_environment(context.threads)

        def run_of(before: str, statement: str) -> Callable[[], tuple[float, None]]:
            code = (
                f"import time; {before}; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
            )

            def run() -> tuple[float, None]:
                done = subprocess.run(
                    [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True
                )
                if done.returncode != 0:
                    raise RuntimeError(f"`{code}` failed: {done.stderr.strip()[-300:]}")
                return float(done.stdout.split()[-1]), None

            return run

        runs = {name: run_of(before, statement) for name, before, statement in _BACKENDS}
        for run in runs.values():
            run()  # compiles to byte code, and brings the files into memory
        samples = alternate(runs, self.repetitions_in(context), context.log)
        record.backends = {name: summary([seconds for seconds, _ in found]) for name, found in samples.items()}
        record.compare()
        medians = {name: backend["median"] for name, backend in record.backends.items()}
        record.metrics["alone_minus_torch_ms"] = 1e3 * (medians[_FASTGEN] - medians[_TORCH])
        record.metrics["after_torch_ms"] = 1e3 * medians[f"{_FASTGEN} after torch"]
        record.metrics["after_transformers_ms"] = 1e3 * medians[f"{_FASTGEN} after transformers"]


WORKLOADS = [
    Imports(
        name="import",
        title="import fastgen",
        targets=(
            Target("ms that `import fastgen` alone takes more than `import torch`", "alone_minus_torch_ms", at_most=50),
            Target("ms that it takes once torch is imported", "after_torch_ms", at_most=50),
        ),
    )
]
