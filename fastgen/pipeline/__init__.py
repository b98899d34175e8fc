"""Running a model over a data set: reading, batch planning, the asynchronous stages, ordered writing.

`run.py` is the run, `records.py` what goes through it; `generation/`, `encoding/`, `quantizing/` and `fairseq/` hold
what differs between commands. `generate_dataset` is the whole of it in one call; `fastgen-generate` is its command
line. Importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

import warnings
from typing import Any

from fastgen.pipeline.errors import PipelineError, SetupError, StrictError
from fastgen.pipeline.generation import RunOptions, generate_dataset
from fastgen.pipeline.run import RunReport

__all__ = ["PipelineError", "RunOptions", "RunReport", "SetupError", "StrictError", "generate_dataset"]


def __getattr__(name: str) -> Any:
    if name == "Settings":
        warnings.warn("fastgen.pipeline.Settings is now called RunOptions", DeprecationWarning, stacklevel=2)
        return RunOptions
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
