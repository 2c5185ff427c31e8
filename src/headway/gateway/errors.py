"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

import msgspec


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
