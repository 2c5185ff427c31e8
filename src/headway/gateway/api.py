"""The HTTP surface: OpenAI's endpoints, as a Starlette application; streams are pure ASGI."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from headway import __version__
from headway.core.errors import HeadwayError
from headway.gateway.ask import CHAT, COMPLETIONS, ask
from headway.gateway.errors import ApiError
from headway.gateway.exchange import Exchange, answer
from headway.gateway.gateway import Gateway

log = logging.getLogger("headway.gateway")
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Completions:
    """POST /v1/chat/completions and /v1/completions."""

    def __init__(self, gateway: Callable[[], Gateway]) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        try:
            _check_key(headers, self._gateway().settings.api_keys)
            raw = await _body(receive, headers, self._gateway().settings.max_body_bytes)
            if raw is None:
                return
            asked = ask(scope["path"], raw, headers)
            exchange = self._gateway().exchange(asked, send, request_id)
        except ApiError as error:
            await answer(send, error, request_id.encode())
            return
        except HeadwayError as error:
            log.error("%s", error)
            await answer(send, ApiError(500, "a policy failed", "policy_error"), request_id.encode())
            return
        watcher = asyncio.create_task(_watch(receive, exchange))
        try:
            await exchange.run()
        finally:
            watcher.cancel()
        self._gateway().learn(asked, exchange)


def _check_key(headers: dict[str, str], known: Sequence[str]) -> None:
    """ApiError for a client without one of the keys. A key that the gateway knows is not the engines' business."""
    if not known:
        return
    scheme, _, key = headers.pop("authorization", "").partition(" ")
    digest = hashlib.sha256(key.encode("latin-1")).hexdigest()
    # All are compared, each in constant time: how long it takes says nothing about them.
    if not sum(hmac.compare_digest(digest, each) for each in known) or scheme.lower() != "bearer":
        raise ApiError(401, "an API key is needed: Authorization: Bearer KEY", "invalid_api_key")


async def _watch(receive: Receive, exchange: Exchange) -> None:
    """Until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    exchange.gone()


async def _body(receive: Receive, headers: dict[str, str], limit: int) -> bytes | None:
    """The request's body; None if the client left. ApiError where it is too long."""
    too_long = ApiError(413, f"the body is longer than {limit:,} bytes", "body_too_long")
    length = headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise too_long
    parts, size = [], 0
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise too_long
        parts.append(part)
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


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
        names = gateway().plan.names
        data = [{"id": model, "object": "model", "created": 0, "owned_by": "headway"} for model in names]
        return JSONResponse({"object": "list", "data": data})

    async def health(request: Request) -> Response:
        num_up, num = gateway().num_up, len(gateway().replicas)
        ok = num_up > 0 and not gateway().is_closing
        return JSONResponse(
            {"status": "ok" if ok else "unavailable", "up": num_up, "replicas": num}, 200 if ok else 503
        )

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(gateway().metrics(), media_type="text/plain; version=0.0.4")

    async def version(request: Request) -> Response:
        return JSONResponse({"version": __version__})

    completions = Completions(gateway)
    routes = [
        Route(CHAT, completions, methods=["POST"]),
        Route(COMPLETIONS, completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/version", version),
    ]
    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {HTTPException: _failed}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


async def _failed(request: Request, error: Exception) -> Response:
    """Paths and methods that there are not, in OpenAI's words."""
    assert isinstance(error, HTTPException)
    what = {404: f"there is no {request.url.path}", 405: f"{request.method} is not for {request.url.path}"}
    told = ApiError(error.status_code, what.get(error.status_code, error.detail), "not_found")
    return JSONResponse(told.body(), error.status_code, headers=error.headers)
