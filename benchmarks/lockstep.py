"""Runs backends that make the same calls in lockstep, each in a fresh process.

A session is what one user does from the start of a process, so that each backend needs a process of its own. Processes
that ran one after the other would be minutes apart, on machines whose speed changes from minute to minute. Here they
alternate call by call, so that their times are seconds apart. All other processes are stopped (SIGSTOP): their threads
can neither spin nor work ahead, and resume as if no time had passed.

If threads wait for one another, other work that takes a core for a moment costs many times that moment. A call
therefore begins when the machine is quiet, and the cores that other processes kept busy during it are recorded.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import ROOT, backends
from benchmarks.backends import Backend, Job, Unsupported
from benchmarks.backends.elsewhere import Elsewhere
from benchmarks.backends.generate import Patched, Unpatched
from benchmarks.machine import BUSY, OtherLoad
from benchmarks.memory import high_water_mark
from benchmarks.processes import Process
from benchmarks.workload import Outcome

_LOOK_SECONDS, _PATIENCE_SECONDS = 0.1, 120.0
_GENERATE = Path(backends.__file__).with_name("generate_process.py")


class Side(NamedTuple):
    """How to start the process of a side: the library's display name, the interpreter, a script with `load(asked)` as
    in `serve_lines.py`, and its argument.
    """

    library: str
    python: Path
    script: Path
    question: Mapping[str, Any]


class Call(NamedTuple):
    """One call of `generate`: lists of token ids and masks [batch, length], and the number of new tokens."""

    inputs: dict[str, list[list[int]]]
    new_tokens: int


@dataclass
class Session:
    """The results of one side's process.

    Attributes:
        version: of its library.
        peak_bytes: the largest resident set of the process, model and libraries included.
        seconds, outcomes: of each call, by the clock of the process.
        other_load: of each call: cores that other processes kept busy meanwhile.
    """

    version: str
    peak_bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    other_load: list[float] = field(default_factory=list)


def side(backend: Backend, job: Job, threads: int | None, folder: Path) -> Side:
    """Returns how to start a backend in a process of its own.

    Args:
        job: its model is saved, and converted for other libraries; its inputs are not used.
        threads: of torch; None for torch's default.
        folder: for files that the process reads when it starts.

    Raises:
        Unsupported: the backend cannot do the job, or only runs in this process.
    """
    backend.job = job
    if isinstance(backend, Elsewhere):
        backend.check(job)
        question = {"threads": job.threads, **backend.question(job, folder)}
        return Side(backend.library, backend.python(), backend.script, question)
    if type(backend) not in (Unpatched, Patched):
        raise Unsupported(f"{backend.name} does not run in a process of its own")
    job.model.save_pretrained(folder)
    question = {
        "root": str(ROOT),
        "settings": dict(backend.settings) if isinstance(backend, Patched) else None,
        "threads": threads,
        "folder": str(folder),
        "is_encoder_decoder": job.model.config.is_encoder_decoder,
        "dtype": str(job.model.dtype).removeprefix("torch."),
        "options": dict(job.workload.options),
    }
    return Side("Transformers", Path(sys.executable), _GENERATE, question)


def run(
    sides: Mapping[str, Side],
    calls: Sequence[Call],
    failed: Callable[[str, Exception], None],
    turn: int = 0,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Session]:
    """Starts a process for each side, makes the calls, and ends the processes.

    Args:
        sides: by name.
        calls: every side makes a call before any makes the next one.
        failed: called with a side that failed; raises if the others are useless without it.
        turn: index of the side that starts the first call; later calls start with the next ones in turn.
        log: gets progress lines.
    """
    sessions: dict[str, Session] = {}
    processes: dict[str, Process] = {}
    patience = _Patience(_PATIENCE_SECONDS)

    @contextmanager
    def losing(name: str) -> Iterator[None]:
        """Drops only this side if the block raises an error."""
        try:
            yield
        except Exception as error:
            failed(name, error)
            sessions.pop(name, None)

    with ExitStack() as stack:
        for name, side in sides.items():
            with losing(name):
                process = processes[name] = Process(side.library, side.python, side.script)
                stack.callback(process.close)
                sessions[name] = Session(process.ask(side.question))
                process.pause()
                log(f"{name} is loaded, after {process.seconds:.1f} s")
        for number, call in enumerate(calls):
            names = list(sessions)
            start = (turn + number) % max(len(names), 1)
            for name in names[start:] + names[:start]:
                patience.wait()
                with losing(name):
                    _make(call, processes[name], sessions[name])
            times = ", ".join(f"{name} {session.seconds[-1]:.2f} s" for name, session in sessions.items())
            log(f"call {number + 1} of {len(calls)}: {times}")
    return sessions


def _make(call: Call, process: Process, session: Session) -> None:
    load = OtherLoad(process.pid)
    process.resume()
    found = process.ask({"new_tokens": call.new_tokens, "inputs": call.inputs})
    process.pause()
    session.other_load.append(load.cores())
    # Other libraries return only the tokens.
    tokens, stats = (found["tokens"], found["stats"]) if isinstance(found, dict) else (found, {})
    session.seconds.append(process.seconds)
    session.outcomes.append(Outcome(torch.tensor(tokens), stats))
    session.peak_bytes = high_water_mark(process.pid)


class _Patience:
    """Waits for a quiet machine while the sides' processes are stopped, up to a total of seconds per session."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    def wait(self) -> None:
        """Waits until other processes are idle, or no patience is left."""
        while self._left > 0:
            load = OtherLoad()
            time.sleep(_LOOK_SECONDS)
            if load.cores() <= BUSY:
                return
            self._left -= _LOOK_SECONDS
