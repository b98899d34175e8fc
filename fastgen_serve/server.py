"""uvicorn with a graceful stop: it finishes running requests, and refuses new ones, for a limited time."""

from __future__ import annotations

import asyncio
import logging
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from fastgen_serve.protocol import Protocol
from fastgen_serve.settings import ServeSettings

_log = logging.getLogger("fastgen_serve")
# Seconds between two polls for running requests; and for the last responses to reach their clients.
_LOOK, _LAST_ANSWERS = 0.05, 2


class Server(uvicorn.Server):
    """Serves an application until it gets SIGTERM or SIGINT.

    It then refuses new requests with 503, and ends when the running ones have finished, or `drain_s` has passed. A
    second signal ends it at once.

    Attributes:
        has_given_up: whether it ended because a model cannot be loaded.
    """

    def __init__(self, app: FastAPI, settings: ServeSettings) -> None:
        config = uvicorn.Config(
            app, http=Protocol, log_level="warning", access_log=False, server_header=False, lifespan="on",
            timeout_graceful_shutdown=_LAST_ANSWERS,
        )  # fmt: skip
        super().__init__(config)
        self._app, self._settings = app, settings
        self._told_to_stop = asyncio.Event()
        self.has_given_up = False

    def give_up(self, reason: str) -> None:
        """Ends the server at once, because a model cannot be loaded."""
        self.has_given_up = self.should_exit = True

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.ensure_future(self._drain())
        try:
            await super().serve(sockets)
            if not self.force_exit:
                await self._until_idle(_LAST_ANSWERS)  # lets requests that uvicorn has cancelled respond
        finally:
            draining.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal for uvicorn, which would close its sockets, so that new requests would get no response."""
        if self._told_to_stop.is_set():
            self.should_exit = self.force_exit = True
        self._told_to_stop.set()

    async def _drain(self) -> None:
        await self._told_to_stop.wait()
        traffic = self._app.state.traffic
        traffic.is_draining = True
        _log.info("stopping: %d requests run, %g s at the most", traffic.running, self._settings.drain_s)
        await self._until_idle(self._settings.drain_s)
        try:
            await self._app.state.models.stop()  # the remaining requests get 503
        finally:
            self.should_exit = True

    async def _until_idle(self, seconds: float) -> None:
        """Waits until no request runs, for at most this many seconds."""
        traffic, loop = self._app.state.traffic, asyncio.get_running_loop()
        until = loop.time() + seconds
        while traffic.running and loop.time() < until:
            await asyncio.sleep(_LOOK)
