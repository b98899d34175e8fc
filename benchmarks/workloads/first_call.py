"""One call in a fresh process, from the start of Python to its end: imports, loading the model, 20 new tokens.

A time is that of the whole process, by the clock of this one. Processes of the library and of FastGen take turns.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import backends, lockstep
from benchmarks.backends import BASELINE, Job, elsewhere
from benchmarks.lockstep import Side
from benchmarks.measure import alternate, format_seconds, summary
from benchmarks.record import Record, Target
from benchmarks.workload import Context, Generation, Outcome, Workload, check_code, check_tokens
from benchmarks.workloads.shapes import bart_base, gpt2, llama_small, opus_mt, t5_small
from benchmarks.workloads.smollm2_chat import is_without_model, smollm2_of_32_bits


@dataclass(frozen=True, kw_only=True)
class FirstCall(Workload):
    """Attributes: the `work` of the call, and whether its model is the one that `benchmarks.smollm2` makes."""

    work: Generation
    needs_smollm2: bool = False
    repetitions: int = 7
    quick_repetitions: int = 3
    targets: tuple[Target, ...] = (Target("not slower, start of the process included", "ratio", at_least=0.97),)

    group = "import"

    def run(self, context: Context, record: Record) -> None:
        if self.needs_smollm2 and is_without_model(self, context, record):
            return
        record.parameters = self.work.parameters()
        model, inputs = self.work.build(context.device)
        job = Job(self.work, model, {}, torch.get_num_threads())
        made = {name: backends.make(name) for name in context.chosen_backends()}
        work = {"new_tokens": self.work.new_tokens, "inputs": {name: each.tolist() for name, each in inputs.items()}}
        with tempfile.TemporaryDirectory(prefix="fastgen-first-call-") as folder:
            sides = {name: lockstep.side(each, job, context.threads, Path(folder)) for name, each in made.items()}
            runs = {name: partial(_whole_process, side, work) for name, side in sides.items()}
            alternate(runs, 1)  # compiles to byte code, and brings the files into memory
            samples = alternate(runs, self.repetitions_in(context), context.log)
        record.backends = {name: summary([seconds for seconds, _ in found]) for name, found in samples.items()}
        record.compare(backends.pairs(made.values()))
        outcomes = {name: [outcome for _, (_, outcome) in found] for name, found in samples.items()}
        check_code(record, made, outcomes)
        check_tokens(record, made, outcomes)
        calls = {name: statistics.median(call for _, (call, _) in found) for name, found in samples.items()}
        if BASELINE in calls:
            shares = ", ".join(f"{format_seconds(seconds)} ({name})" for name, seconds in calls.items())
            record.notes.append(f"the call alone takes {shares}")


def _whole_process(side: Side, work: Mapping[str, Any]) -> tuple[float, tuple[float, Outcome]]:
    """Seconds of the process; seconds of the call in it, and what it gave.

    Raises:
        RuntimeError: the process failed.
    """
    lines = "".join(json.dumps(line) + "\n" for line in (side.question, work))
    start = time.perf_counter()
    done = subprocess.run(
        elsewhere.command(side.python, side.script),
        input=lines,
        capture_output=True,
        text=True,
        env=elsewhere.environment(),
    )
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        raise RuntimeError(f"a process ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
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


WORKLOADS = [
    _first_call(smollm2_of_32_bits, "smollm2", "SmolLM2-135M", needs_smollm2=True),
    _first_call(gpt2, "gpt2", "GPT-2"),
    _first_call(llama_small, "llama", "Llama (8 layers)"),
    _first_call(t5_small, "t5-small", "T5-small"),
    _first_call(opus_mt, "opus-mt", "opus-mt", beams=4),
    _first_call(bart_base, "bart-base", "BART-base", beams=4),
]
