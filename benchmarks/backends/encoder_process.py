"""Runs an encoder with OpenVINO or ONNX Runtime, in an environment without FastGen (`elsewhere_process.py`)."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

Forward = Callable[[Any, Any], Any]


def load(asked: dict[str, Any]) -> tuple[str, Callable[[str | None], None]]:
    """
    Args:
        asked: "library", "folder" of the model, "threads", and "batches": a file of `torch.save` with pairs of ids and
            masks [texts, longest].

    Returns:
        The version of the library, and what runs all batches, or saves the states at real tokens as a file.
    """
    import torch

    version, forward = {"openvino": _openvino, "onnxruntime": _onnxruntime}[asked["library"]](torch, asked)
    batches = torch.load(asked["batches"])
    states: list[Any] = []

    def work(target: str | None) -> None:
        if target is not None:
            torch.save(states, target)
            return
        states[:] = [forward(ids, mask)[mask.bool()] for ids, mask in batches]

    return version, work


def _openvino(torch: Any, asked: dict[str, Any]) -> tuple[str, Forward]:
    runpy.run_path(str(Path(__file__).with_name("openvino_process.py")))["declare_operators_of_torchvision"](torch)

    import openvino
    from optimum.intel import OVModelForFeatureExtraction

    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": asked["threads"],
        "PERFORMANCE_HINT": "LATENCY",
    }
    model = OVModelForFeatureExtraction.from_pretrained(
        asked["folder"], export=True, load_in_8bit=False, ov_config=settings
    )
    return openvino.__version__, lambda ids, mask: model(input_ids=ids, attention_mask=mask).last_hidden_state


def _onnxruntime(torch: Any, asked: dict[str, Any]) -> tuple[str, Forward]:
    import onnxruntime
    import transformers

    # Its fusions look for attention as the exporter by tracing writes it when the model spells it out.
    model = transformers.AutoModel.from_pretrained(asked["folder"], attn_implementation="eager").eval()

    class States(torch.nn.Module):
        """Of positional arguments, as the exporter calls a module."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, mask: Any) -> Any:
            return self.model(input_ids=ids, attention_mask=mask).last_hidden_state

    file = str(Path(asked["folder"]) / "model.onnx")
    ids = torch.full((2, 7), 5)
    names = ["input_ids", "attention_mask"]
    torch.onnx.export(
        States(),
        (ids, torch.ones_like(ids)),
        file,
        input_names=names,
        output_names=["states"],
        dynamic_axes={name: {0: "texts", 1: "longest"} for name in [*names, "states"]},
        opset_version=17,
        dynamo=False,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = asked["threads"]
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def forward(ids: Any, mask: Any) -> Any:
        given = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
        return torch.from_numpy(session.run(["states"], given)[0])

    return onnxruntime.__version__, forward
