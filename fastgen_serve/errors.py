"""The errors of requests. Each interface writes them in the shape that its clients know."""

from __future__ import annotations


class ServeError(Exception):
    """The request fails with an HTTP status.

    Attributes:
        message: one line that says what failed, and what to do.
        param: the field of the request that the error is about.
        code: an identifier for programs.
        retry_after: seconds after which the client may try again.
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
    """The prompt and its new tokens exceed the model's context length."""

    code = "context_length_exceeded"


class Unauthorized(ServeError):
    """The API key is missing or wrong."""

    status, code = 401, "invalid_api_key"


class ModelNotFound(ServeError):
    """No such model is served."""

    status, code = 404, "model_not_found"


class TooLarge(ServeError):
    """The body exceeds the server's limit."""

    status, code = 413, "request_too_large"


class CompressedBody(ServeError):
    """The body is compressed."""

    status, code = 415, "unsupported_encoding"


class Busy(ServeError):
    """The queue is full: the client has to try again later."""

    status, code = 429, "rate_limit_exceeded"


class Failed(ServeError):
    """The model raised an error, or ran out of memory, for this request alone."""


class Unavailable(ServeError):
    """The model is loading, its process has died, or the server is stopping."""

    status, code = 503, "unavailable"


class TimedOut(ServeError):
    """The request exceeded its time limit."""

    status, code = 504, "timeout"
