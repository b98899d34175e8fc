"""Generated texts: `fastgen-generate`."""

from __future__ import annotations

from fastgen.pipeline.generation.options import RunOptions
from fastgen.pipeline.generation.run import Generate, generate_dataset

__all__ = ["Generate", "RunOptions", "generate_dataset"]
