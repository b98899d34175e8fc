"""The process that generates with OpenVINO, in an environment without FastGen: `openvino.py` starts it.

It reads lines of JSON: first the model and what to generate from, then how many tokens, as often as it is asked.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    # What libraries print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    asked = json.loads(sys.stdin.readline())
    import torch

    _declare_operators_of_torchvision(torch)

    import openvino
    from optimum.intel import OVModelForCausalLM, OVModelForSeq2SeqLM

    kind = OVModelForSeq2SeqLM if asked["is_encoder_decoder"] else OVModelForCausalLM
    settings = {
        "INFERENCE_PRECISION_HINT": asked["precision"],
        "KV_CACHE_PRECISION": asked["precision"],
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        "INFERENCE_NUM_THREADS": asked["threads"],
        "PERFORMANCE_HINT": "LATENCY",
    }
    model = kind.from_pretrained(asked["folder"], export=True, load_in_8bit=False, ov_config=settings)
    inputs = {name: torch.tensor(value) for name, value in asked["inputs"].items()}
    answer(version=openvino.__version__)
    for line in sys.stdin:
        count = json.loads(line)["new_tokens"]
        tokens = model.generate(**inputs, min_new_tokens=count, max_new_tokens=count, **asked["options"])
        answer(tokens=tokens.tolist())


def _declare_operators_of_torchvision(torch: Any) -> None:
    """Where torchvision does not fit the build of torch, it asks for operators that are missing."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch._fastgen_torchvision = library  # it lives as long as the process


if __name__ == "__main__":
    main()
