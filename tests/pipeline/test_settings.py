"""Options of other types than they are declared with are refused, whatever they would count as."""

from __future__ import annotations

import pytest

from fastgen.pipeline.encoding.options import ClassifyOptions, EmbedOptions
from fastgen.pipeline.errors import SetupError
from fastgen.pipeline.generation import RunOptions
from fastgen.pipeline.quantizing import QuantizeOptions

FILES = {"model": "m", "input": "in.txt", "output": "out.jsonl"}
QUANTIZE = {"model": "m", "output": "out", "calibration": "in.txt"}


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (RunOptions, {"strict": "off"}),
        (RunOptions, {"resume": 1}),
        (RunOptions, {"batch_size": True}),
        (RunOptions, {"batch_size": "many"}),
        (RunOptions, {"batch_size": 4.0}),
        (RunOptions, {"max_tokens": "100"}),
        (RunOptions, {"limit": 2**64}),
        (RunOptions, {"seed": None}),
        (RunOptions, {"seed": 10**30}),
        (RunOptions, {"workers": 10**6}),
        (RunOptions, {"metrics": "bleu"}),
        (RunOptions, {"generation": [("num_beams", 4)]}),
        (RunOptions, {"prefix": b"x"}),
        (RunOptions, {"output": 5}),
        (EmbedOptions, {"normalize": "no"}),
        (EmbedOptions, {"prompt": 5}),
        (EmbedOptions, {"pooling": ["mean"]}),
        (ClassifyOptions, {"top_k": 1.5}),
        (ClassifyOptions, {"scores": None}),
        (QuantizeOptions, {"bits": True}),
        (QuantizeOptions, {"bits": 4.0}),
        (QuantizeOptions, {"damping": "0.01"}),
        (QuantizeOptions, {"damping": True}),
        (QuantizeOptions, {"samples": 1.5}),
        (QuantizeOptions, {"asymmetric": "no"}),
    ],
    ids=str,
)
def test_other_types_are_refused(kind, given) -> None:
    (name,) = given
    usual = QUANTIZE if kind is QuantizeOptions else FILES
    kind(**usual)
    with pytest.raises(SetupError, match=f"^{name.replace('_', '-')} is .*it must be "):
        kind(**{**usual, **given})


def test_what_is_of_its_type() -> None:
    RunOptions(**{**FILES, "output": "out.txt"}, batch_size="auto", metrics=["bleu"], reference_column="r", seed=-1)
    QuantizeOptions(**QUANTIZE, damping=1, max_error=0.5)
