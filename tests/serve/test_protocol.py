"""How requests are read: also those of clients that ask for HTTP/2, as Java's own client and `curl --http2` do."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fastgen_serve.protocol import Protocol
from tests.serve.servers import connected, in_thread

UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
LENGTH = b"POST /a HTTP/1.1\r\nHost: a\r\n" + UPGRADE + b"Content-Length: 10\r\n\r\n0123456789"
CHUNKS = (
    b"POST /b HTTP/1.1\r\nHost: a\r\n" + UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
)
EMPTY = b"GET /c HTTP/1.1\r\nHost: a\r\n" + UPGRADE + b"\r\n"
PLAIN = b"POST /d HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nxy"
ANSWERS = {LENGTH: "/a 0123456789", CHUNKS: "/b abcde", EMPTY: "/c ", PLAIN: "/d xy"}


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the path and the body."""
    body, goes_on = b"", True
    while goes_on:
        message = await receive()
        body, goes_on = body + message["body"], message["more_body"]
    said = f"<{scope['path']} ".encode() + body + b">"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(said))]})
    await send({"type": "http.response.body", "body": said})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with in_thread(echo, http=Protocol, lifespan="off") as address:
        yield address


def answers(url: str, sent: list[bytes], count: int) -> list[str]:
    """So many answers on one connection, whose client sends this in pieces."""
    with connected(url) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        received, found = b"", []
        for piece in sent:
            client.sendall(piece)
            if len(sent) > 1:
                threading.Event().wait(0.002)  # so that it is read alone
        while len(found) < count:
            received += client.recv(65536)
            found = re.findall(r"<(.*?)>", received.decode())
        assert received.count(b" 200 OK") == count
        return found


@pytest.mark.parametrize("request_", ANSWERS, ids=["length", "chunks", "empty", "plain"])
def test_a_body_behind_another_protocol_that_is_asked_for(url: str, request_: bytes) -> None:
    assert answers(url, [request_], 1) == [ANSWERS[request_]]
    pieces = [request_[at : at + 7] for at in range(0, len(request_), 7)]
    assert answers(url, pieces, 1) == [ANSWERS[request_]], "in any packets"


def test_the_connection_goes_on(url: str) -> None:
    sent = [LENGTH, PLAIN, CHUNKS, EMPTY, LENGTH, PLAIN]
    expected = [ANSWERS[each] for each in sent]
    assert answers(url, sent, len(sent)) == expected
    assert answers(url, [b"".join(sent)], len(sent)) == expected, "pipelined"


def test_a_broken_body_is_refused(url: str) -> None:
    broken = CHUNKS.replace(b"3\r\nabc", b"zz\r\nabc")
    with connected(url) as client:
        client.sendall(broken)
        assert b" 400 " in client.recv(1000)
