"""Optional layers around the application: cross-origin resource sharing and the access log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Message, Receive, Scope, Send

from headway.gateway.relay.writer import ClientWriter, HookedWriter
from headway.gateway.relay.writer import Headers as RawHeaders
from headway.gateway.server.access_log import AccessLog
from headway.gateway.settings import Cors, Settings

Application = Callable[..., Any]
"""An ASGI application that takes a `ClientWriter` or None as a fourth argument."""
_EXPOSED = (
    "x-request-id",
    "retry-after",
    "x-headway-replica",
    "x-headway-held-s",
    "x-headway-attempts",
    "x-headway-tier",
    "x-headway-model",
    "x-headway-replayed-tokens",
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)
"""Response headers that pages may read."""


def with_middleware(app: Application, settings: Settings, access_log: Path | None) -> Application:
    """The application wrapped in the layers that the settings ask for. Raises HeadwayError if the access log cannot be
    written."""
    if settings.cors is not None:
        app = CorsApplication(app, settings.cors)
    return app if access_log is None else AccessLog(app, access_log)


class CorsApplication:
    """Tells browsers which pages may read the application's answers. Preflight requests need no key."""

    takes_writer = True

    def __init__(self, app: Application, settings: Cors) -> None:
        self._app = app
        self._rules = CORSMiddleware(
            app,
            allow_origins=settings.origins,
            allow_methods=settings.methods,
            allow_headers=settings.headers,
            expose_headers=_EXPOSED,
            max_age=settings.max_age_s,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send, writer: ClientWriter | None = None) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is None:
            await self._app(scope, receive, send, writer)
        elif scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await self._rules.preflight_response(headers)(scope, receive, send)
        else:
            await self._answer_page(origin, scope, receive, send, writer)

    async def _answer_page(
        self, origin: str, scope: Scope, receive: Receive, send: Send, writer: ClientWriter | None
    ) -> None:
        def with_rules(status: int, sent: RawHeaders) -> RawHeaders:
            headers = MutableHeaders(raw=list(sent))
            headers.update(self._rules.simple_headers)
            if not self._rules.allow_all_origins:
                headers.add_vary_header("Origin")
                if self._rules.is_allowed_origin(origin):
                    headers["access-control-allow-origin"] = origin
            return headers.raw

        async def send_with_rules(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = with_rules(message["status"], message.get("headers", ()))
            await send(message)

        hooked = None if writer is None else HookedWriter(writer, with_rules)
        await self._app(scope, receive, send_with_rules, hooked)
