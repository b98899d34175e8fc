"""Backends that make the same calls in lockstep, each in a fresh process.

A session is what one user does from the start of a process on, so each backend needs a process of its own. Processes
that ran one after the other would be minutes apart, on machines whose speed changes from minute to minute. Here they
take turns call by call, so the times of a call are seconds apart. A process that does not have its turn is stopped
(SIGSTOP): its threads can neither spin nor work ahead, and go on where they were, as if no time had passed.

Where threads wait for one another, a core that other work takes for a moment costs many times that moment. So a call
begins when the machine is quiet, and the cores that other processes kept busy during it are noted.
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
    """How the process of a side is started: what the reader of the results calls the library, the interpreter, a
    script with `load(asked)`, as `serve_lines.py` says, and what that gets.
    """

    library: str
    python: Path
    script: Path
    question: Mapping[str, Any]


class Call(NamedTuple):
    """One call of `generate`: lists of token numbers and masks [batch, length], and how many new tokens."""

    inputs: dict[str, list[list[int]]]
    new_tokens: int


@dataclass
class Session:
    """What the process of one side did.

    Attributes:
        version: of its library.
        peak_bytes: the largest resident set of the process, the model and the libraries in it.
        seconds, outcomes: of each call, by the clock of the process.
        other_load: of each call: cores that other processes kept busy meanwhile.
    """

    version: str
    peak_bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    other_load: list[float] = field(default_factory=list)


def side(backend: Backend, job: Job, threads: int | None, folder: Path) -> Side:
    """How a backend is started in a process of its own.

    Args:
        job: whose model is saved, converted for other libraries; its inputs play no part.
        threads: of torch; None for as many as it takes by itself.
        folder: for files that the process reads when it starts.

    Raises:
        Unsupported: the backend cannot do the job, or runs in this process only.
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
    """Starts a process of each side, makes the calls, and ends the processes.

    Args:
        sides: by name.
        calls: each is made by every side before the next one is made by any.
        failed: is told of a side that failed, and raises if the others are worth nothing without it.
        turn: the side whose turn is first changes from call to call; this says where it begins.
        log: gets progress lines.
    """
    sessions: dict[str, Session] = {}
    processes: dict[str, Process] = {}
    patience = _Patience(_PATIENCE_SECONDS)

    @contextmanager
    def losing(name: str) -> Iterator[None]:
        """What goes wrong inside costs this side alone."""
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
    # Other libraries answer with the tokens alone.
    tokens, stats = (found["tokens"], found["stats"]) if isinstance(found, dict) else (found, {})
    session.seconds.append(process.seconds)
    session.outcomes.append(Outcome(torch.tensor(tokens), stats))
    session.peak_bytes = high_water_mark(process.pid)


class _Patience:
    """Waits for a quiet machine while the processes of the sides are stopped: so many seconds in a whole session."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    def wait(self) -> None:
        """Until other processes do nothing, or no patience is left."""
        while self._left > 0:
            load = OtherLoad()
            time.sleep(_LOOK_SECONDS)
            if load.cores() <= BUSY:
                return
            self._left -= _LOOK_SECONDS
