"""Vectors of texts, and classes of texts: `fastgen-embed` and `fastgen-classify`."""

from __future__ import annotations

from fastgen.pipeline.encoding.run import Classify, Embed, classify_dataset, embed_dataset
from fastgen.pipeline.settings import ClassifyOptions, EmbedOptions

__all__ = ["Classify", "ClassifyOptions", "Embed", "EmbedOptions", "classify_dataset", "embed_dataset"]
