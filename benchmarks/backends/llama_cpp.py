"""llama.cpp, for models that have a GGUF file beside them: greedy, with its own loop over batches of sequences.

The file has weights of 4 bits (Q4_1). Other precisions are made from it by llama.cpp's quantiser, which unpacks them
first. So "F32" are the weights that Transformers has of the same file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks import smollm2
from benchmarks.backends.base import Job, Unsupported
from benchmarks.backends.elsewhere import Elsewhere

# The types of models with which weights of these kinds are compared. The others have fewer bits than any model.
_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


class LlamaCpp(Elsewhere):
    """Args:
    name, rival: of the backend.
    precision: of the weights: "F32", "BF16", "Q8_0", or "Q4_1", which takes the file as it is.
    """

    library = "llama.cpp"
    environment = "llama"
    script = Path(__file__).with_name("llama_cpp_process.py")

    def __init__(self, name: str, precision: str, rival: str = "fastgen") -> None:
        super().__init__(name, rival)
        self._precision = precision

    def check(self, job: Job) -> None:
        super().check(job)
        if not self._file(job).is_file():
            raise Unsupported(f"there is no {smollm2.GGUF} beside the model")
        if self._precision in _TYPES and _TYPES[self._precision] is not job.model.dtype:
            raise Unsupported(f"llama.cpp in {self._precision} is compared with models in that type")
        # A single beam and no samples are what it does.
        unknown = {name for name, value in job.workload.options.items() if name != "do_sample" and value != 1}
        if unknown:
            raise Unsupported(f"no counterpart in llama.cpp for {', '.join(sorted(unknown))}")

    def question(self, job: Job, folder: Path) -> dict[str, Any]:
        end = job.model.generation_config.eos_token_id
        return {
            "file": str(self._file(job)),
            "precision": self._precision,
            "folder": str(folder),
            "end": end if isinstance(end, list) else [] if end is None else [end],
            "new_tokens": job.workload.new_tokens,
        }

    @staticmethod
    def _file(job: Job) -> Path:
        return Path(job.model.name_or_path or "no folder", smollm2.GGUF)
