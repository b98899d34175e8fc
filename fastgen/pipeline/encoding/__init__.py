"""Vectors of texts, and classes of texts: `fastgen-embed` and `fastgen-classify`."""

from __future__ import annotations

from fastgen.pipeline.encoding.options import ClassifyOptions, EmbedOptions
from fastgen.pipeline.encoding.run import Classify, Embed, classify_dataset, embed_dataset

__all__ = ["Classify", "ClassifyOptions", "Embed", "EmbedOptions", "classify_dataset", "embed_dataset"]
