"""Runs a model over a data set. A record passes through these files, in this order:

    settings.py   the options of a run
    readers.py    INPUT, row by row; `inputs.py` makes a `Record` of each, or says why it is skipped
    batches.py    records in windows, cut into batches, and `BatchStage`, which puts these through a model
    layouts.py    the form of a record's result: in the journal, and in each format
    writers.py    OUTPUT, as a file or as a stream; `journal.py` keeps what is finished, for --resume
    stages.py     the threads of all this; `run.py` is the run from the checks to the report

`generation/`, `encoding/`, `quantizing/` and `fairseq/` hold what differs between commands. `generate_dataset` does
everything in one call; `fastgen-generate` is its command line. Importing this package imports neither torch nor
transformers.
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
