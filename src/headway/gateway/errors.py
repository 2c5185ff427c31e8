"""Errors in the format that OpenAI's clients expect."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from headway.core.errors import HeadwayError

log = logging.getLogger("headway.gateway")
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors while decoding invalid JSON, or JSON of another shape."""
_MAX_MESSAGE_CHARS = 1000
"""Length limit of messages, because they quote texts of clients and engines of any length."""


class ApiError(Exception):
    """The error that a client gets in place of an answer. A long message is truncated."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        retry_after_s: int | None = None,
        reason: str = "",
    ) -> None:
        """`reason`: the kind of limit, for metrics."""
        if len(message) > _MAX_MESSAGE_CHARS:
            message = f"{message[:_MAX_MESSAGE_CHARS]}..."
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after_s, self.reason = retry_after_s, reason

    @property
    def type(self) -> str:
        """OpenAI's error type for the status."""
        if self.code == "insufficient_quota":
            return self.code
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, dict[str, str | None]]:
        """OpenAI's error object, as a value."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def json(self) -> bytes:
        """OpenAI's error object, as JSON."""
        return msgspec.json.encode(self.body())


# Functions, not constants: a raised exception keeps its traceback as long as the exception lives, and the traceback
# keeps the request.


def internal_error() -> ApiError:
    """An internal error of the gateway; the log contains the traceback."""
    return ApiError(500, "the gateway failed", "internal_error")


def rejected_error(is_shed: bool, retry_after_s: int) -> ApiError:
    """The error of a request that no replica can take. `is_shed`: the request was rejected because its expected TTFT
    was too long."""
    if is_shed:
        return ApiError(429, "the model is too busy to answer in time", "shed", retry_after_s=retry_after_s)
    message = "no replica of the model can take the request now"
    return ApiError(503, message, "no_capacity", retry_after_s=retry_after_s)


def policy_error() -> ApiError:
    return ApiError(500, "a policy failed", "policy_error")


def scheduler_hangs() -> ApiError:
    return ApiError(503, "the scheduler does not answer", "unavailable", retry_after_s=5)


@contextmanager
def logged(message: str) -> Iterator[None]:
    """Log exceptions instead of raising them: a HeadwayError as its text, any other with `message` and a traceback."""
    try:
        yield
    except HeadwayError as error:
        log.error("%s", error)
    except Exception:
        log.exception("%s", message)


def line_of(error: BaseException) -> str:
    """An error as one line of the log: the first line of the error's message, or the error's type if it has no
    message."""
    return (str(error).splitlines() or [type(error).__name__])[0]
