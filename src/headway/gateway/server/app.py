"""The HTTP surface: OpenAI's endpoints, as a Starlette application; streams are pure ASGI."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Match, Route
from starlette.types import Message, Receive, Scope, Send

from headway import __version__
from headway.core.errors import HeadwayError
from headway.gateway.clock import Clock
from headway.gateway.errors import ApiError
from headway.gateway.gateway import Gateway
from headway.gateway.relay.relay import Relay
from headway.gateway.relay.request import PATHS, ClientRequest, read_request
from headway.gateway.relay.writer import AsgiWriter, ClientReply, ResponseWriter, answer, error_response
from headway.gateway.server import admin, dashboard, openapi
from headway.gateway.server.auth import Caller, Keys
from headway.gateway.server.bodies import left
from headway.gateway.server.http_protocol import DIRECT
from headway.gateway.settings import Settings

log = logging.getLogger("headway.gateway")
_BROKEN = ApiError(500, "the gateway failed", "internal_error")
"""A mistake of Headway's own, which the log has."""
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Front(Protocol):
    """Who takes requests of clients."""

    @property
    def settings(self) -> Settings: ...
    @property
    def keys(self) -> Keys: ...
    @property
    def clock(self) -> Clock: ...

    async def begin(self, ask: ClientRequest, caller: Caller, reply: ResponseWriter, request_id: str) -> Relay:
        """A request comes in. ApiError where it cannot be taken."""

    def end(self, ask: ClientRequest, exchange: Relay) -> None:
        """It is over."""


class Completions:
    """What is answered by engines."""

    def __init__(self, gateway: Callable[[], Front]) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it; a server that knows a shorter way back to the client says so by an extension."""
        # It is taken out, as scope and reply hold each other.
        reply: ClientReply = scope.get("extensions", {}).pop(DIRECT, None) or AsgiWriter(receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else os.urandom(16).hex()
        try:
            await self._serve(scope["path"], headers, request_id, receive, reply)
        except ApiError as error:
            await answer(reply, error, request_id.encode())
        except HeadwayError as error:
            log.error("%s", error)
            await answer(reply, ApiError(500, "a policy failed", "policy_error"), request_id.encode())
        except Exception:
            if not reply.has_begun:
                await answer(reply, _BROKEN, request_id.encode())
            raise

    async def _serve(
        self, path: str, headers: dict[str, str], request_id: str, receive: Receive, reply: ClientReply
    ) -> None:
        """ApiError where it is not taken."""
        gateway = self._gateway()
        caller = gateway.keys.caller(headers)
        raw = await _body(reply, receive, headers, gateway.settings)
        if raw is None:
            return
        read_s = gateway.clock.now
        asked = read_request(path, raw, headers)
        asked.read_s = read_s
        asked.tier = max(asked.tier, caller.tier)
        exchange = await gateway.begin(asked, caller, reply, request_id)
        reply.watch(exchange.gone)
        try:
            await exchange.run()
        finally:
            reply.close()
            gateway.end(asked, exchange)


async def _body(reply: ClientReply, receive: Receive, headers: dict[str, str], settings: Settings) -> bytes | None:
    """The request's body; None if the client left. ApiError where it is too long, or too slow."""
    limit, length = settings.max_body_bytes, headers.get("content-length", "")
    if length.isdigit() and (len(length) > 18 or int(length) > limit):
        raise _too_long(limit)
    raw = reply.take_body()
    if raw is None:
        return await _in_time(receive, settings)
    if len(raw) > limit:
        raise _too_long(limit)
    return raw


async def _in_time(receive: Receive, settings: Settings) -> bytes | None:
    """A body that is still to come."""
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            return await _parts(receive, settings.max_body_bytes)
    except TimeoutError:
        what = f"the body was not there within {settings.body_timeout_s:g} s"
        raise ApiError(408, what, "body_timeout") from None


async def _parts(receive: Receive, limit: int) -> bytes | None:
    parts, size = [], 0
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_long(limit)
        parts.append(part)
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_long(limit: int) -> ApiError:
    return ApiError(413, f"the body is longer than {limit:,} bytes", "body_too_long")


class _Application(Starlette):
    """What engines answer is not looked for among the routes."""

    completions: Completions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in PATHS:
            await self.completions(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def application(make: Callable[[], Gateway], stopped: Callable[[Gateway], None]) -> Starlette:
    """The application; `make` is called in its event loop, and `stopped` when all has ended."""
    made: list[Gateway] = []

    def gateway() -> Gateway:
        return made[0]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        made.append(make())
        gateway().start()
        yield
        await gateway().stop()
        stopped(gateway())

    async def models(request: Request) -> Response:
        data = [{"id": model, "object": "model", "created": 0, "owned_by": "headway"} for model in gateway().names()]
        return JSONResponse({"object": "list", "data": data})

    async def health(request: Request) -> Response:
        num_up, num = gateway().num_up, len(gateway().fleet.present())
        ok = num_up > 0 and not gateway().is_closing
        return JSONResponse(
            {"status": "ok" if ok else "unavailable", "up": num_up, "replicas": num}, 200 if ok else 503
        )

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(gateway().metrics_page(), media_type="text/plain; version=0.0.4")

    async def version(request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def described(request: Request) -> Response:
        return JSONResponse(openapi.document(gateway().settings))

    def owner(request: Request) -> str:
        return gateway().keys.caller(dict(request.headers)).owner

    completions = Completions(gateway)
    routes = [
        *(Route(path, completions, methods=["POST"]) for path in PATHS),  # for what is said of other methods
        *_batch_routes(gateway, owner),
        *admin.routes(lambda: gateway().fleet, lambda: gateway().settings.admin_keys),
        *dashboard.routes(gateway),
        Route("/v1/models", models),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/version", version),
        Route("/openapi.json", described),
    ]
    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {HTTPException: _failed}
    handlers |= {ClientDisconnect: left, Exception: _broken}
    made_of = _Application(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    made_of.completions = completions
    return made_of


def _batch_routes(gateway: Callable[[], Gateway], owner: Callable[[Request], str]) -> list[Route]:
    """None, where what they need is not installed: no fleet file that asks for them has been accepted then."""
    try:
        from headway.gateway.batch import endpoints
    except ModuleNotFoundError:
        return []
    return endpoints.routes(lambda: gateway().office, owner)


async def _failed(request: Request, error: Exception) -> Response:
    """Paths and methods that there are not, in OpenAI's words."""
    assert isinstance(error, HTTPException)
    what = {404: f"there is no {request.url.path}", 405: f"{request.method} is not for {request.url.path}"}
    told = ApiError(error.status_code, what.get(error.status_code, error.detail), "not_found")
    headers = dict(error.headers or {})
    if error.status_code == 405:  # what raised it knew of one route only
        headers["Allow"] = ", ".join(sorted(_methods(request)))
    return JSONResponse(told.body(), error.status_code, headers=headers)


def _methods(request: Request) -> set[str]:
    """All that this path is for."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return {method for route in routes for method in route.methods or ()}


async def _broken(request: Request, error: Exception) -> Response:
    return error_response(_BROKEN)
