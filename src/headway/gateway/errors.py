"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from headway.core.errors import HeadwayError

log = logging.getLogger("headway.gateway")


class ApiError(Exception):
    """What a client is told in place of an answer."""

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        """The error's kind, by its status."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, dict[str, str | None]]:
        """The error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def json(self) -> bytes:
        """The same, encoded."""
        return msgspec.json.encode(self.body())


@contextmanager
def reported(what: str) -> Iterator[None]:
    """A policy's mistake, or one of ours, goes to the log; whoever was to be told, and is not to blame, goes on."""
    try:
        yield
    except HeadwayError as error:
        log.error("%s", error)
    except Exception:
        log.exception("%s", what)
