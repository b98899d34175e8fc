"""Options of other types than they are declared with are refused, whatever they would count as."""

from __future__ import annotations

from typing import Any

import pytest

from fastgen.pipeline.errors import SetupError
from fastgen.pipeline.generation import RunOptions
from fastgen.pipeline.quantizing import QuantizeOptions
from fastgen.pipeline.settings import ClassifyOptions, EmbedOptions
from fastgen_serve.settings import ServeSettings

FILES = {"model": "m", "input": "in.txt", "output": "out.jsonl"}
QUANTIZE = {"model": "m", "output": "out", "calibration": "in.txt"}


WRONG: dict[type, list[dict[str, Any]]] = {
    RunOptions: [
        {"strict": "off"}, {"resume": 1}, {"batch_size": True}, {"batch_size": "many"}, {"batch_size": 4.0},
        {"max_tokens": "100"}, {"limit": 2**64}, {"seed": None}, {"seed": 10**30}, {"workers": 10**6},
        {"metrics": "bleu"}, {"generation": [("num_beams", 4)]}, {"prefix": b"x"}, {"output": 5},
    ],
    EmbedOptions: [{"normalize": "no"}, {"prompt": 5}, {"pooling": ["mean"]}],
    ClassifyOptions: [{"top_k": 1.5}, {"scores": None}],
    QuantizeOptions: [
        {"bits": True}, {"bits": 4.0}, {"damping": "0.01"}, {"damping": True}, {"samples": 1.5}, {"asymmetric": "no"},
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "given"), [(kind, each) for kind, wrong in WRONG.items() for each in wrong], ids=str)
def test_other_types_are_refused(kind, given) -> None:
    (name,) = given
    usual = QUANTIZE if kind is QuantizeOptions else FILES
    kind(**usual)
    with pytest.raises(SetupError, match=f"^{name.replace('_', '-')} is .*it must be "):
        kind(**{**usual, **given})


@pytest.mark.parametrize("kind", [RunOptions, EmbedOptions, ClassifyOptions, QuantizeOptions, ServeSettings])
def test_types_of_weights_have_the_names_of_torch_and_vllm(kind) -> None:
    """One name is left, so that a run may be resumed, and a response cached, under another one."""
    usual = {RunOptions: FILES, QuantizeOptions: QUANTIZE, ServeSettings: {}}.get(kind, FILES)
    names = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "auto": "auto"}
    for name, own in names.items():
        assert kind(**usual, dtype=name) == kind(**usual, dtype=own)
        assert kind(**usual, dtype=name).dtype == own
    with pytest.raises((SetupError, ValueError), match="fp32, fp16, bf16, auto"):
        kind(**usual, dtype="fp8")


def test_what_is_of_its_type() -> None:
    RunOptions(**{**FILES, "output": "out.txt"}, batch_size="auto", metrics=["bleu"], reference_column="r", seed=-1)
    QuantizeOptions(**QUANTIZE, damping=1, max_error=0.5)
