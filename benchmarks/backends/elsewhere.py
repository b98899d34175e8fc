"""A backend in a process of its own, and mostly an environment of its own.

Its libraries do not go together with FastGen's, or their threads would take each other's time. `make bench-NAME` makes
an environment. A script loads the model there, and runs it on request
(`elsewhere_process.py`). While another backend runs, that process waits for its next line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.backends.base import Backend, Job, Unsupported
from benchmarks.machine import ROOT

ENVIRONMENTS = ROOT / ".venvs"
_FOLDER = Path(__file__).parent
_LINES_OF_ERROR = 3
_SECONDS_TO_END = 10


def python_of(environment: str, library: str) -> Path:
    """The interpreter of an environment in `.venvs` that is for a library.

    Raises:
        Unsupported: there is no such environment.
    """
    python = ENVIRONMENTS / environment / "bin" / "python"
    if not python.exists():
        raise Unsupported(f"there is no environment with {library}: `make bench-{environment}` makes it")
    return python


def command(python: Path, script: Path) -> list[str]:
    """What runs `elsewhere_process.py` with a script."""
    # -P: the folder of the script, with modules that are called like libraries, is not searched.
    return [str(python), "-P", str(_FOLDER / "elsewhere_process.py"), str(script)]


def environment() -> dict[str, str]:
    """The variables of such a process."""
    # Its libraries must not find this process' own. Whether FastGen is on is the workload's to say.
    left_out = ("PYTHONPATH", "FASTGEN_DISABLE")
    return {name: value for name, value in os.environ.items() if name not in left_out}


class Process:
    """A script in a process of its own, asked and answering in lines of JSON.

    Args:
        library: how the reader of the results calls it.
        python: the interpreter.
        script: has `load(asked)`, as `elsewhere_process.py` says.

    Attributes:
        folder: for files; it is there until the process is closed.
        seconds: that the last answer took, by the clock of the process.
    """

    def __init__(self, library: str, python: Path, script: Path) -> None:
        self._library = library
        self._temporary = tempfile.TemporaryDirectory(prefix="fastgen-benchmark-")
        self.folder = Path(self._temporary.name)
        self.seconds = 0.0
        self._errors = self.folder / "errors.txt"
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command(python, script),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment(),
            )

    def ask(self, question: Any) -> Any:
        """The answer to a question.

        Raises:
            RuntimeError: the process has ended; the message ends in what it said last.
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
            except subprocess.TimeoutExpired:  # it hangs where it should end
                process.kill()
                status = process.wait()
            said = self._errors.read_text(errors="replace").strip().splitlines()[-_LINES_OF_ERROR:]
            ended = f"the process with {self._library} has ended with status {status}"
            raise RuntimeError(f"{ended}: {' '.join(said) or 'it said nothing'}")
        self.seconds, answer = json.loads(line)
        return answer

    @property
    def pid(self) -> int:
        return self._process.pid

    def pause(self) -> None:
        """Stops all of its threads where they are, also those that spin while they wait for work."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._temporary.cleanup()


class Elsewhere(Backend):
    """What such backends share.

    Attributes:
        library: how the reader of the results calls it.
        environment: its folder in `.venvs`, unless `python` says something else.
        script: has `load(asked)`, which gets what `question` returns, and generates.
    """

    library: str
    environment: str
    script: Path

    def __init__(self, name: str, rival: str = "fastgen") -> None:
        super().__init__(name, rival)
        self._process: Process | None = None

    def setup(self, job: Job) -> None:
        super().setup(job)
        self.check(job)
        self._process = Process(self.library, self.python(), self.script)
        question = self.question(job, self._process.folder)
        inputs = {name: job.inputs[name].tolist() for name in ("input_ids", "attention_mask")}
        self.version = self._process.ask({"threads": job.threads, "inputs": inputs, **question})

    def python(self) -> Path:
        """The interpreter of the process. Raises Unsupported where it is not there."""
        return python_of(self.environment, self.library)

    def check(self, job: Job) -> None:
        """Whether the library can do the job.

        Raises:
            Unsupported: it cannot.
        """
        if job.model.device.type != "cpu":
            raise Unsupported(f"{self.library} is compared on the CPU, not on {job.model.device}")
        if job.workload.options.get("do_sample"):
            raise Unsupported(f"{self.library} draws other samples")

    @abstractmethod
    def question(self, job: Job, folder: Path) -> dict[str, Any]:
        """What the script needs beside the inputs and the number of threads, as JSON can hold it.

        Args:
            job: that the library can do.
            folder: for files; it is there until the backend is closed.
        """

    def run(self, new_tokens: int) -> Tensor:
        assert self._process is not None
        return torch.tensor(self._process.ask({"new_tokens": new_tokens}))

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
        self._process = None
