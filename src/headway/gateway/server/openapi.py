"""What the gateway answers, for machines: `GET /openapi.json`. Schemas are made from the structs that are read."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from headway import __version__
from headway.gateway.relay.request import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, MOST_TIER, RESPONSES, SLO_MS
from headway.gateway.server import dashboard
from headway.gateway.server import schema as shapes
from headway.gateway.settings import Settings

_REF = "#/components/schemas/{name}"
_JSON, _SSE, _TEXT = "application/json", "text/event-stream", "text/plain"
Schema = dict[str, Any]
_OBJECT: Schema = {"type": "object"}
_ERRORS = {
    400: "The request makes no sense",
    401: "A key is needed, or this one has expired",
    404: "There is no such thing",
    408: "The request was not there in time",
    409: "It is so already, or cannot be now",
    413: "The body is too long",
    429: "Too much at a time: a key's limit, or a full queue",
    431: "The headers are too long",
    500: "A policy failed",
    502: "The engine failed, and no other could go on",
    503: "No replica can take the request now, or the gateway is shutting down",
    504: "The request took too long",
}
_ANY = (400, 408, 431)
"""What is no HTTP is refused at every path."""
_ANSWERED = (*_ANY, 404, 413, 429, 500, 502, 503, 504)
_SLO: Schema = {"type": "number", "minimum": SLO_MS[0], "maximum": SLO_MS[1]}
_UPLOAD: Schema = {
    "type": "object", "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
}  # fmt: skip
_EXPLAINED = {
    "x-request-id": "Names the request; the client's own, if it sent one",
    "x-headway-replica": "Who answered",
}


class Operation(Struct, frozen=True, kw_only=True):
    """One method of a path."""

    method: str
    path: str
    summary: str
    answer: Any = None
    """The type of its answer."""
    kinds: tuple[str, ...] = (_JSON,)
    """Of the answer, by media type."""
    status: int = 200
    asks: Any = None
    """The type of its body."""
    form: Schema | None = None
    errors: tuple[int, ...] = _ANY
    also: tuple[int, ...] = ()
    """Statuses that come with the answer, too."""
    key: str = ""
    """Whose key it needs: a client's, or an admin's."""
    parameters: tuple[Schema, ...] = ()
    headers: tuple[str, ...] = ()
    """Of the answer."""


def document(settings: Settings) -> Schema:
    """OpenAPI's description of a gateway with these settings."""
    operations = _operations(settings)
    types = [each for made in operations for each in (made.answer, made.asks) if isinstance(each, type)]
    types = list(dict.fromkeys([*types, shapes.ErrorBody]))
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    known = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method.lower()] = _described(each, known, settings)
    bearer = {"type": "http", "scheme": "bearer"}
    header = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headway", "version": __version__, "description": "Engines of LLMs behind one address."},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"bearer": bearer, "header": header}},
    }


def _described(made: Operation, known: dict[type, Schema], settings: Settings) -> Schema:
    """An operation as OpenAPI has it."""
    kinds = {kind: {"schema": _schema(made.answer, kind, known)} for kind in made.kinds}
    answers = {made.status: {"description": "The answer", "content": kinds}}
    if made.headers:
        answers[made.status]["headers"] = {
            name: {"description": _EXPLAINED[name], "schema": {"type": "string"}} for name in made.headers
        }
    answers |= {status: {"description": _ERRORS[status], "content": kinds} for status in made.also}
    errors = set(made.errors)
    told: Schema = {"summary": made.summary, "operationId": _name(made), "responses": answers}
    if made.key == "admin" or (made.key == "client" and settings.api_keys):
        told["security"] = [{"bearer": []}, {"header": []}]
        errors.add(401)
    error = {_JSON: {"schema": known[shapes.ErrorBody]}}
    for status in sorted(errors):
        if status not in answers:
            answers[status] = {"description": _ERRORS[status], "content": error}
            if status in (429, 503):
                retry = {"description": "Seconds", "schema": {"type": "string", "pattern": "^[0-9]+$"}}
                answers[status]["headers"] = {"retry-after": retry}
    told["responses"] = {str(status): answer for status, answer in answers.items()}
    if made.path in (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, MESSAGES):
        told["responses"]["4XX"] = {"description": "The engine's own refusal", "content": error}
    if made.parameters:
        told["parameters"] = list(made.parameters)
    if made.asks is not None:
        told["requestBody"] = {"required": True, "content": {_JSON: {"schema": _schema(made.asks, _JSON, known)}}}
    elif made.form is not None:
        told["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": made.form}}}
    return told


