"""Running a model over a data set: reading, batch planning, the asynchronous stages, ordered writing.

`generate_dataset` is the whole of it in one call; `fastgen-generate` is its command line. Importing this package
imports neither torch nor transformers.
"""

from fastgen.pipeline.errors import PipelineError, SetupError, StrictError
from fastgen.pipeline.run import RunReport, generate_dataset, run
from fastgen.pipeline.settings import Settings

__all__ = ["PipelineError", "RunReport", "Settings", "SetupError", "StrictError", "generate_dataset", "run"]
