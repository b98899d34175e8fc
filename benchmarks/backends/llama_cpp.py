"""llama.cpp, for models that have a GGUF file beside them: greedy, with its own loop over batches of sequences.

The file has weights of 4 bits (Q4_1). Other precisions are made from it by llama.cpp's quantiser, which unpacks them
first. So "F32" are the weights that Transformers has of the same file.
"""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.backends import Job, Unsupported
from benchmarks.backends.elsewhere import OnGGUF

# The types of models with which weights of these kinds are compared. The others have fewer bits than any model.
_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


class LlamaCpp(OnGGUF):
    """`precision` is that of the weights: "F32", "BF16", "Q8_0", or "Q4_1", which takes the file as it is."""

    library = "llama.cpp"
    environment = "llama"
    script = Path(__file__).with_name("llama_cpp_process.py")

    def check(self, job: Job) -> None:
        super().check(job)
        precision = self.settings["precision"]
        if _TYPES.get(precision, job.model.dtype) is not job.model.dtype:
            raise Unsupported(f"llama.cpp in {precision} is compared with models in that type")
