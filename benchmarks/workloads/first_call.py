"""A fresh process: the cost of `import fastgen`, and one call from the start of Python to its end.

The interpreter's clock measures imports. Their backends:

* import torch;
* import fastgen: in an interpreter that has imported nothing else;
* import fastgen after torch: its cost in a program that uses torch;
* import fastgen after transformers: its cost if the patches are applied at once, operators loaded.

A call consists of imports, loading the model, and 20 new tokens. Its time is that of the whole process, measured from
this process.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import backends, lockstep, processes
from benchmarks.backends import Job
from benchmarks.lockstep import Side
from benchmarks.measure import alternate, format_seconds
from benchmarks.record import Record
from benchmarks.workload import Context, Generation, Outcome, Workload, check_code, check_tokens
from benchmarks.workloads.shapes import bart_base, gpt2, llama_small, opus_mt, t5_small
from benchmarks.workloads.smollm2_chat import smollm2_of_32_bits

_TORCH = "import torch"
_FASTGEN = "import fastgen"
# (name, imported before the clock starts, imported while it runs)
_IMPORTS = (
    (_TORCH, "pass", _TORCH),
    (_FASTGEN, "pass", _FASTGEN),
    (f"{_FASTGEN} after torch", _TORCH, _FASTGEN),
    (f"{_FASTGEN} after transformers", "from transformers import GenerationMixin", _FASTGEN),
)


@dataclass(frozen=True, kw_only=True)
class Imports(Workload):
    """Measures imports."""

    repetitions: int = 7
    quick_repetitions: int = 3
    quick: bool = True

    group = "import"
    baseline: str = _TORCH
    subject: str = _FASTGEN

    def run(self, context: Context, record: Record) -> None:
        runs = {name: partial(self._seconds, context, *statements) for name, *statements in _IMPORTS}
        alternate(runs, 1)  # compiles to byte code, and fills the file cache
        record.take(alternate(runs, self.repetitions_in(context), context.log))
        medians = {name: 1e3 * found["median"] for name, found in record.backends.items()}
        record.metrics["alone_minus_torch_ms"] = medians[_FASTGEN] - medians[_TORCH]
        record.metrics["after_torch_ms"] = medians[f"{_FASTGEN} after torch"]
        record.metrics["after_transformers_ms"] = medians[f"{_FASTGEN} after transformers"]

    @staticmethod
    def _seconds(context: Context, before: str, statement: str) -> tuple[float, None]:
        code = f"import time; {before}; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
        done = processes.run([sys.executable, "-c", code], context.threads)
        return float(done.stdout.split()[-1]), None


@dataclass(frozen=True, kw_only=True)
class FirstCall(Workload):
    """Measures a first call. Attributes: its `work`."""

    work: Generation
    repetitions: int = 7
    quick_repetitions: int = 3

    group = "import"

    def run(self, context: Context, record: Record) -> None:
        record.parameters = self.work.parameters()
        model, inputs = self.work.build(context.device)
        job = Job(self.work, model, {}, torch.get_num_threads())
        made = {name: backends.make(name) for name in context.chosen_backends()}
        work = {"new_tokens": self.work.new_tokens, "inputs": {name: each.tolist() for name, each in inputs.items()}}
        with tempfile.TemporaryDirectory(prefix="fastgen-first-call-") as folder:
            sides = {name: lockstep.side(each, job, context.threads, Path(folder)) for name, each in made.items()}
            runs = {name: partial(_whole_process, side, work) for name, side in sides.items()}
            alternate(runs, 1)  # as above
            pairs = backends.pairs(made.values(), self.baseline, self.subject)
            found = record.take(alternate(runs, self.repetitions_in(context), context.log), pairs)
        outcomes = {name: [outcome for _, outcome in each] for name, each in found.items()}
        check_code(record, self.work, made, outcomes)
        check_tokens(record, self.work, made, outcomes)
        calls = {name: statistics.median(seconds for seconds, _ in each) for name, each in found.items()}
        shares = ", ".join(f"{format_seconds(seconds)} ({name})" for name, seconds in calls.items())
        record.notes.append(f"the call alone takes {shares}")


def _whole_process(side: Side, work: Mapping[str, Any]) -> tuple[float, tuple[float, Outcome]]:
    """Returns the seconds of the process, the seconds of the call in it, and its result.

    Raises:
        RuntimeError: the process failed.
    """
    lines = "".join(json.dumps(line) + "\n" for line in (side.question, work))
    start = time.perf_counter()
    done = processes.run(processes.script_command(side.python, side.script), asked=lines, alone=True)
    seconds = time.perf_counter() - start
    call, answer = json.loads(done.stdout.splitlines()[-1])
    return seconds, (call, Outcome(torch.tensor(answer["tokens"]), answer["stats"]))


def _first_call(shape: Any, name: str, title: str, beams: int = 1, **changes: Any) -> FirstCall:
    work = Generation(
        name=name,
        title=title,
        shape=shape,
        batch=1,
        length=32,
        new_tokens=20,
        options={"do_sample": False, **({"num_beams": beams} if beams > 1 else {})},
    )
    how = f"{beams} beams" if beams > 1 else "greedy"
    return FirstCall(
        name=f"first-call-{name}", title=f"Fresh process, one call of 20 tokens, {title}, {how}", work=work, **changes
    )


WORKLOADS: list[Workload] = [
    Imports(name="import", title="import fastgen"),
    _first_call(smollm2_of_32_bits, "smollm2", "SmolLM2-135M", needs_smollm2=True),
    _first_call(gpt2, "gpt2", "GPT-2"),
    _first_call(llama_small, "llama", "Llama (8 layers)"),
    _first_call(t5_small, "t5-small", "T5-small"),
    _first_call(opus_mt, "opus-mt", "opus-mt", beams=4),
    _first_call(bart_base, "bart-base", "BART-base", beams=4),
]
