"""Endpoints for who runs the gateway: its replicas, as they come and go."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headway.gateway.errors import ApiError
from headway.gateway.fleet import LiveFleet
from headway.gateway.keys import check_admin
from headway.gateway.send import error_response

Handler = Callable[[Request, LiveFleet], Awaitable[Response]]


class _New(Struct, forbid_unknown_fields=True):
    """POST /workers."""

    pool: str
    url: str


def routes(fleet: Callable[[], LiveFleet], admin_keys: Callable[[], tuple[str, ...]]) -> list[Route]:
    """All of them."""
    table: list[tuple[str, str, Handler]] = [
        ("GET", "/workers", _all),
        ("POST", "/workers", _add),
        ("GET", "/workers/{id:int}", _one),
        ("DELETE", "/workers/{id:int}", _remove),
        ("POST", "/workers/{id:int}/drain", _drain),
        ("POST", "/workers/{id:int}/undrain", _undrain),
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
    return JSONResponse({"object": "list", "data": data})


async def _one(request: Request, fleet: LiveFleet) -> Response:
    return JSONResponse(fleet.described(fleet.find(request.path_params["id"])))


async def _add(request: Request, fleet: LiveFleet) -> Response:
    try:
        new = msgspec.json.decode(await request.body(), type=_New)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ApiError(400, f"expected pool and url: {error}", "invalid_type") from None
    if not is_address(new.url):
        raise ApiError(400, f"{new.url!r}; expected http://host:port", "invalid_value", "url")
    return JSONResponse(fleet.described(fleet.add(new.pool, new.url)), 201)


async def _remove(request: Request, fleet: LiveFleet) -> Response:
    replica = fleet.find(request.path_params["id"])
    fleet.remove(replica, at_once=request.query_params.get("force") == "true")
    return JSONResponse(fleet.described(replica), 202)


async def _drain(request: Request, fleet: LiveFleet) -> Response:
    return _set(request, fleet, True)


async def _undrain(request: Request, fleet: LiveFleet) -> Response:
    return _set(request, fleet, False)


def _set(request: Request, fleet: LiveFleet, on: bool) -> Response:
    replica = fleet.find(request.path_params["id"])
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
