"""The HTTP API as a Starlette application. Requests for engines bypass Starlette, because plain ASGI streams faster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from difflib import get_close_matches

import msgspec
from msgspec import UNSET, structs
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from headway import __version__
from headway.core.errors import unknown
from headway.gateway.errors import ApiError, internal_error
from headway.gateway.gateway import Gateway
from headway.gateway.relay.request import (
    CHAT,
    CLASSIFY,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    EMBEDDINGS,
    FORMS,
    IMAGES,
    MESSAGES,
    PATHS,
    POOLING,
    RERANK,
    RESPONSES,
    SCORE,
    SPEECH,
    TOKENIZE,
)
from headway.gateway.relay.writer import ClientWriter, error_response
from headway.gateway.server import admin, dashboard, front_page, responses, schema
from headway.gateway.server.completions import CompletionsApp
from headway.gateway.server.openapi import COMPLETION_ERRORS, COMPLETION_HEADERS, COMPLETION_PARAMETERS, document
from headway.gateway.server.probes import ProbeServer, Status
from headway.gateway.server.routes import (
    CLIENT,
    JSON,
    OPENMETRICS,
    SSE,
    TEXT,
    Endpoint,
    collected,
    json_response,
    path_id,
)


class Application(Starlette):
    """The gateway's ASGI application: its endpoints and their drain."""

    takes_writer = True
    """Whether `__call__` takes a `ClientWriter` as a fourth argument."""
    completions: CompletionsApp
    gateway: Callable[[], Gateway]
    """The gateway, once the application has started."""
    relays = True
    """Whether the application has the engines' endpoints."""
    description: bytes | None = None
    """The OpenAPI description; None until it was requested."""

    async def drain(self) -> None:
        """Refuse new requests, and wait until the running requests end or are cut off."""
        self.gateway().refuse_requests()
        await self.completions.drain()

    async def __call__(self, scope: Scope, receive: Receive, send: Send, writer: ClientWriter | None = None) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in PATHS and self.relays:
            await self.completions(scope, receive, send, writer)
        else:
            await super().__call__(scope, receive, send)


