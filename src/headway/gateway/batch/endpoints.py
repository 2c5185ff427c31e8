"""OpenAI's endpoints for files and batches."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import IO, Any, Literal, Protocol

import msgspec
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headway.gateway.batch import files, queue
from headway.gateway.batch.files import PART_BYTES, Writer
from headway.gateway.batch.pages import Page
from headway.gateway.batch.store import UNAVAILABLE, Store
from headway.gateway.errors import ApiError
from headway.gateway.relay.writer import error_response
from headway.gateway.server.bodies import limited, short
from headway.gateway.server.schema import BATCHED, ID, WINDOW, NewBatch
from headway.gateway.settings import Batches

_WINDOW = re.compile(WINDOW)
_ID = re.compile(ID)
_UNIT_S = {"m": 60, "h": 3600, "d": 86_400}
_FORM_BYTES = 1 << 16
"""What a form may have besides its file."""


class Work(Protocol):
    """What the endpoints act on."""

    store: Store
    settings: Batches
    wake: Callable[[], None]
    body_timeout_s: float


Who = Callable[[Request], str]
"""Whose request it is. ApiError where nobody's."""
Handler = Callable[[Request, Work, str], Awaitable[Response]]


def routes(work: Callable[[], Work | None], who: Who) -> list[Route]:
    """All of them. A file or batch of somebody else's is as good as none."""
    table: list[tuple[Literal["GET", "POST", "DELETE"], str, Handler]] = [
        ("POST", "/v1/files", _upload),
        ("GET", "/v1/files", _files),
        ("GET", "/v1/files/{id}", _file),
        ("DELETE", "/v1/files/{id}", _delete),
        ("GET", "/v1/files/{id}/content", _content),
        ("POST", "/v1/batches", _create),
        ("GET", "/v1/batches", _batches),
        ("GET", "/v1/batches/{id}", _batch),
        ("POST", "/v1/batches/{id}/cancel", _cancel),
    ]
    return [Route(path, _guarded(handler, work, who), methods=[method]) for method, path, handler in table]


def _guarded(handler: Handler, work: Callable[[], Work | None], who: Who) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            owner = who(request)
            found = work()
            if found is None:
                raise ApiError(404, "this gateway keeps no files and batches: gateway.batches", "not_found")
            return await handler(request, found, owner)
        except ApiError as error:
            return error_response(error)
        except UNAVAILABLE:
            return error_response(ApiError(503, "the database cannot be used now", "unavailable", retry_after_s=1))

    return answer


# Files.


async def _upload(request: Request, work: Work, owner: str) -> Response:
    most = work.settings.max_file_bytes
    receive = limited(request.receive, most + _FORM_BYTES, work.body_timeout_s, _too_long(most))
    try:
        async with Request(request.scope, receive).form(max_files=1, max_fields=20) as form:
            upload, purpose = _checked(form)
            if (upload.size or 0) > most:
                raise _too_long(most)
            async with work.store.begin() as connection:
                name = (upload.filename or "file").replace("\0", "")[:255]
                writer = Writer(connection, owner, name, purpose)
                while data := await upload.read(PART_BYTES):
                    await writer.write(data)
                told = await writer.end()
    except (HTTPException, MultiPartException) as error:
        what = error.detail if isinstance(error, HTTPException) else error.message
        raise ApiError(400, f"expected a form with a file: {what}", "invalid_form") from None
    return JSONResponse(told)


def _checked(form: FormData) -> tuple[UploadFile, str]:
    upload, purpose = form.get("file"), form.get("purpose")
    if not isinstance(upload, UploadFile):
        raise ApiError(
            400, "'file' is missing: a form of type multipart/form-data", "missing_required_parameter", "file"
        )
    if purpose != "batch":
        raise ApiError(400, f"files are for batches: purpose {purpose!r}; expected 'batch'", "invalid_value", "purpose")
    return upload, purpose


def _too_long(most: int) -> ApiError:
    return ApiError(413, f"the file is longer than {most:,} bytes", "file_too_long", "file")


async def _files(request: Request, work: Work, owner: str) -> Response:
    purpose = request.query_params.get("purpose")
    if purpose not in (None, *files.PURPOSES):
        said = f"{purpose!r}; expected one of {', '.join(files.PURPOSES)}"
        raise ApiError(400, said, "invalid_value", "purpose")
    return JSONResponse(await files.listed(work.store, owner, _page(request), purpose))


