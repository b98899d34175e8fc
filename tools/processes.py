"""Commands with a limit of time, as the stages of the GPU check are (`tools/gpu_check.py`)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
GRACE_SECONDS = 8.0  # for a process that was asked to end


class Finished(NamedTuple):
    """How a command ended: its exit status (negative for a signal), whether it ran out of time, what it printed."""

    status: int
    timed_out: bool
    output: str


class Processes:
    """Commands, run side by side, that are ended together with everything they started.

    Args:
        logs: a folder, which gets what each command prints.
        environment: of all of them.
    """

    def __init__(self, logs: Path, environment: dict[str, str]) -> None:
        self.logs = logs
        self.environment = environment
        logs.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, command: Sequence[str], seconds: float, **changes: str) -> Finished:
        """Runs one command for at most `seconds`."""
        return self.run_all({name: command}, seconds, {name: changes})[name]

    def run_all(
        self, commands: dict[str, Sequence[str]], seconds: float, changes: dict[str, dict[str, str]] | None = None
    ) -> dict[str, Finished]:
        """Runs all commands at the same time; after `seconds`, those that still run are interrupted, then killed."""
        end = time.monotonic() + seconds
        started: dict[str, subprocess.Popen[bytes]] = {}
        late: set[str] = set()
        try:
            for name, command in commands.items():
                with open(self.logs / f"{name}.log", "wb") as log:
                    started[name] = subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=self.environment | (changes or {}).get(name, {}),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        # Interrupts end it, also where this process was started in the background and ignores them.
                        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                    )
            late |= {name for name, process in started.items() if not _ends_by(process, end)}
            for name in late:
                _signal(started[name], signal.SIGINT)
            end = time.monotonic() + GRACE_SECONDS
            for name in late:
                _ends_by(started[name], end)
        finally:
            # Also what a command left behind in its session.
            for process in started.values():
                _signal(process, signal.SIGKILL)
                process.wait()
        return {
            name: Finished(
                process.returncode, name in late, (self.logs / f"{name}.log").read_text("utf-8", errors="replace")
            )
            for name, process in started.items()
        }


def _ends_by(process: subprocess.Popen[bytes], end: float) -> bool:
    try:
        process.wait(timeout=max(end - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        return False
    return True


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
