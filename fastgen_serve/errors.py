"""What a request can fail with. Each interface writes them in the shape that its clients know."""

from __future__ import annotations


class ServeError(Exception):
    """A request fails with a status of HTTP.

    Attributes:
        message: one line that says what, and what to do.
        param: the field of the request that it is about.
        code: a word for programs.
        retry_after: seconds after which to try again.
    """

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message, self.param, self.retry_after = message, param, retry_after


class BadRequest(ServeError):
    """The request is refused: `param` names the field."""

    status, code = 400, "invalid_request_error"


class TooLong(BadRequest):
    """The prompt, with its new tokens, is longer than the model."""

    code = "context_length_exceeded"


class Unauthorized(ServeError):
    """There is no API key, or another one."""

    status, code = 401, "invalid_api_key"


class ModelNotFound(ServeError):
    """No such model is served."""

    status, code = 404, "model_not_found"


class TooLarge(ServeError):
    """The body is larger than the server takes."""

    status, code = 413, "request_too_large"


class CompressedBody(ServeError):
    """The body is compressed."""

    status, code = 415, "unsupported_encoding"


class Busy(ServeError):
    """As many requests wait as the server lets wait: the client tries again."""

    status, code = 429, "rate_limit_exceeded"


class Failed(ServeError):
    """The model has raised, or there was no memory, for this request alone."""


class Unavailable(ServeError):
    """The model is loading, its process has died, or the server stops."""

    status, code = 503, "unavailable"


class TimedOut(ServeError):
    """The request took longer than it may."""

    status, code = 504, "timeout"
