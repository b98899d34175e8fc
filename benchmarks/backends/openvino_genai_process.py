"""Generates with OpenVINO GenAI, which reads a GGUF file unchanged, in an environment without FastGen
(`serve_lines.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def load(asked: dict[str, Any]) -> tuple[str, Callable[[dict[str, int]], list[list[int]]]]:
    import numpy
    import openvino
    import openvino_genai

    settings = {"INFERENCE_NUM_THREADS": asked["threads"], "PERFORMANCE_HINT": "LATENCY"}
    pipeline = openvino_genai.LLMPipeline(asked["file"], "CPU", **settings)
    tokens = openvino.Tensor(numpy.array(asked["inputs"]["input_ids"], dtype=numpy.int64))

    def generate(work: dict[str, int]) -> list[list[int]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.num_beams = work["new_tokens"], False, 1
        config.ignore_eos = True
        new = pipeline.generate(tokens, config).tokens
        return [[*before, *after] for before, after in zip(asked["inputs"]["input_ids"], new, strict=True)]

    return openvino_genai.__version__, generate
