"""Vectors of texts, and classes of texts: `fastgen-embed` and `fastgen-classify`."""

from __future__ import annotations

from fastgen.pipeline.encoding.options import ClassifyOptions, EmbedOptions
from fastgen.pipeline.encoding.run import classify, classify_dataset, embed, embed_dataset

__all__ = ["ClassifyOptions", "EmbedOptions", "classify", "classify_dataset", "embed", "embed_dataset"]
