"""Stored responses: each is read, cancelled and deleted at the engine that generated it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from headway.gateway.errors import ApiError
from headway.gateway.gateway import Gateway
from headway.gateway.server.routes import CLIENT, Endpoint, path_id
from headway.gateway.upstream.client import Connection
from headway.gateway.upstream.engine import EngineEndpoint
from headway.gateway.upstream.errors import EngineError, client_error, openai_error
from headway.gateway.upstream.stored_responses import PATH, is_id

_MAX_BYTES = 256 << 20


async def _forwarded(request: Request, gateway: Gateway) -> Response:
    id = request.path_params["id"]
    replica = await gateway.response_holder(id, request.state.owner) if is_id(id) else None
    if replica is None:
        raise ApiError(404, f"no engine has a response {id[:80]!r}", "not_found", "id")
    path = PATH + request.url.path.removeprefix(PATH)
    query = f"?{request.url.query}" if request.url.query else ""
    key = "" if gateway.settings.needs_key else request.headers.get("authorization", "")
    headers = f"Authorization: {key}\r\n" if key else ""
    try:
        connection = await replica.client.request(request.method, path + query, headers)
    except EngineError as error:
        raise client_error(replica.name, error) from None
    content_type = connection.headers.get("content-type", "application/json")
    if connection.status == 200 and "event-stream" in content_type:
        return StreamingResponse(_parts(replica, connection), 200, media_type=content_type)
    try:
        data = await connection.read(_MAX_BYTES)
    except EngineError as error:
        raise client_error(replica.name, error) from None
    finally:
        replica.client.release(connection)
    if connection.status >= 400:
        return Response(openai_error(connection.status, data), connection.status, media_type="application/json")
    return Response(data, connection.status, media_type=content_type)


async def _parts(replica: EngineEndpoint, connection: Connection) -> AsyncIterator[bytes]:
    try:
        while part := await connection.read_part():
            yield part
    finally:
        replica.client.release(connection)


def _endpoint(method: str, path: str, summary: str) -> Endpoint:
    parameters: tuple[dict[str, Any], ...] = (path_id({"type": "string"}),)
    return Endpoint(method, path, summary, _forwarded, dict, CLIENT, errors=(401, 404, 502, 503), parameters=parameters)


ENDPOINTS = [
    _endpoint("GET", f"{PATH}/{{id}}", "A response that an engine keeps"),
    _endpoint("DELETE", f"{PATH}/{{id}}", "Have its engine forget a response"),
    _endpoint("POST", f"{PATH}/{{id}}/cancel", "Cancel a response that is being made"),
    _endpoint("GET", f"{PATH}/{{id}}/input_items", "What a response answers"),
]
