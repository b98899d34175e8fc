"""What the tests of `fastgen-quantize` share: models and runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fastgen
from fastgen.pipeline.quantizing import QuantizeOptions, quantize_model
from tests.pipeline import tiny
from tests.quantization import tiny as families


class Stop(Exception):
    """What a test ends a run with."""


class Killed(BaseException):
    """Nothing of the program runs after it."""


def saved(build, folder: Path) -> Path:
    tokens = tiny.tokenizer(encoder_decoder=False)
    return tiny.saved(build(vocab_size=len(tokens)), tokens, folder)


def encoder_decoder(family: str, folder: Path) -> Any:
    """A tiny model of a family, which is saved in the folder."""
    model, tokens = families.FAMILIES[family](), tiny.tokenizer(encoder_decoder=True)
    model.resize_token_embeddings(len(tokens))
    tiny.saved(model, tokens, folder)
    return model


def options(model, out, text, **changes):
    usual = {"group_size": 16, "samples": 4, "sample_length": 32, "device": "cpu", "quiet": True}
    return QuantizeOptions(model=str(model), output=str(out), calibration=str(text), **(usual | changes))


def run(model, out, text, **changes):
    return quantize_model(options(model, out, text, **changes))


def loaded_by_the_library(out, kind):
    """Without FastGen, which would read the file itself."""
    pytest.importorskip("compressed_tensors")
    with fastgen.disabled():
        return kind.from_pretrained(out).eval()
