"""Quantises a Transformers model with the text of a file: `fastgen-quantize`."""

from __future__ import annotations

from fastgen.pipeline.quantizing.run import quantize_model
from fastgen.pipeline.quantizing.settings import QuantizeOptions

__all__ = ["QuantizeOptions", "quantize_model"]
