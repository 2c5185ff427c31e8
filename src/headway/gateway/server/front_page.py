"""The welcome at `GET /`, and the API's description as a page at `GET /docs`, without scripts or files of other
sites."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from html import escape
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from headway import __version__
from headway.gateway.gateway import Gateway
from headway.gateway.server.routes import Schema
from headway.gateway.server.schema import Welcome

_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "x-frame-options": "DENY",
    "cache-control": "no-cache",
}
_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
summary { cursor: pointer; padding: .4rem 0; overflow-wrap: anywhere }
details { border-bottom: 1px solid #8884 } details > div { padding: 0 0 .8rem 1.2rem }
b { display: inline-block; min-width: 4.5rem; font-family: ui-monospace, monospace }
code, pre { font-family: ui-monospace, monospace; font-size: .92em }
pre { overflow-x: auto; background: #8881; padding: .6rem }
table { border-collapse: collapse } td { padding: .1rem .8rem .1rem 0; vertical-align: top }
"""


async def welcome(request: Request, gateway: Gateway) -> Welcome:
    settings = gateway.settings
    return Welcome(
        about="Headway: an OpenAI-compatible gateway in front of a fleet of LLM serving engines",
        version=__version__,
        docs="/docs",
        openapi="/openapi.json",
        models="/v1/models",
        health="/health",
        dashboard="/dashboard" if settings.has_dashboard else None,
    )


async def docs(description: bytes) -> Response:
    """The page of an OpenAPI document."""
    text = await asyncio.to_thread(page, msgspec.json.decode(description))
    return HTMLResponse(text, headers=_HEADERS)


def page(document: Schema) -> str:
    """An OpenAPI document as a page."""
    info = document["info"]
    operations = "\n".join(
        _operation(method, path, operation, document)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    title = f"{escape(info['title'])} {escape(info['version'])}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}: API</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head>\n<body><h1>{title}</h1><p>{escape(info['description'])}"
        ' The same as <a href="/openapi.json">OpenAPI</a>.</p>\n'
        f"{operations}</body></html>\n"
    )


def _operation(method: str, path: str, operation: Schema, document: Schema) -> str:
    key = "<p>Needs a key: <code>Authorization: Bearer KEY</code></p>" if "security" in operation else ""
    parameters = "".join(
        f"<tr><td><code>{escape(each['name'])}</code><td>{escape(each['in'])}<td>{escape(each.get('description', ''))}"
        for each in operation.get("parameters", ())
    )
    bodies = operation.get("requestBody", {}).get("content", {})
    body = "".join(
        f"<p>Body, <code>{escape(kind)}</code>:</p>{_fields(content['schema'], document)}"
        for kind, content in bodies.items()
    )
    answers = "".join(
        f"<tr><td><code>{escape(status)}</code><td>{escape(answer['description'])}"
        for status, answer in operation["responses"].items()
    )
    return (
        f"<details><summary><b>{method.upper()}</b><code>{escape(path)}</code> {escape(operation['summary'])}</summary>"
        f"<div>{key}<table>{parameters}</table>{body}<table>{answers}</table></div></details>"
    )


def _fields(schema: Schema, document: Schema) -> str:
    """The fields of an object. For another kind of body: its description."""
    name = schema.get("$ref", "").rpartition("/")[2]
    found = document["components"]["schemas"].get(name, schema)
    fields = found.get("properties")
    if not fields:
        return f"<pre>{escape(json.dumps(found))}</pre>"
    required = found.get("required", ())
    rows = (
        f"<tr><td><code>{escape(field)}</code><td>{escape(_kind(kind))}<td>{'required' * (field in required)}"
        for field, kind in fields.items()
    )
    return f"<table>{''.join(rows)}</table>"


def _kind(schema: Any) -> str:
    return " or ".join(dict.fromkeys(_kinds(schema)))


def _kinds(schema: Any) -> Iterator[str]:
    for part in schema.get("anyOf", (schema,)):
        kind = part.get("$ref", "").rpartition("/")[2] or part.get("type", "any")
        yield kind if isinstance(kind, str) else " or ".join(kind)
