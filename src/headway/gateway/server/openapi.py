"""The OpenAPI description of the HTTP API, generated from the endpoint table and the types of the bodies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from headway import __version__
from headway.gateway.relay.request import MAX_SLO_MS, MAX_TIER, MIN_SLO_MS
from headway.gateway.server import schema
from headway.gateway.server.routes import JSON, SSE, Endpoint, Schema, header
from headway.gateway.settings import Settings

_REF = "#/components/schemas/"
_CLASS_NAME = re.compile(f'"({_REF})?({"|".join(schema.PUBLISHED_NAMES)})"')
"""A pattern: a class name in a key, a title or a reference, for classes whose component has another name."""
_OBJECT: Schema = {"type": "object"}
_ERRORS = {
    400: "The request is invalid",
    401: "A key is needed, or this key has expired",
    403: "Without api_keys: the page that sent the request is another host's",
    404: "Not found",
    408: "The request did not come in time",
    409: "In conflict with the present state",
    413: "The body is too long",
    415: "The content encoding is unknown; without api_keys: the content type is text/plain",
    421: "Without api_keys: the request is for another host",
    429: "Too many requests: a key's limit, or a full queue",
    431: "The headers are too long",
    500: "A policy failed",
    502: "The engine failed, and no other engine could continue",
    503: "No replica can take the request now, or the gateway is shutting down",
    504: "The request took too long",
}
_RETRY_AFTER: Schema = {"description": "Seconds", "schema": {"type": "string", "pattern": "^[0-9]+$"}}
_RESPONSE_HEADERS = {
    "x-request-id": "The request's id; the client's own, if it sent one",
    "x-headway-replica": "The replica that answered",
    **{
        f"x-ratelimit-{what}-{of}": f"{text}, where the key has a limit of {of}"
        for what, text in (
            ("limit", "The limit per minute"),
            ("remaining", "What is left"),
            ("reset", "Time to the full limit"),
        )
        for of in ("requests", "tokens")
    },
}
_SLO: Schema = {"type": "number", "minimum": MIN_SLO_MS, "maximum": MAX_SLO_MS}

COMPLETION_ERRORS = (404, 429, 500, 502, 503, 504)
COMPLETION_HEADERS = tuple(_RESPONSE_HEADERS)
COMPLETION_PARAMETERS = (
    header("x-headway-tier", "0 is the most urgent", {"type": "integer", "minimum": 0, "maximum": MAX_TIER}),
    header("x-llm-d-slo-ttft-ms", "Until the first token", _SLO),
    header("x-llm-d-slo-tpot-ms", "Between tokens", _SLO),
    header("x-session-id", "Requests of one session may go to one replica", {"type": "string"}),
    header("x-headway-region", "The client's region", {"type": "string"}),
    header("x-headway-explain", "1: response headers explain the scheduling", {"type": "string"}),
    header("x-request-id", "Comes back in the response", {"type": "string"}),
    header("idempotency-key", "A retry with the same key and body continues a broken stream", {"type": "string"}),
)


def document(endpoints: Sequence[Endpoint], settings: Settings) -> Schema:
    """The description of a gateway with these settings."""
    endpoints = [each for each in endpoints if each.access.exists(settings)]
    types = [each for one in endpoints for each in (one.returns, one.accepts) if isinstance(each, type)]
    types = list(dict.fromkeys([*types, schema.ErrorBody]))
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF + "{name}")
    by_type = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.published_path, {})[endpoint.method.lower()] = _operation(endpoint, by_type, settings)
    bearer = {"type": "http", "scheme": "bearer"}
    key_header = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    described = {
        "openapi": "3.1.0",
        "info": {"title": "Headway", "version": __version__, "description": "LLM engines behind one address."},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"bearer": bearer, "header": key_header}},
    }
    text = _CLASS_NAME.sub(_published_name, msgspec.json.encode(described).decode())
    published: Schema = msgspec.json.decode(text)
    return published


def _published_name(match: re.Match[str]) -> str:
    return f'"{match[1] or ""}{schema.PUBLISHED_NAMES[match[2]]}"'


def _operation(endpoint: Endpoint, by_type: dict[type, Schema], settings: Settings) -> Schema:
    content = {kind: {"schema": _schema(endpoint.returns, kind, by_type)} for kind in endpoint.media_types}
    responses = {endpoint.status: {"description": "The answer", "content": content}}
    if endpoint.headers:
        responses[endpoint.status]["headers"] = {
            name: {"description": _RESPONSE_HEADERS[name], "schema": {"type": "string"}} for name in endpoint.headers
        }
    responses |= {status: {"description": _ERRORS[status], "content": content} for status in endpoint.also}
    errors, key = endpoint.all_errors, endpoint.access.key(settings)
    operation: Schema = {"summary": endpoint.summary, "operationId": _operation_id(endpoint), "responses": {}}
    if key == "admin" or (key == "client" and settings.needs_key):
        operation["security"] = [{"bearer": []}, {"header": []}]
        errors.add(401)
    error = {JSON: {"schema": by_type[schema.ErrorBody]}}
    for status in sorted(errors - responses.keys()):
        responses[status] = {"description": _ERRORS[status], "content": error}
        if status in (429, 503):
            responses[status]["headers"] = {"retry-after": _RETRY_AFTER}
    operation["responses"] = {str(status): response for status, response in responses.items()}
    if endpoint.handler is None:
        operation["responses"]["4XX"] = {"description": "The engine refused the request", "content": error}
    if endpoint.parameters:
        operation["parameters"] = list(endpoint.parameters)
    if endpoint.accepts is not None:
        body = {JSON: {"schema": _schema(endpoint.accepts, JSON, by_type)}}
        operation["requestBody"] = {"required": True, "content": body}
    elif endpoint.form is not None:
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": endpoint.form}}}
    return operation


def _schema(type_: Any, media_type: str, by_type: dict[type, Schema]) -> Schema:
    if media_type == JSON:
        return by_type[type_] if isinstance(type_, type) else _OBJECT
    return {} if media_type == SSE else {"type": "string"}


def _operation_id(endpoint: Endpoint) -> str:
    words = endpoint.published_path.replace("{", "").replace("}", "").replace(".", "/").replace("-", "/").split("/")
    return "_".join([endpoint.method.lower(), *filter(None, words)])
