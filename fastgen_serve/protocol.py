"""Parses HTTP requests: uvicorn's protocol on httptools, plus two features that these lack."""

from __future__ import annotations

from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Limits for the bytes of a request other than its body, which the guard measures: for headers, and for the framing of
# chunks.
_MOST_AROUND_BODY, _MOST_PER_BYTE = 2**19, 8
# Headers that determine where a body ends.
_FRAMING = (b"content-length", b"transfer-encoding")


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol, with two additions:

    - The headers' size is limited: a request that exceeds it gets 400.
    - A request to upgrade to an unsupported protocol keeps its body. Java's own client and `curl --http2` send such
      requests for HTTP/2, and a server may ignore the upgrade (RFC 9110, 7.8).
    """

    _received = _body = 0
    _is_resuming = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser = _Parser(self)  # type: ignore[assignment]

    @property
    def is_refused_upgrade(self) -> bool:
        """Whether the request asks to upgrade to an unsupported protocol."""
        return self.parser.should_upgrade() and not self._should_upgrade()

    def resume(self, parser: httptools.HttpRequestParser) -> None:
        """Makes a new parser read the body of the request whose headers are known."""
        framing = [b"%b: %b\r\n" % header for header in self.headers if header[0] in _FRAMING]
        self._is_resuming = True
        try:
            parser.feed_data(b"".join([b"POST / HTTP/1.1\r\n", *framing, b"\r\n"]))
        finally:
            self._is_resuming = False

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._received += len(data)
        if self._received > _MOST_AROUND_BODY + _MOST_PER_BYTE * self._body and not self.transport.is_closing():
            self.send_400_response("The headers are too long.")

    # The parser's callbacks. For a resumed request they ignore everything but its body, because the rest is known.

    def on_message_begin(self) -> None:
        if not self._is_resuming:
            self._received = self._body = 0
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_resuming:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_resuming:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._is_resuming:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.is_refused_upgrade:  # otherwise the body is still to come
            super().on_message_complete()


class _Parser:
    """httptools' parser, which stops at an upgrade request. If the upgrade is refused, a new parser replaces it."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self._parser = self._new()

    def _new(self) -> httptools.HttpRequestParser:
        made = httptools.HttpRequestParser(self._protocol)
        if hasattr(made, "set_dangerous_leniencies"):  # as uvicorn sets it, so that the last request is answered
            made.set_dangerous_leniencies(lenient_data_after_close=True)
        return made

    def feed_data(self, data: bytes) -> None:
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._protocol.is_refused_upgrade:
                    raise
                data = data[upgrade.args[0] :]
                self._parser = self._new()
                self._protocol.resume(self._parser)

    def get_http_version(self) -> str:
        return self._parser.get_http_version()

    def get_method(self) -> bytes:
        return self._parser.get_method()

    def should_keep_alive(self) -> bool:
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        return self._parser.should_upgrade()
