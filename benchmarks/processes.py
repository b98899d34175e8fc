"""Other processes: their environment, commands that run to their end, and scripts that answer repeatedly.

The libraries that FastGen is compared with conflict with its own, or their threads would compete. A script therefore
loads a model in a process, and mostly in a virtual environment, of its own (`serve_lines.py`). It waits for its next
line while another one runs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT

_SERVE_LINES = Path(__file__).with_name("backends") / "serve_lines.py"
_SECONDS_TO_END = 10


def environment(threads: int | None = None, alone: bool = False) -> dict[str, str]:
    """Returns the environment variables of a process that imports this checkout, or, if `alone`, nothing of this
    process.

    Args:
        threads: of torch and the like; None for their defaults.
    """
    # The workload decides whether FastGen is on.
    found = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FASTGEN_DISABLE")}
    if not alone:
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        found.setdefault("TOKENIZERS_PARALLELISM", "false")
    if threads is not None:
        found["OMP_NUM_THREADS"] = found["MKL_NUM_THREADS"] = str(threads)
    return found


def run(
    command: Sequence[str], threads: int | None = None, asked: str = "", alone: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, with `asked` as its standard input.

    Raises:
        RuntimeError: it failed; the message ends with its last output.
    """
    variables = environment(threads, alone)
    done = subprocess.run(command, input=asked, env=variables, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(_ended(" ".join(command[1:4]), done.returncode, done.stderr))
    return done


def _ended(what: str, status: int, said: str) -> str:
    last = " ".join(said.strip().splitlines()[-3:])
    return f"{what} has ended with status {status}: {last or 'it said nothing'}"


def script_command(python: Path, script: Path) -> list[str]:
    """Returns the command that runs `serve_lines.py` with a script."""
    # -P: does not search the folder of the script, which has modules with the names of libraries.
    return [str(python), "-P", str(_SERVE_LINES), str(script)]


class Process:
    """A script in a process of its own, with questions and answers as lines of JSON.

    Args:
        library: its display name.
        python: the interpreter.
        script: has `load(asked)`, as in `serve_lines.py`.

    Attributes:
        folder: for files; it exists until the process is closed.
        seconds: duration of the last answer, by the clock of the process.
    """

    def __init__(self, library: str, python: Path, script: Path) -> None:
        self._library = library
        self._temporary = tempfile.TemporaryDirectory(prefix="fastgen-benchmark-")
        self.folder = Path(self._temporary.name)
        self.seconds = 0.0
        self._errors = self.folder / "errors.txt"
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                script_command(python, script),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment(alone=True),
            )

    def ask(self, question: Any) -> Any:
        """Returns the answer to a question.

        Raises:
            RuntimeError: the process has ended; the message ends with its last output.
        """
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            try:
                status = process.wait(timeout=_SECONDS_TO_END)
            except subprocess.TimeoutExpired:  # it hangs at its end
                process.kill()
                status = process.wait()
            said = self._errors.read_text(errors="replace")
            raise RuntimeError(_ended(f"the process with {self._library}", status, said))
        self.seconds, answer = json.loads(line)
        return answer

    @property
    def pid(self) -> int:
        return self._process.pid

    def pause(self) -> None:
        """Stops all of its threads, also those that spin while they wait for work."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._temporary.cleanup()