def _schema(what: Any, kind: str, known: dict[type, Schema]) -> Schema:
    if isinstance(what, type) and kind == _JSON:
        return known[what]
    return _OBJECT if kind == _JSON else {} if kind == _SSE else {"type": "string"}


def _name(made: Operation) -> str:
    words = made.path.replace("{", "").replace("}", "").replace(".", "/").replace("-", "/").split("/")
    return "_".join([made.method.lower(), *filter(None, words)])


def _operations(settings: Settings) -> list[Operation]:
    """What there is."""
    made = _completions() + _open()
    if settings.batches is not None:
        made += _files() + _batches()
    if settings.admin_keys:
        made += _workers()
    if dashboard.is_there(settings):
        made += _dashboard("admin" if settings.dashboard == "key" else "")
    return made


def _completions() -> list[Operation]:
    """What engines answer."""
    table: list[tuple[str, str, Any, Any]] = [
        (CHAT, "Answer a chat", shapes.ChatRequest, shapes.Completion),
        (COMPLETIONS, "Go on with a text", shapes.CompletionRequest, shapes.Completion),
        (EMBEDDINGS, "Embed texts", shapes.InputRequest, dict),
        (RESPONSES, "Answer, by OpenAI's newer API", shapes.InputRequest, dict),
        (MESSAGES, "Answer, by Anthropic's API", shapes.MessagesRequest, dict),
    ]
    parameters = (
        _header("x-headway-tier", "0: the most urgent", {"type": "integer", "minimum": 0, "maximum": MOST_TIER}),
        _header("x-llm-d-slo-ttft-ms", "Until the first token", _SLO),
        _header("x-llm-d-slo-tpot-ms", "Between tokens", _SLO),
        _header("x-session-id", "Requests of one session may go to one replica", {"type": "string"}),
        _header("x-headway-region", "Where the client is", {"type": "string"}),
        _header("x-headway-explain", "1: headers tell what became of the request", {"type": "string"}),
        _header("x-request-id", "Comes back in the answer", {"type": "string"}),
    )
    return [
        Operation(
            method="POST", path=path, summary=summary, asks=asks, answer=answer, kinds=(_JSON, _SSE),
            errors=_ANSWERED, key="client", parameters=parameters, headers=tuple(_EXPLAINED),
        )
        for path, summary, asks, answer in table
    ]  # fmt: skip


def _open() -> list[Operation]:
    """For everybody."""
    return [
        Operation(method="GET", path="/v1/models", summary="What can be asked", answer=shapes.Models),
        Operation(method="GET", path="/health", summary="Whether a replica is up", answer=shapes.Health, also=(503,)),
        Operation(method="GET", path="/metrics", summary="For Prometheus", answer=str, kinds=(_TEXT,)),
        Operation(method="GET", path="/version", summary="Headway's version", answer=shapes.Version),
        Operation(method="GET", path="/openapi.json", summary="This document", answer=dict),
    ]


