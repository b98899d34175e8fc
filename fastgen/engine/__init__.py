"""The engine: requests from any thread, put together into batches that the model generates for.

`requests` says what a request is, `options` makes and checks it, `waiting` holds those that have not run, `continuous`
runs them, `calls` in calls of `generate`; `planning` says which are cheap together, `adapters` what peft's models do
besides. `engine` is the interface, and `foreground` runs a list of requests in the calling thread. Importing this
package imports none of them.
"""

from __future__ import annotations

from fastgen.patching import Patch, has

ENTRY_POINT = "transformers.generate_batch"


def patches() -> list[Patch]:
    """The patch that has Transformers' own interface to continuous batching run on the engine."""
    arguments = "inputs generation_config continuous_batching_config record_timestamps progress_bar persistent_manager"
    return [
        Patch(
            "transformers.generation.continuous_batching.continuous_api",
            "ContinuousMixin.generate_batch",
            f"{__name__}.generate_batch:generate_batch",
            has(arguments),
        )
    ]
