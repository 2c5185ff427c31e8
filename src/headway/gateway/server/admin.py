"""Endpoints for who runs the gateway: its replicas, as they come and go."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headway.gateway.errors import ApiError
from headway.gateway.fleet.membership import LiveFleet
from headway.gateway.fleet.replica import LiveReplica
from headway.gateway.relay.writer import error_response
from headway.gateway.server.auth import check_admin
from headway.gateway.server.bodies import short
from headway.gateway.server.schema import NewRole, NewWorker

_PAUSE_S = 10.0
"""A body that stops coming for so long is given up."""
Handler = Callable[[Request, LiveFleet], Awaitable[Response]]


def routes(fleet: Callable[[], LiveFleet], admin_keys: Callable[[], tuple[str, ...]]) -> list[Route]:
    """All of them."""
    table: list[tuple[str, str, Handler]] = [
        ("GET", "/workers", _all),
        ("POST", "/workers", _add),
        ("GET", "/workers/{id}", _one),
        ("DELETE", "/workers/{id}", _remove),
        ("POST", "/workers/{id}/drain", _drain),
        ("POST", "/workers/{id}/undrain", _undrain),
        ("POST", "/workers/{id}/role", _role),
    ]

    def guarded(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                check_admin(dict(request.headers), admin_keys())
                return await handler(request, fleet())
            except ApiError as error:
                return error_response(error)

        return answer

    return [Route(path, guarded(handler), methods=[method]) for method, path, handler in table]


async def _all(request: Request, fleet: LiveFleet) -> Response:
    data = [fleet.described(replica) for replica in fleet.present()]
    return JSONResponse({"object": "list", "data": data, "failed": fleet.failed()})


async def _one(request: Request, fleet: LiveFleet) -> Response:
    return JSONResponse(fleet.described(_found(request, fleet)))


def _found(request: Request, fleet: LiveFleet) -> LiveReplica:
    id = request.path_params["id"]
    if not (id.isascii() and id.isdigit() and len(id) < 10):
        raise ApiError(404, f"there is no worker {id!r}", "not_found", "id")
    return fleet.find(int(id))


async def _add(request: Request, fleet: LiveFleet) -> Response:
    try:
        new = msgspec.json.decode(await short(request, _PAUSE_S), type=NewWorker)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"expected pool and url: {error}", "invalid_type") from None
    if not is_address(new.url):
        raise ApiError(400, f"{new.url!r}; expected http://host:port", "invalid_value", "url")
    return JSONResponse(fleet.described(fleet.add(new.pool, new.url)), 201)


async def _remove(request: Request, fleet: LiveFleet) -> Response:
    replica = _found(request, fleet)
    force = request.query_params.get("force", "false")
    if force not in ("true", "false"):
        raise ApiError(400, f"{force!r}; expected true or false", "invalid_value", "force")
    fleet.remove(replica, at_once=force == "true")
    return JSONResponse(fleet.described(replica), 202)


async def _drain(request: Request, fleet: LiveFleet) -> Response:
    return _set(request, fleet, True)


async def _undrain(request: Request, fleet: LiveFleet) -> Response:
    return _set(request, fleet, False)


async def _role(request: Request, fleet: LiveFleet) -> Response:
    try:
        role = msgspec.json.decode(await short(request, _PAUSE_S), type=NewRole).role
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"expected role: {error}", "invalid_type") from None
    replica = _found(request, fleet)
    fleet.switch(replica, role)
    return JSONResponse(fleet.described(replica))


def _set(request: Request, fleet: LiveFleet, on: bool) -> Response:
    replica = _found(request, fleet)
    fleet.drain(replica, on)
    return JSONResponse(fleet.described(replica))


def is_address(url: str) -> bool:
    """An engine can be reached at such a URL."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.username
    except ValueError:
        return False
    return bool(good) and not parts.query and not parts.fragment and url.isascii() and url.isprintable()
