"""Backends in processes, and mostly in virtual environments, of their own, which `make bench-NAME` makes."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import ROOT, smollm2
from benchmarks.backends import Backend, Job, Unsupported
from benchmarks.processes import Process

ENVIRONMENTS = ROOT / ".venvs"


def python_of(environment: str, library: str) -> Path:
    """Returns the interpreter of the environment in `.venvs` for a library.

    Raises:
        Unsupported: the environment does not exist.
    """
    python = ENVIRONMENTS / environment / "bin" / "python"
    if not python.exists():
        raise Unsupported(f"there is no environment with {library}: `make bench-{environment}` makes it")
    return python


class Elsewhere(Backend):
    """The base class of such backends.

    Attributes:
        library: its display name.
        environment: its folder in `.venvs`, unless `python` overrides it.
        script: has `load(asked)`, which gets the result of `question`, and generates.
        settings: of the kind of backend, from its line in `_MAKERS`.
    """

    library: str
    environment: str
    script: Path

    def __init__(self, name: str, rivals: tuple[str, ...] = (), **settings: Any) -> None:
        super().__init__(name, rivals)
        self.settings = settings
        self._process: Process | None = None

    def setup(self, job: Job) -> None:
        super().setup(job)
        self.check(job)
        self._process = Process(self.library, self.python(), self.script)
        question = self.question(job, self._process.folder)
        inputs = {name: job.inputs[name].tolist() for name in ("input_ids", "attention_mask")}
        self.version = self._process.ask({"threads": job.threads, "inputs": inputs, **question})

    def python(self) -> Path:
        """Returns the interpreter of the process. Raises Unsupported if it does not exist."""
        return python_of(self.environment, self.library)

    def check(self, job: Job) -> None:
        """Checks that the library can do the job.

        Raises:
            Unsupported: it cannot.
        """
        if job.model.device.type != "cpu":
            raise Unsupported(f"{self.library} is compared on the CPU, not on {job.model.device}")
        if job.workload.options.get("do_sample"):
            raise Unsupported(f"{self.library} draws other samples")

    @abstractmethod
    def question(self, job: Job, folder: Path) -> dict[str, Any]:
        """Returns the script's input besides the tokens and the number of threads, as JSON values.

        Args:
            job: that the library can do.
            folder: for files; it exists until the backend is closed.
        """

    def run(self, new_tokens: int) -> Tensor:
        assert self._process is not None
        return torch.tensor(self._process.ask({"new_tokens": new_tokens}))

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
        self._process = None


class OnGGUF(Elsewhere):
    """Backends that read the GGUF file beside a model, and generate greedily with it."""

    def check(self, job: Job) -> None:
        super().check(job)
        if not smollm2.gguf_of(job.model).is_file():
            raise Unsupported(f"there is no {smollm2.GGUF} beside the model")
        # They support neither beams nor sampling.
        unknown = {name for name, value in job.workload.options.items() if name != "do_sample" and value != 1}
        if unknown:
            raise Unsupported(f"no counterpart in {self.library} for {', '.join(sorted(unknown))}")

    def question(self, job: Job, folder: Path) -> dict[str, Any]:
        end = job.model.generation_config.eos_token_id
        return {
            "file": str(smollm2.gguf_of(job.model)),
            "folder": str(folder),
            "end": end if isinstance(end, list) else [] if end is None else [end],
            "new_tokens": job.workload.new_tokens,
            **self.settings,
        }
