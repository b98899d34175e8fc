"""uvicorn, which stops as a server should: what runs is finished, and what comes is refused, for a while."""

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
# Seconds between two looks at whether all requests are over; and in which the last answers get to their clients.
_LOOK, _LAST_ANSWERS = 0.05, 2


class Server(uvicorn.Server):
    """Serves an application until it gets SIGTERM or SIGINT.

    Then it refuses requests with 503, and ends when those that run are over, or `drain_s` has passed. A second signal
    ends it at once.

    Attributes:
        has_given_up: a model cannot be loaded.
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
        """Ends the server at once: a model cannot be loaded, as its process has said."""
        self.has_given_up = self.should_exit = True

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.ensure_future(self._drain())
        try:
            await super().serve(sockets)
            if not self.force_exit:
                await self._until_idle(_LAST_ANSWERS)  # those that uvicorn has cancelled are told so
        finally:
            draining.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """What uvicorn does on a signal. It would close its sockets, so that clients could not be told."""
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
            await self._app.state.models.stop()  # what is left gets 503
        finally:
            self.should_exit = True

    async def _until_idle(self, seconds: float) -> None:
        """Waits until no request runs, for so many seconds at the most."""
        traffic, loop = self._app.state.traffic, asyncio.get_running_loop()
        until = loop.time() + seconds
        while traffic.running and loop.time() < until:
            await asyncio.sleep(_LOOK)
