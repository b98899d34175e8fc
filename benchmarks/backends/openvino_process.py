"""Generates with OpenVINO, in an environment without FastGen (`serve_lines.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def load(asked: dict[str, Any]) -> tuple[str, Callable[[dict[str, Any]], list[list[int]]]]:
    import torch

    declare_operators_of_torchvision(torch)

    import openvino
    from optimum.intel import OVModelForCausalLM, OVModelForSeq2SeqLM

    kind = OVModelForSeq2SeqLM if asked["is_encoder_decoder"] else OVModelForCausalLM
    settings = {
        "INFERENCE_PRECISION_HINT": asked["precision"],
        "KV_CACHE_PRECISION": asked["precision"],
        "INFERENCE_NUM_THREADS": asked["threads"],
        "PERFORMANCE_HINT": "LATENCY",
    }
    weights: dict[str, Any] = {"load_in_8bit": False}
    if asked["bits"] is None:
        settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = "0"
    elif asked["bits"] == 8:
        weights = {"load_in_8bit": True}
    else:
        from optimum.intel import OVWeightQuantizationConfig

        weights = {"quantization_config": OVWeightQuantizationConfig(bits=4, group_size=64, ratio=1.0)}
    model = kind.from_pretrained(asked["folder"], export=True, ov_config=settings, **weights)

    def generate(work: dict[str, Any]) -> list[list[int]]:
        count, inputs = work["new_tokens"], work.get("inputs") or asked["inputs"]
        tensors = {name: torch.tensor(value) for name, value in inputs.items()}
        return model.generate(**tensors, min_new_tokens=count, max_new_tokens=count, **asked["options"]).tolist()

    return openvino.__version__, generate


def declare_operators_of_torchvision(torch: Any) -> None:
    """Declares the operators that a torchvision for another build of torch expects."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch._fastgen_torchvision = library  # must live as long as the process