def _files() -> list[Operation]:
    """What batches are made of."""
    errors, one = (*_ANY, 404, 503), (_path({"type": "string"}),)
    purpose = _query("purpose", {"enum": ["batch", "batch_output"]})
    return [
        Operation(
            method="POST", path="/v1/files", summary="Upload a file", form=_UPLOAD, answer=shapes.File,
            errors=(*_ANY, 413, 503), key="client",
        ),
        Operation(
            method="GET", path="/v1/files", summary="The newest files", answer=shapes.Files, errors=(*_ANY, 503),
            key="client", parameters=(*_PAGE, purpose),
        ),
        Operation(
            method="GET", path="/v1/files/{id}", summary="A file", answer=shapes.File, errors=errors, key="client",
            parameters=one,
        ),
        Operation(
            method="DELETE", path="/v1/files/{id}", summary="Delete a file", answer=shapes.Deleted, errors=errors,
            key="client", parameters=one,
        ),
        Operation(
            method="GET", path="/v1/files/{id}/content", summary="What is in a file", answer=str,
            kinds=("application/jsonl",), errors=errors, key="client", parameters=one,
        ),
    ]  # fmt: skip


def _batches() -> list[Operation]:
    """Work that nobody waits for."""
    errors, one = (*_ANY, 404, 503), (_path({"type": "string"}),)
    return [
        Operation(
            method="POST", path="/v1/batches", summary="Begin a batch", asks=shapes.NewBatch, answer=shapes.Batch,
            errors=(*errors, 413), key="client",
        ),
        Operation(
            method="GET", path="/v1/batches", summary="The newest batches", answer=shapes.Batches, errors=(*_ANY, 503),
            key="client", parameters=_PAGE,
        ),
        Operation(
            method="GET", path="/v1/batches/{id}", summary="A batch", answer=shapes.Batch, errors=errors, key="client",
            parameters=one,
        ),
        Operation(
            method="POST", path="/v1/batches/{id}/cancel", summary="Begin no more of it", answer=shapes.Batch,
            errors=errors, key="client", parameters=one,
        ),
    ]  # fmt: skip


def _workers() -> list[Operation]:
    """Replicas that come and go."""
    errors, one = (*_ANY, 404), (_path({"type": "integer", "minimum": 0}),)
    force = _query("force", {"enum": ["true", "false"]})
    return [
        Operation(method="GET", path="/workers", summary="All replicas", answer=shapes.Workers, key="admin"),
        Operation(
            method="POST", path="/workers", summary="Add a replica to a pool", asks=shapes.NewWorker,
            answer=shapes.Worker, status=201, errors=(*_ANY, 409, 413), key="admin",
        ),
        Operation(
            method="GET", path="/workers/{id}", summary="A replica", answer=shapes.Worker, errors=errors, key="admin",
            parameters=one,
        ),
        Operation(
            method="DELETE", path="/workers/{id}", summary="Take a replica away when it is empty, or at once",
            answer=shapes.Worker, status=202, errors=errors, key="admin", parameters=(*one, force),
        ),
        *(
            Operation(
                method="POST", path=f"/workers/{{id}}/{verb}", summary=summary, answer=shapes.Worker,
                errors=(*errors, 409), key="admin", parameters=one,
            )
            for verb, summary in (("drain", "Give it nothing more"), ("undrain", "Use it again"))
        ),
        Operation(
            method="POST", path="/workers/{id}/role", summary="Say what a replica of a combo is for",
            asks=shapes.NewRole, answer=shapes.Worker, errors=(*errors, 409, 413), key="admin", parameters=one,
        ),
    ]  # fmt: skip


def _dashboard(key: str) -> list[Operation]:
    return [
        Operation(
            method="GET", path="/dashboard", summary="A page for people", answer=str, kinds=("text/html",)
        ),
        Operation(
            method="GET", path="/dashboard/data", summary="What the page shows", answer=shapes.Dashboard, key=key
        ),
    ]  # fmt: skip


def _header(name: str, what: str, schema: Schema) -> Schema:
    return {"name": name, "in": "header", "description": what, "schema": schema}


def _query(name: str, schema: Schema) -> Schema:
    return {"name": name, "in": "query", "schema": schema}


def _path(schema: Schema) -> Schema:
    return {"name": "id", "in": "path", "required": True, "schema": schema}


_PAGE = (
    _query("limit", {"type": "integer", "minimum": 1, "maximum": 10_000}),
    _query("after", {"type": "string", "pattern": shapes.ID}),
)
