"""A backend in an environment and a process of its own, because its libraries do not go together with FastGen's.

`make bench-NAME` makes the environment. A script loads the model there, and generates on request
(`elsewhere_process.py`). While another backend runs, that process waits for its next line.
"""

from __future__ import annotations

import json
import os
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


class Elsewhere(Backend):
    """What such backends share.

    Attributes:
        library: how the reader of the results calls it.
        environment: its folder in `.venvs`.
        script: has `load(asked)`, which gets what `question` returns.
    """

    library: str
    environment: str
    script: Path

    def __init__(self, name: str, rival: str = "fastgen") -> None:
        super().__init__(name, rival)
        self._process: subprocess.Popen[str] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def setup(self, job: Job) -> None:
        super().setup(job)
        python = ENVIRONMENTS / self.environment / "bin" / "python"
        if not python.exists():
            raise Unsupported(f"there is no environment with {self.library}: `make bench-{self.environment}` makes it")
        if job.model.device.type != "cpu":
            raise Unsupported(f"{self.library} is compared on the CPU, not on {job.model.device}")
        if job.workload.options.get("do_sample"):
            raise Unsupported(f"{self.library} draws other samples")
        self.check(job)
        self._folder = tempfile.TemporaryDirectory(prefix=f"{self.environment}-")
        question = self.question(job, Path(self._folder.name))
        self._errors = Path(self._folder.name, "errors.txt")
        # Its libraries must not find this process' own.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                # -P: the folder of the script, with modules that are called like libraries, is not searched.
                [str(python), "-P", str(_FOLDER / "elsewhere_process.py"), str(self.script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        inputs = {name: job.inputs[name].tolist() for name in ("input_ids", "attention_mask")}
        self.version = self._ask({"threads": job.threads, "inputs": inputs, **question})["version"]

    @abstractmethod
    def check(self, job: Job) -> None:
        """Whether the library can do the job.

        Raises:
            Unsupported: it cannot.
        """

    @abstractmethod
    def question(self, job: Job, folder: Path) -> dict[str, Any]:
        """What the script needs beside the inputs and the number of threads, as JSON can hold it.

        Args:
            job: that the library can do.
            folder: for files; it is there until the backend is closed.
        """

    def run(self, new_tokens: int) -> Tensor:
        return torch.tensor(self._ask({"new_tokens": new_tokens})["tokens"])

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
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
            ended = f"the process with {self.library} has ended with status {status}"
            raise RuntimeError(f"{ended}: {' '.join(said) or 'it said nothing'}")
        return json.loads(line)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        if self._folder is not None:
            self._folder.cleanup()
        self._process = self._folder = None
