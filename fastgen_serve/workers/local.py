"""A model that runs in the server's process: for tests, and for programs that serve a few requests."""

from __future__ import annotations

from typing import Any

from fastgen_serve.errors import Unavailable
from fastgen_serve.settings import ServeSettings
from fastgen_serve.workers.client import ClientModel
from fastgen_serve.workers.worker import Worker


class LocalModel(ClientModel):
    """A `ServedModel` with a worker in the same process. The constructor loads the model.

    Args:
        name: the name under which it is served, one of `settings.models`.

    Raises:
        SetupError: it cannot be loaded.
    """

    def __init__(self, name: str, settings: ServeSettings) -> None:
        super().__init__(name, settings)
        self._worker = Worker(name, settings, self.receive)
        self._worker.load()

    def _send(self, message: Any) -> None:
        self._worker.receive(message)

    async def start(self) -> None:
        """Does nothing: the model is loaded."""

    async def stop(self) -> None:
        """Stops the model."""
        self.close()

    def close(self) -> None:
        """Stops the model without an event loop."""
        self.is_ready = False
        self._fail_all(Unavailable("the server stops"))
        self._worker.close()
