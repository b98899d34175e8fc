"""A served model, as the HTTP interfaces see it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from fastgen_serve.jobs import Delta, Encode, Generate, Generated, ModelInfo, Transcribe, Transcribed


class ServedModel(Protocol):
    """A served model.

    Attributes:
        name: the name under which it is served.
        info: its description; valid once `is_ready`.
        tokenizer: of Transformers, loaded in the server's process.
        processor: of Transformers, which makes inputs of texts and images; None if the model does not accept images.
        no_images: why it does not.
        feature_extractor: of Transformers, which makes inputs of recordings; None if the model does not transcribe.
        is_ready: whether it is loaded and warmed up.
    """

    @property
    def name(self) -> str: ...
    @property
    def info(self) -> ModelInfo: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def processor(self) -> Any: ...
    @property
    def no_images(self) -> str: ...
    @property
    def feature_extractor(self) -> Any: ...
    @property
    def is_ready(self) -> bool: ...

    def reserve(self, rows: int) -> AbstractContextManager[None]:
        """Queues a request for this many sequences for the duration of a block that prepares it, if that takes long.

        Raises:
            ServeError: the queue refuses it: Busy, Unavailable.
        """

    async def generate(self, job: Generate) -> Generated:
        """Returns the results of a request. Cancelling the task cancels the request.

        Raises:
            ServeError: the request failed: BadRequest, Busy, Failed, TimedOut, Unavailable.
        """

    async def generate_all(self, jobs: Sequence[Generate]) -> list[Generated]:
        """Returns the results of the jobs of one request, in order. The queue accepts all or none; if one fails, all
        do.

        Raises:
            ServeError: as `generate`.
        """

    def stream_all(self, jobs: Sequence[Generate]) -> AsyncGenerator[tuple[int, Delta | Generated], None]:
        """Yields the index of a job with its new tokens, once they are final, and with its result when it ends. Closing
        the generator cancels the jobs. See `generate_all`.
        """

    async def transcribe(self, job: Transcribe) -> Transcribed:
        """Transcribes a recording.

        Raises:
            ServeError: as `generate`.
        """

    async def encode(self, jobs: Sequence[Encode]) -> list[list[float]]:
        """Returns a vector, or the scores of all labels, for each job, in order.

        Raises:
            ServeError: as `generate`.
        """

    async def stats(self) -> dict[str, Any]:
        """Returns the statistics of its process: `fastgen.Engine.stats()`, `fastgen.stats()` under "fastgen", and its
        resident memory as "memory_bytes".

        Returns an empty dictionary while it has no process.
        """

    async def start(self) -> None:
        """Starts loading it. It is not ready yet when this returns."""

    async def stop(self) -> None:
        """Stops it. Unfinished requests fail with `Unavailable`."""