def application(
    make: Callable[[], Gateway],
    stopped: Callable[[Gateway], None],
    beside: Callable[[Gateway], AbstractAsyncContextManager[object]] | None = None,
) -> Application:
    """Create the application. `make` is called in its event loop at the start, and `stopped` at the end.

    `beside` serves the engines' endpoints in its own way from the gateway's start to its end. The application then has
    none of these endpoints.
    """
    gateway: Gateway | None = None

    def running() -> Gateway:
        assert gateway is not None
        return gateway

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        nonlocal gateway
        gateway = completions.gateway = make()
        if beside is None:
            gateway.telemetry.metrics.num_responses = completions.num_responses
        gateway.start()
        port = gateway.settings.probe_port
        probes = None if port is None else ProbeServer(port, lambda: _probed(running()), gateway.settings.hang_s)
        async with nullcontext() if beside is None else beside(gateway):
            yield
        await gateway.stop()
        if probes is not None:
            probes.close()
        stopped(gateway)

    completions = CompletionsApp()
    routes = [
        Route(each.path, completions, methods=[each.method]) if each.handler is None else each.route(running)
        for each in endpoints()
        if each.handler is not None or beside is None
    ]
    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
        HTTPException: _http_error,
        ClientDisconnect: _disconnected,
        Exception: _internal_error,
    }
    app = Application(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    app.router.redirect_slashes = False  # a redirect would contain the host name that the client sent
    app.completions, app.gateway, app.relays = completions, running, beside is None
    return app


# Public endpoints.


async def _models(request: Request, gateway: Gateway) -> schema.ModelList:
    return schema.ModelList(object="list", data=[_described(name, gateway) for name in gateway.models.names()])


async def _model(request: Request, gateway: Gateway) -> schema.ModelObject:
    name = request.path_params["id"]
    if not gateway.models.serves(name):
        raise ApiError(404, str(unknown("model", name, gateway.models.names())), "model_not_found", "id")
    return _described(name, gateway)


def _described(name: str, gateway: Gateway) -> schema.ModelObject:
    parent = gateway.models.parent_of(name) or UNSET
    return schema.ModelObject(id=name, object="model", created=0, owned_by="headway", parent=parent)


def _health_of(gateway: Gateway) -> tuple[bool, schema.HealthStatus]:
    num_up, num = gateway.num_up, len(gateway.fleet.present())
    is_ok = num_up > 0 and not gateway.admission.is_closing
    return is_ok, schema.HealthStatus(status="ok" if is_ok else "unavailable", up=num_up, replicas=num)


def _probed(gateway: Gateway) -> Status:
    is_ok, status = _health_of(gateway)
    return is_ok, msgspec.to_builtins(status)


async def _health(request: Request, gateway: Gateway) -> Response:
    (is_ok, status), peers = _health_of(gateway), gateway.peers
    if peers is not None:
        status.peers, status.peer_store = len(peers.loads.peers), "up" if peers.is_up else "away"
    return json_response(status, 200 if is_ok else 503)


async def _metrics(request: Request, gateway: Gateway) -> Response:
    is_open = OPENMETRICS in request.headers.get("accept", "")
    lines = await collected(gateway.metrics.lines(is_open), 100)
    media_type = f"{OPENMETRICS}; version=1.0.0; charset=utf-8" if is_open else f"{TEXT}; version=0.0.4"
    return PlainTextResponse("\n".join(lines) + "\n", media_type=media_type, headers={"vary": "accept"})


async def _version(request: Request, gateway: Gateway) -> schema.VersionInfo:
    return schema.VersionInfo(version=__version__)


async def _openapi(request: Request, gateway: Gateway) -> Response:
    return Response(await _description(request.app, gateway), media_type=JSON)


async def _docs(request: Request, gateway: Gateway) -> Response:
    return await front_page.docs(await _description(request.app, gateway))


async def _description(app: Application, gateway: Gateway) -> bytes:
    if app.description is None:  # made in a thread, because the first description takes a third of a second
        made = await asyncio.to_thread(document, endpoints(), gateway.settings)
        app.description = msgspec.json.encode(made)
    return app.description


def _completion(path: str, summary: str, accepts: type, returns: type) -> Endpoint:
    return Endpoint(
        "POST",
        path,
        summary,
        None,
        returns,
        CLIENT,
        accepts=accepts,
        media_types=(JSON, SSE),
        errors=COMPLETION_ERRORS,
        parameters=COMPLETION_PARAMETERS,
        headers=COMPLETION_HEADERS,
    )


_ENDPOINTS = [
    _completion(CHAT, "Answer a chat", schema.ChatRequest, schema.Completion),
    _completion(COMPLETIONS, "Complete a text", schema.CompletionRequest, schema.Completion),
    _completion(EMBEDDINGS, "Embed texts", schema.InputRequest, dict),
    _completion(RESPONSES, "Answer, by OpenAI's Responses API", schema.InputRequest, dict),
    _completion(MESSAGES, "Answer, by Anthropic's Messages API", schema.MessagesRequest, dict),
    *(_completion(path, "Order documents by relevance", schema.RerankRequest, dict) for path in RERANK),
    *(_completion(path, "Score pairs of texts", schema.ScoreRequest, dict) for path in SCORE),
    _completion(POOLING, "Hidden states of texts or of a chat", schema.InputRequest, dict),
    *(_completion(path, "Classify texts", schema.InputRequest, dict) for path in CLASSIFY),
    _completion(COUNT_TOKENS, "Count the tokens of messages", schema.MessagesRequest, dict),
    _completion(TOKENIZE, "Count and list a prompt's tokens", schema.TokenizeRequest, dict),
    _completion(DETOKENIZE, "The text of tokens", schema.DetokenizeRequest, dict),
    structs.replace(_completion(SPEECH, "Speak a text", schema.SpeechRequest, str), media_types=("audio/*",)),
    _completion(IMAGES, "Draw images", schema.ImageRequest, dict),
    *(
        structs.replace(
            _completion(path, "The text of an audio file", dict, dict), accepts=None, form=schema.AUDIO_FORM
        )
        for path in FORMS
    ),
    Endpoint("GET", "/v1/models", "The models", _models, schema.ModelList),
    Endpoint(
        "GET",
        "/v1/models/{id:path}",
        "One model",
        _model,
        schema.ModelObject,
        parameters=(path_id({"type": "string"}),),
    ),
    Endpoint("GET", "/health", "Whether a replica is up", _health, schema.HealthStatus, also=(503,)),
    Endpoint("GET", "/metrics", "For Prometheus", _metrics, str, media_types=(TEXT, OPENMETRICS)),
    Endpoint("GET", "/version", "Headway's version", _version, schema.VersionInfo),
    Endpoint("GET", "/openapi.json", "This document", _openapi, dict),
    Endpoint("GET", "/", "What this is", front_page.welcome, schema.Welcome),
    Endpoint("GET", "/docs", "This API as a page", _docs, str, media_types=("text/html",)),
]


def endpoints() -> list[Endpoint]:
    """All endpoints. The batch endpoints are missing if their libraries are not installed."""
    try:
        from headway.gateway.server import batches
    except ModuleNotFoundError:
        return [*_ENDPOINTS, *responses.ENDPOINTS, *admin.ENDPOINTS, *dashboard.ENDPOINTS]
    return [*_ENDPOINTS, *responses.ENDPOINTS, *batches.ENDPOINTS, *admin.ENDPOINTS, *dashboard.ENDPOINTS]


# Errors outside of handlers.

_MAX_HINTED_PATH = 100
"""Longest path for which the nearest known path is looked up."""


async def _http_error(request: Request, error: Exception) -> Response:
    """OpenAI's error object for an unknown path or method."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = {
        404: f"there is no {path}{_nearest(path, request.app.routes)}",
        405: f"{request.method} is not for {path}",
    }
    body = ApiError(error.status_code, message.get(error.status_code, error.detail), "not_found").body()
    headers = dict(error.headers or {})
    if error.status_code == 405:  # Starlette lists the methods of only one of the path's routes
        routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
        headers["Allow"] = ", ".join(sorted({method for route in routes for method in route.methods or ()}))
    return JSONResponse(body, error.status_code, headers=headers)


def _nearest(path: str, routes: Sequence[Route]) -> str:
    """The nearest known path, because clients omit `/v1` or repeat it."""
    if len(path) > _MAX_HINTED_PATH:
        return ""
    near = get_close_matches(path, [route.path for route in routes], n=1, cutoff=0.8)
    return f"; did you mean {near[0]}?" if near else ""


async def _disconnected(request: Request, error: Exception) -> Response:
    """No response: the client left before its request was complete."""
    return Response(status_code=499)


async def _internal_error(request: Request, error: Exception) -> Response:
    return error_response(internal_error())
