"""OpenVINO, which needs an older Transformers than FastGen: through optimum-intel, and OpenVINO GenAI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.backends import Job, Unsupported
from benchmarks.backends.elsewhere import Elsewhere, OnGGUF

# OpenVINO's names of the dtypes that it computes in.
_PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16"}


class OpenVINO(Elsewhere):
    """Computes in the model's precision, float32 or bfloat16; or with weights that it quantises to 8 or 4 `bits`.

    The model is saved, and exported to OpenVINO in the process.
    """

    library = "OpenVINO"
    environment = "openvino"
    script = Path(__file__).with_name("openvino_process.py")

    def check(self, job: Job) -> None:
        super().check(job)
        if job.model.dtype not in _PRECISIONS:
            raise Unsupported(f"OpenVINO is compared in float32 or bfloat16, not in {job.model.dtype}")

    def question(self, job: Job, folder: Path) -> dict[str, Any]:
        # The older release may not know all fields of a current generation config.
        generation = {"pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id"}
        job.model.save_pretrained(folder)
        known = job.model.generation_config.to_dict()
        told = {name: known[name] for name in sorted(generation) if known.get(name) is not None}
        (folder / "generation_config.json").write_text(json.dumps(told))
        return {
            "folder": str(folder),
            "is_encoder_decoder": job.model.config.is_encoder_decoder,
            "precision": _PRECISIONS[job.model.dtype],
            "bits": self.settings.get("bits"),
            "options": dict(job.workload.options),
        }


class OpenVINOGenAI(OnGGUF):
    """Reads a GGUF file unchanged; one sequence."""

    library = "OpenVINO GenAI"
    environment = "openvino"
    script = Path(__file__).with_name("openvino_genai_process.py")

    def check(self, job: Job) -> None:
        super().check(job)
        if len(job.inputs["input_ids"]) > 1:
            raise Unsupported("OpenVINO GenAI is compared with one sequence")
