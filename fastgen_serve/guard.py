"""What every request passes first: its id and its line in the log, its key, its size, and whether the client is there.

In ASGI, below FastAPI: a body is measured before it is in memory, and a client that leaves ends what runs for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response

from fastgen_serve import keys, log, metrics
from fastgen_serve.errors import CompressedBody, Failed, ServeError, TimedOut, TooLarge, Unavailable
from fastgen_serve.settings import ServeSettings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_log = logging.getLogger("fastgen_serve")

# What a client may call its request.
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# The status, in the log, of a request whose client has left.
_GONE = 499
# Seconds that a request has beyond its limit, so that a job that takes too long can say so in its stream first.
_GRACE = 5.0
# Parts of a body that are read ahead of who wants it: the rest stays with the client.
_AHEAD = 4
# Of a request that is refused, so much is read, for so long.
_REST_BYTES, _REST_SECONDS = 2**25, 1.0


@dataclass
class Traffic:
    """How many requests are there."""

    running: int = 0
    is_draining: bool = False
    """No more are taken, as the server is about to stop."""


class Guard:
    """The ASGI application around FastAPI's.

    Args:
        path_of: the path that a request's belongs to, as it is declared; None for an unknown one.
        needs_header: whether a request for a path has its key in the header.
        most_bytes: of the body of a request for a path.
        write_error: the response to an error, for a path.
        traffic: in which requests are counted.
    """

    def __init__(
        self,
        app: App,
        settings: ServeSettings,
        path_of: Callable[[str], str | None],
        needs_header: Callable[[str], bool],
        most_bytes: Callable[[str], int],
        write_error: Callable[[str, ServeError], Response],
        traffic: Traffic,
    ) -> None:
        self._app, self._settings = app, settings
        self._path_of, self._needs_header, self._write_error = path_of, needs_header, write_error
        self._most_bytes, self._traffic = most_bytes, traffic

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        # An unknown path may be anything: only those that are declared are counted, and logged.
        entry = log.Entry(
            id=given if _ID.fullmatch(given) else uuid.uuid4().hex,
            method=scope["method"],
            path=self._path_of(scope["path"]) or "unknown",
        )
        log.current.set(entry)
        if entry.method == "HEAD":  # FastAPI's routes know GET alone
            scope, send = {**scope, "method": "GET"}, _without_body(send)
        status, body = _GONE, _Body(receive, self._most_bytes(scope["path"]))

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = entry.id
            await send(message)

        self._traffic.running += 1
        try:
            await self._answer(scope, headers, body, send_with_id)
        except asyncio.CancelledError:
            if status != _GONE or not self._traffic.is_draining:
                raise
            await self._refuse(scope, body, send_with_id, _stops())  # uvicorn has waited for it long enough
        except Exception:
            if status != _GONE:  # it has begun: the connection is cut, and uvicorn says why in the log
                raise
            _log.exception("request %s has failed", entry.id)
            await self._refuse(scope, body, send_with_id, Failed("the server has failed: its log says why"))
        finally:
            self._traffic.running -= 1
            metrics.REQUESTS.labels(entry.path, str(status)).inc()
            metrics.LATENCY.labels(entry.path).observe(log.passed(entry))
            log.write(entry, status)

    async def _answer(self, scope: MutableMapping[str, Any], headers: Headers, body: _Body, send: Send) -> None:
        try:
            body.check_length(headers.get("content-length"))
            _check_encoding(headers.get("content-encoding", ""))
            if self._needs_header(scope["path"]):
                keys.check(keys.of_header(headers.get("authorization")), self._settings.api_keys)
            if self._traffic.is_draining and scope["method"] == "POST":  # what asks a model for something
                raise _stops()
            await self._run(scope, body, send)
        except ServeError as error:
            await self._refuse(scope, body, send, error)

    async def _refuse(self, scope: MutableMapping[str, Any], body: _Body, send: Send, error: ServeError) -> None:
        await body.discard_rest()
        response = self._write_error(scope["path"], error)
        response.headers["Connection"] = "close"  # the client may be sending still
        await response(scope, body.receive, send)

    async def _run(self, scope: MutableMapping[str, Any], body: _Body, send: Send) -> None:
        """Runs the application, as long as the client is there and the request may take.

        Raises:
            TimedOut: there is no response by then. One that has begun is cut: its client does not read it.
        """
        has_begun = is_complete = False

        async def note(message: Message) -> None:
            nonlocal has_begun, is_complete
            has_begun = True
            is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        running = asyncio.ensure_future(self._app(scope, body.receive, note))
        reading = asyncio.ensure_future(body.read())
        try:
            seconds = self._settings.request_timeout_s
            done, _ = await asyncio.wait(
                {running, reading}, timeout=seconds + _GRACE, return_when=asyncio.FIRST_COMPLETED
            )
            if running.done() or (done and is_complete):  # behind a response, everybody has left
                await running
                return
            running.cancel()
            await asyncio.wait({running})
            if has_begun:
                return
            if not done:
                raise TimedOut(f"the request took longer than {seconds:g} s")
            await reading  # raises, if the body is too large
        finally:
            for task in (running, reading):
                task.cancel()
            await asyncio.gather(running, reading, return_exceptions=True)


def _without_body(send: Send) -> Send:
    async def send_head(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return send_head


def _check_encoding(encoding: str) -> None:
    """Raises CompressedBody for a compressed body, of which nobody knows how large it gets."""
    if encoding.strip().lower() not in ("", "identity"):
        raise CompressedBody("the body is compressed: send it as it is, without the header Content-Encoding")


def _stops() -> Unavailable:
    return Unavailable("the server stops: try another one", retry_after=10)


class _Body:
    """The body of a request on its way to the application, up to so many bytes."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive, self._most = receive, most
        self._messages: asyncio.Queue[Message] = asyncio.Queue(_AHEAD)
        self._is_whole = False

    async def receive(self) -> Message:
        """For the application."""
        return await self._messages.get()

    def check_length(self, declared: str | None) -> None:
        """Raises TooLarge where the header says so."""
        if declared is not None and declared.isdecimal() and int(declared) > self._most:
            raise self._too_large()

    async def read(self) -> None:
        """Reads until the client leaves.

        Raises:
            TooLarge: the body has more bytes than it may.
        """
        size = 0
        while True:
            message = await self._next()
            size += len(message.get("body", b""))
            if size > self._most:
                raise self._too_large()
            await self._messages.put(message)
            if message["type"] == "http.disconnect":
                return

    async def discard_rest(self) -> None:
        """Reads what the client of a refused request is sending, as far as it is short: a connection that is closed
        with bytes unread is reset, and the client may lose the response.
        """

        async def read() -> None:
            left = _REST_BYTES
            while not self._is_whole and left > 0:
                left -= len((await self._next()).get("body", b""))

        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(read(), _REST_SECONDS)

    async def _next(self) -> Message:
        message = await self._receive()
        self._is_whole |= not message.get("more_body", False)
        return message

    def _too_large(self) -> TooLarge:
        return TooLarge(f"the body has more than {self._most} bytes: send less, or in parts")
