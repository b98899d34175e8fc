"""The engine: takes requests from any thread and batches them for the model.

`requests` defines a request, `options` makes and checks it, and `waiting` holds the requests that have not run.
`continuous` runs them, through `calls` where a call of `generate` is needed; `planning` decides which requests are
cheap together, and `adapters` handles peft's models. `engine` is the interface, and `foreground` runs a list of
requests in the calling thread. Importing this package imports none of these modules.
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
