"""ASGI middleware that every request passes first: it assigns the id, writes the log line, checks the API key and the
size of the body, and notices when the client disconnects.

It wraps FastAPI, so that a body is measured before it is in memory, and a disconnect cancels the request's work.
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

# Request ids that a client may choose.
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# The status in the log of a request whose client has disconnected.
_GONE = 499
# Seconds beyond the request's limit, so that a job that times out can report it in its stream first.
_GRACE = 5.0
# Parts of a body that are read ahead of the application: the rest stays with the client.
_AHEAD = 4
# Limits for reading the rest of a refused request's body.
_REST_BYTES, _REST_SECONDS = 2**25, 1.0


@dataclass
class Traffic:
    """Counts the requests in progress."""

    running: int = 0
    is_draining: bool = False
    """Whether the server is about to stop, and accepts no more requests."""


class Guard:
    """The ASGI application around FastAPI's.

    Args:
        path_of: returns a path as its route declares it; None for an unknown path.
        needs_header: returns whether a request for a path needs its API key in the header.
        most_bytes: returns the limit in bytes of a body for a path.
        write_error: returns the response to an error, for a path.
        traffic: counts the requests.
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
        # Counts and logs only declared paths: a client may send any number of unknown ones.
        entry = log.Entry(
            id=given if _ID.fullmatch(given) else uuid.uuid4().hex,
            method=scope["method"],
            path=self._path_of(scope["path"]) or "unknown",
        )
        log.current.set(entry)
        if entry.method == "HEAD":  # FastAPI's routes declare only GET
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
            if status != _GONE:  # the response has begun: uvicorn cuts the connection, and logs the error
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
            if self._traffic.is_draining and scope["method"] == "POST":  # only POST asks a model for something
                raise _stops()
            await self._run(scope, body, send)
        except ServeError as error:
            await self._refuse(scope, body, send, error)

    async def _refuse(self, scope: MutableMapping[str, Any], body: _Body, send: Send, error: ServeError) -> None:
        await body.discard_rest()
        response = self._write_error(scope["path"], error)
        response.headers["Connection"] = "close"  # the client may still be sending
        await response(scope, body.receive, send)

    async def _run(self, scope: MutableMapping[str, Any], body: _Body, send: Send) -> None:
        """Runs the application until it ends, the client disconnects, or the request exceeds its time.

        Raises:
            TimedOut: no response has begun in time. A response that has begun is cut: its client does not read it.
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
            if running.done() or (done and is_complete):  # after a complete response, a disconnect is normal
                await running
                return
            running.cancel()
            await asyncio.wait({running})
            if has_begun:
                return
            if not done:
                raise TimedOut(f"the request took longer than {seconds:g} s")
            await reading  # raises if the body is too large
        finally:
            for task in (running, reading):
                task.cancel()
            await asyncio.gather(running, reading, return_exceptions=True)


def _without_body(send: Send) -> Send:
    async def send_head(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return send_head


def _check_encoding(encoding: str) -> None:
    """Raises CompressedBody for a compressed body: its real size is unknown."""
    if encoding.strip().lower() not in ("", "identity"):
        raise CompressedBody("the body is compressed: send it as it is, without the header Content-Encoding")


def _stops() -> Unavailable:
    return Unavailable("the server stops: try another one", retry_after=10)


class _Body:
    """Passes the body of a request on to the application, up to a limit in bytes."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive, self._most = receive, most
        self._messages: asyncio.Queue[Message] = asyncio.Queue(_AHEAD)
        self._is_whole = False

    async def receive(self) -> Message:
        """Returns the next message. The application calls it."""
        return await self._messages.get()

    def check_length(self, declared: str | None) -> None:
        """Raises TooLarge if the Content-Length header exceeds the limit."""
        if declared is not None and declared.isdecimal() and int(declared) > self._most:
            raise self._too_large()

    async def read(self) -> None:
        """Reads until the client disconnects.

        Raises:
            TooLarge: the body exceeds the limit.
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
        """Reads the rest of a refused request's body, within limits: closing a connection with unread bytes resets it,
        and the client may lose the response.
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
