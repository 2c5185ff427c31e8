"""The access log: one line of JSON for each request, without the request's text."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec import Struct
from starlette.types import Message, Receive, Scope, Send

from headway.gateway.auth.keys import key_digest
from headway.gateway.names import cut, is_request_id
from headway.gateway.relay.relay import Relay
from headway.gateway.relay.writer import ClientWriter, Headers, HookedWriter
from headway.gateway.settings import key_id
from headway.records.json_lines import BackgroundJsonLines, JsonLinesFile

ENTRY = "headway.access"
"""The key of a request's entry in its ASGI scope."""
_MAX_PATH_CHARS = 1000
CLIENT_LEFT = 499
"""Status in the log for a request whose client left before its response began."""


class AccessLine(Struct, frozen=True, gc=False):
    """One line of the log. Null means unknown or none."""

    time: str
    """Time of arrival in ISO 8601, in UTC."""
    request_id: str | None
    method: str
    path: str
    """Path without its query; a long path is truncated."""
    status: int
    key: str | None
    """The key's id: the first digits of its SHA-256 hash. Rejected keys are logged, too."""
    model: str | None
    replica: str | None
    """The replica that answered the last attempt."""
    prompt_tokens: int | None
    output_tokens: int | None
    ttft_s: float | None
    """Time from arrival to the first token."""
    duration_s: float
    """Time from the request's first byte to the end of the response."""
    answered_by: str | None = None
    """The fallback model that answered in place of `model`."""
    fallback: str | None = None
    """Reason of the fallback: `down`, `rejects` or `slow`."""


class AccessEntry:
    """The facts collected so far for one request's line."""

    __slots__ = ("began", "key", "model", "relay", "request_id", "start_s", "status")

    def __init__(self, headers: dict[str, str]) -> None:
        self.began, self.start_s = datetime.now(UTC), time.monotonic()
        self.key = key_id(key_digest(headers)) or None
        self.status: int | None = None
        given = headers.get("x-request-id", "")
        self.request_id = given if is_request_id(given) else None
        self.model: str | None = None
        self.relay: Relay | None = None

    def started(self, status: int, headers: Headers) -> Headers:
        """Record the start of a response."""
        self.status = status
        if self.request_id is None:
            self.request_id = next(
                (value.decode("latin-1") for name, value in headers if name == b"x-request-id"), None
            )
        return headers

    def line(self, method: str, path: str) -> AccessLine:
        live = replica = None
        if self.relay is not None:
            live, replica = self.relay.in_flight.live, self.relay.in_flight.replica
        fallback = None if live is None else live.fallback
        has_token = live is not None and live.first_token_s == live.first_token_s
        return AccessLine(
            time=self.began.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            request_id=self.request_id,
            method=cut(method),
            path=path[:_MAX_PATH_CHARS],
            status=self.status or CLIENT_LEFT,
            key=self.key,
            model=self.model,
            replica=None if replica is None else replica.name,
            prompt_tokens=None if live is None else live.prompt_tokens,
            output_tokens=None if live is None else live.generated_tokens,
            ttft_s=round(live.first_token_s - live.arrival_s, 6) if live is not None and has_token else None,
            duration_s=round(time.monotonic() - self.start_s, 6),
            answered_by=None if live is None or fallback is None else live.model,
            fallback=None if fallback is None else fallback.why,
        )


class AccessLog:
    """An ASGI application that wraps another application and logs its requests. Closed at the end of the lifespan."""

    takes_writer = True

    def __init__(self, app: Callable[..., Any], path: Path) -> None:
        """Raises HeadwayError if the file cannot be written."""
        self._app = app
        self._lines = BackgroundJsonLines(JsonLinesFile(path, is_shared=True), what="access log lines")

    async def __call__(self, scope: Scope, receive: Receive, send: Send, writer: ClientWriter | None = None) -> None:
        if scope["type"] != "http":
            try:
                await self._app(scope, receive, send)
            finally:
                if scope["type"] == "lifespan":
                    self._lines.close()
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        scope[ENTRY] = entry = AccessEntry(headers)

        async def send_seen(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.started(message["status"], message["headers"])
            await send(message)

        try:
            hooked = None if writer is None else HookedWriter(writer, entry.started)
            await self._app(scope, receive, send_seen, hooked)
        except BaseException:
            entry.status = entry.status or 500
            raise
        finally:
            if entry.status is None and writer is not None:
                # the status of the connection, because the connection has refused the body
                entry.status = writer.status
            self._lines.write(entry.line(scope["method"], scope["path"]))
