"""A model that is served, as the interfaces of HTTP see it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from fastgen_serve.jobs import Delta, Encode, Generate, Generated, ModelInfo, Transcribe, Transcribed


class ServedModel(Protocol):
    """A model that is served.

    Attributes:
        name: under which it is served.
        info: what it is; only once `is_ready`.
        tokenizer: of Transformers, loaded in the process of the server.
        processor: of Transformers, which makes inputs of texts and images; None where the model takes none.
        no_images: why it takes none.
        feature_extractor: of Transformers, which makes inputs of recordings; None where it does not transcribe.
        is_ready: it has been loaded and warmed up.
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
        """The block in which a request for so many sequences is prepared, where that takes long: it waits meanwhile.

        Raises:
            ServeError: it may not: Busy, Unavailable.
        """

    async def generate(self, job: Generate) -> Generated:
        """The results of a request. It is cancelled if the task is.

        Raises:
            ServeError: what it has failed with: BadRequest, Busy, Failed, TimedOut, Unavailable.
        """

    async def generate_all(self, jobs: Sequence[Generate]) -> list[Generated]:
        """The results of the jobs of one request, in order. All of them are let in, or none; if one fails, all do.

        Raises:
            ServeError: as `generate`.
        """

    def stream_all(self, jobs: Sequence[Generate]) -> AsyncGenerator[tuple[int, Delta | Generated], None]:
        """New tokens of the jobs of one request as they are certain, and the results at the end of each, with the index
        of the job. They are cancelled if the generator is closed. See `generate_all`.
        """

    async def transcribe(self, job: Transcribe) -> Transcribed:
        """What a recording says.

        Raises:
            ServeError: as `generate`.
        """

    async def encode(self, jobs: Sequence[Encode]) -> list[list[float]]:
        """A vector, or the scores of all labels, for each job, in order.

        Raises:
            ServeError: as `generate`.
        """

    async def stats(self) -> dict[str, Any]:
        """What its process has done so far: `fastgen.Engine.stats()`, under "fastgen" `fastgen.stats()`, and
        "memory_bytes", its resident memory.

        An empty one while there is no process.
        """

    async def start(self) -> None:
        """Has it load. It is not ready yet when this returns."""

    async def stop(self) -> None:
        """Ends it. What has no result yet fails with `Unavailable`."""
