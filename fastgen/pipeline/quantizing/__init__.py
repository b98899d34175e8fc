"""Quantises a Transformers model with the text of a file: `fastgen-quantize`."""

from __future__ import annotations

from fastgen.pipeline.quantizing.options import QuantizeOptions
from fastgen.pipeline.quantizing.run import quantize_model

__all__ = ["QuantizeOptions", "quantize_model"]
