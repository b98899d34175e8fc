"""OpenVINO through optimum-intel, in a process of its own, because it needs an older Transformers than FastGen.

`make bench-openvino` makes the environment. The model is saved, exported to OpenVINO there, and generates on request
(`openvino_process.py`). While another backend runs, that process waits for its next line.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.backends.base import Backend, Job, Unsupported
from benchmarks.machine import ROOT

PYTHON = ROOT / ".venvs" / "openvino" / "bin" / "python"
_SCRIPT = Path(__file__).with_name("openvino_process.py")
# What OpenVINO calls the types that it computes in.
_PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16"}
_LINES_OF_ERROR = 3


class OpenVINO(Backend):
    """In the precision of the model, float32 or bfloat16."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._process: subprocess.Popen[str] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def setup(self, job: Job) -> None:
        super().setup(job)
        if not PYTHON.exists():
            raise Unsupported("there is no environment with OpenVINO: `make bench-openvino` makes it")
        if job.model.device.type != "cpu" or job.model.dtype not in _PRECISIONS:
            raise Unsupported(f"OpenVINO is compared on the CPU, in float32 or bfloat16, not in {job.model.dtype}")
        if job.workload.options.get("do_sample"):
            raise Unsupported("OpenVINO draws other samples")
        self._folder = tempfile.TemporaryDirectory(prefix="openvino-")
        # The older release may not know what a current one writes into the generation config.
        generation = {"pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id"}
        job.model.save_pretrained(self._folder.name)
        known = job.model.generation_config.to_dict()
        told = {name: known[name] for name in sorted(generation) if known.get(name) is not None}
        Path(self._folder.name, "generation_config.json").write_text(json.dumps(told))
        self._errors = Path(self._folder.name, "errors.txt")
        # Its libraries must not find this process' own.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [str(PYTHON), "-P", str(_SCRIPT)],  # this folder is not searched for modules
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        answer = self._ask(
            {
                "folder": self._folder.name,
                "is_encoder_decoder": job.model.config.is_encoder_decoder,
                "precision": _PRECISIONS[job.model.dtype],
                "threads": job.threads,
                "inputs": {name: job.inputs[name].tolist() for name in ("input_ids", "attention_mask")},
                "options": dict(job.workload.options),
            }
        )
        self.version = answer["version"]

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
            said = self._errors.read_text().strip().splitlines()[-_LINES_OF_ERROR:]
            raise RuntimeError(f"the process with OpenVINO has ended: {' '.join(said) or 'it said nothing'}")
        return json.loads(line)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        if self._folder is not None:
            self._folder.cleanup()
        self._process = self._folder = None
