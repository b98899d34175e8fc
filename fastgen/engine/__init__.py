"""The engine: takes requests from any thread and batches them for the model.

`engine` is the interface. `requests` defines a request, `options` makes and checks it. `waiting` gives the requests,
of all threads or of a list, to `continuous`, which runs them: in slots, or by `calls` of `generate`. `planning` decides
which requests run together, `prefills` what of a prefill is known, and `models` what a model allows. `generate_batch`
hooks Transformers' own interface. Importing this package imports none of these modules.
"""

from __future__ import annotations

from fastgen.patching import Patch, has

ENTRY_POINT = "transformers.generate_batch"


def patches() -> list[Patch]:
    """Returns the patch that makes Transformers' own interface for continuous batching run on the engine."""
    arguments = "inputs generation_config continuous_batching_config record_timestamps progress_bar persistent_manager"
    return [
        Patch(
            "transformers.generation.continuous_batching.continuous_api",
            "ContinuousMixin.generate_batch",
            f"{__name__}.generate_batch:generate_batch",
            has(arguments),
        )
    ]
