"""Endpoints of the HTTP API. One entry determines the route, the access check and the part of /openapi.json."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headway.gateway.auth.keys import check_admin
from headway.gateway.batch.objects import ID_PATTERN
from headway.gateway.errors import ApiError
from headway.gateway.gateway import Gateway
from headway.gateway.relay.writer import error_response
from headway.gateway.settings import Settings

JSON, SSE, TEXT = "application/json", "text/event-stream", "text/plain"
OPENMETRICS = "application/openmetrics-text"
HTTP_ERRORS = (400, 403, 408, 415, 421, 431)
"""Any path refuses malformed HTTP, and requests of foreign hosts and pages, with one of these statuses."""
Schema = dict[str, Any]
T = TypeVar("T")


class Access(Struct, frozen=True):
    """Which gateways have an endpoint, and which key it requires."""

    key: Callable[[Settings], Literal["", "client", "admin"]] = lambda settings: ""
    exists: Callable[[Settings], bool] = lambda settings: True
    missing: str = ""
    """The error message of gateways that do not have the endpoint."""
    errors: tuple[int, ...] = ()
    """Errors of all endpoints with this access."""

    def check(self, request: Request, gateway: Gateway) -> None:
        """Set `request.state.owner` to the owner of the key. Raises ApiError if access is denied."""
        key, headers = self.key(gateway.settings), dict(request.headers)
        request.state.owner = gateway.keys.authenticate(headers).owner if key == "client" else ""
        if not self.exists(gateway.settings):
            raise ApiError(404, self.missing, "not_found")
        if key == "admin":
            check_admin(headers, gateway.settings.admin_keys)


OPEN = Access()
CLIENT = Access(key=lambda settings: "client")

Handler = Callable[[Request, Gateway], Awaitable[Any]]
"""Returns a Response, or the value for the response's JSON. Raises ApiError."""


class Endpoint(Struct, frozen=True):
    """One method of one path."""

    method: str
    path: str
    summary: str
    handler: Handler | None
    """The handler. None: engines answer through a relay."""
    returns: Any
    """The type of the response's body."""
    access: Access = OPEN
    accepts: Any = None
    """The type of the request's JSON body."""
    form: Schema | None = None
    """The schema of the request's body as a form."""
    media_types: tuple[str, ...] = (JSON,)
    status: int = 200
    also: tuple[int, ...] = ()
    """Further statuses whose body has the same type."""
    errors: tuple[int, ...] = ()
    """Statuses of errors, in addition to those that `all_errors` derives."""
    parameters: tuple[Schema, ...] = ()
    headers: tuple[str, ...] = ()
    """Headers of the response, for the description."""

    @property
    def published_path(self) -> str:
        """The path in /openapi.json, without Starlette's `:path`."""
        return self.path.replace(":path}", "}")

    @property
    def all_errors(self) -> set[int]:
        """Statuses of all errors, including an unknown id in the path and a body that is too long."""
        has_body = self.accepts is not None or self.form is not None
        derived = [404] * ("{id}" in self.published_path) + [413] * has_body
        return {*HTTP_ERRORS, *self.access.errors, *self.errors, *derived}

    def route(self, gateway: Callable[[], Gateway]) -> Route:
        """The route of an endpoint that has a handler. `gateway` is called for each request."""
        handler = self.handler
        assert handler is not None

        async def respond(request: Request) -> Response:
            try:
                self.access.check(request, gateway())
                answer = await handler(request, gateway())
            except ApiError as error:
                return error_response(error)
            return answer if isinstance(answer, Response) else json_response(answer, self.status)

        return Route(self.path, respond, methods=[self.method])


async def collected(items: Iterable[T], per_turn: int) -> list[T]:
    """All items, of which at most `per_turn` are produced in one turn of the event loop."""
    found: list[T] = []
    for item in items:
        found.append(item)
        if len(found) % per_turn == 0:
            await asyncio.sleep(0)
    return found


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, JSON)


def header(name: str, description: str, schema: Schema) -> Schema:
    return {"name": name, "in": "header", "description": description, "schema": schema}


def query(name: str, schema: Schema) -> Schema:
    return {"name": name, "in": "query", "schema": schema}


def path_id(schema: Schema) -> Schema:
    return {"name": "id", "in": "path", "required": True, "schema": schema}


PAGE = (
    query("limit", {"type": "integer", "minimum": 1, "maximum": 10_000}),
    query("after", {"type": "string", "pattern": ID_PATTERN}),
)
"""The parameters of endpoints that return a list in pages."""