async def _file(request: Request, work: Work, owner: str) -> Response:
    return JSONResponse(await _found_file(request, work, owner))


async def _found_file(request: Request, work: Work, owner: str) -> dict[str, Any]:
    id = request.path_params["id"]
    found = await files.find(work.store, owner, id) if _ID.fullmatch(id) else None
    if found is None:
        raise _no_file(id)
    return found


def _no_file(id: str) -> ApiError:
    return ApiError(404, f"there is no file {id!r}", "not_found", "id")


async def _delete(request: Request, work: Work, owner: str) -> Response:
    found = await _found_file(request, work, owner)
    await files.remove(work.store, owner, found["id"])
    return JSONResponse({"id": found["id"], "object": "file", "deleted": True})


async def _content(request: Request, work: Work, owner: str) -> Response:
    found = await _found_file(request, work, owner)
    headers = {"content-length": str(found["bytes"])}
    if request.method == "HEAD":
        return Response(headers=headers, media_type="application/jsonl")
    try:
        return _Copy(await files.copied(work.store, found), headers)
    except files.DeletedError:
        raise _no_file(found["id"]) from None


class _Copy(StreamingResponse):
    """A file that is whole, whatever becomes of it while its client reads."""

    def __init__(self, copy: IO[bytes], headers: dict[str, str]) -> None:
        super().__init__(self._parts(), headers=headers, media_type="application/jsonl")
        self._copy = copy

    async def _parts(self) -> AsyncIterator[bytes]:
        while data := await asyncio.to_thread(self._copy.read, PART_BYTES):
            yield data

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._copy:
            await super().__call__(scope, receive, send)


# Batches.


async def _create(request: Request, work: Work, owner: str) -> Response:
    body = await short(request, work.body_timeout_s)
    try:
        new = msgspec.json.decode(body, type=NewBatch)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"no batch: {error}", "invalid_type") from None
    if new.endpoint not in BATCHED:
        said = f"{new.endpoint!r}; expected one of {', '.join(BATCHED)}"
        raise ApiError(400, said, "invalid_value", "endpoint")
    window_s = _window_s(new.completion_window)
    known = _ID.fullmatch(new.input_file_id)
    if not known or await files.find(work.store, owner, new.input_file_id) is None:
        raise ApiError(404, f"there is no file {new.input_file_id!r}", "not_found", "input_file_id")
    made = await queue.create(
        work.store, owner, new.input_file_id, new.endpoint, new.completion_window, window_s, new.metadata
    )
    work.wake()
    return JSONResponse(made)


def _window_s(said: str) -> int:
    if not _WINDOW.fullmatch(said):
        raise ApiError(400, f"{said!r}; expected '24h', or others up to '30d'", "invalid_value", "completion_window")
    return int(said[:-1]) * _UNIT_S[said[-1]]


async def _batches(request: Request, work: Work, owner: str) -> Response:
    return JSONResponse(await queue.listed(work.store, owner, _page(request)))


async def _batch(request: Request, work: Work, owner: str) -> Response:
    id = request.path_params["id"]
    found = await queue.find(work.store, owner, id) if _ID.fullmatch(id) else None
    if found is None:
        raise ApiError(404, f"there is no batch {id!r}", "not_found", "id")
    return JSONResponse(found)


async def _cancel(request: Request, work: Work, owner: str) -> Response:
    await _batch(request, work, owner)
    await queue.cancel(work.store, owner, request.path_params["id"])
    work.wake()
    return await _batch(request, work, owner)


def _page(request: Request) -> Page:
    said = request.query_params.get("limit", "20")
    limit = int(said) if said.isascii() and said.isdigit() and len(said) < 6 else 0
    if not 1 <= limit <= 10_000:
        raise ApiError(400, f"{said!r}; expected a number from 1 to 10000", "invalid_value", "limit")
    after = request.query_params.get("after")
    if after is not None and not _ID.fullmatch(after):
        raise ApiError(400, f"{after!r}; expected the last id of the page before", "invalid_value", "after")
    return Page(after, min(limit, 100))
