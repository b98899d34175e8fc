"""Commands with a time limit, such as the stages of the GPU check (`tools/gpu_check.py`)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
GRACE_SECONDS = 8.0  # for a process that was asked to end


class Finished(NamedTuple):
    """How a command ended: its exit status (negative for a signal), whether it ran out of time, its output."""

    status: int
    timed_out: bool
    output: str


class Processes:
    """Runs commands, and ends each together with everything that it started.

    Args:
        logs: a folder for the output of each command.
        environment: of all of them.
    """

    def __init__(self, logs: Path, environment: dict[str, str]) -> None:
        self.logs = logs
        self.environment = environment
        logs.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, command: Sequence[str], seconds: float, **changes: str) -> Finished:
        """Runs a command; after `seconds` interrupts it, then kills it."""
        path, timed_out = self.logs / f"{name}.log", False
        with open(path, "wb") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.environment | changes,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Lets SIGINT end it even if this process was started in the background and ignores SIGINT.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
            _signal(process, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        finally:
            # Also kills what the command left behind in its session.
            _signal(process, signal.SIGKILL)
            process.wait()
        return Finished(process.returncode, timed_out, path.read_text("utf-8", errors="replace"))


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
