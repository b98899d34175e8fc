"""llama.cpp, for models with a GGUF file beside them: greedy, with its own loop over batches of sequences.

The file has 4-bit weights (Q4_1). llama.cpp's quantiser makes other precisions from it, and unpacks it first. "F32" has
therefore the same weights as Transformers from this file.
"""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.backends import Job, Unsupported
from benchmarks.backends.elsewhere import OnGGUF

# The model dtypes that these kinds of weights are compared with. The others have fewer bits than any model.
_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


class LlamaCpp(OnGGUF):
    """`precision` is that of the weights: "F32", "BF16", "Q8_0", or "Q4_1", which uses the file unchanged."""

    library = "llama.cpp"
    environment = "llama"
    script = Path(__file__).with_name("llama_cpp_process.py")

    def check(self, job: Job) -> None:
        super().check(job)
        precision = self.settings["precision"]
        if _TYPES.get(precision, job.model.dtype) is not job.model.dtype:
            raise Unsupported(f"llama.cpp in {precision} is compared with models in that type")
