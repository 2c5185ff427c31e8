"""OpenAI's endpoints for files and batches."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import IO, Any, TypeVar

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from headway.gateway.batch import files, queue
from headway.gateway.batch.files import PART_BYTES, FileWriter
from headway.gateway.batch.objects import (
    BATCH_ENDPOINTS,
    ID_PATTERN,
    PURPOSES,
    WINDOW_PATTERN,
    BatchList,
    BatchObject,
    DeletedFile,
    FileList,
    FileObject,
    NewBatch,
    Page,
)
from headway.gateway.batch.service import BatchService
from headway.gateway.batch.store import BatchStore
from headway.gateway.database import UNAVAILABLE
from headway.gateway.errors import ApiError
from headway.gateway.gateway import Gateway
from headway.gateway.server.bodies import limited, read_json
from headway.gateway.server.routes import PAGE, Access, Endpoint, path_id, query

T = TypeVar("T")
_Handler = Callable[[Request, BatchService, str], Awaitable[Any]]
_ID, _WINDOW = re.compile(ID_PATTERN), re.compile(WINDOW_PATTERN)
_UNIT_S = {"m": 60, "h": 3600, "d": 86_400}
_FORM_BYTES = 1 << 16
"""Maximum number of bytes of a form, without its file."""
_ACCESS = Access(
    key=lambda settings: "client",
    exists=lambda settings: settings.batches is not None,
    missing="this gateway keeps no files and batches: gateway.batches",
    errors=(503,),
)


def _with_service(handler: _Handler) -> Any:
    """A handler that gets the batch service and the key's owner. Only the owner's own objects are visible to it."""

    async def handle(request: Request, gateway: Gateway) -> Any:
        assert gateway.batches is not None
        try:
            return await handler(request, gateway.batches, request.state.owner)
        except UNAVAILABLE:
            raise ApiError(503, "the database cannot be used now", "unavailable", retry_after_s=1) from None

    return handle


async def _find(
    find: Callable[[BatchStore, str, str], Awaitable[T | None]],
    service: BatchService,
    owner: str,
    id: str,
    kind: str,
    param: str = "id",
) -> T:
    """The owner's file or batch with this id. ApiError (404) if there is none."""
    value = await find(service.store, owner, id) if _ID.fullmatch(id) else None
    if value is None:
        raise _missing(kind, id, param)
    return value


def _missing(kind: str, id: str, param: str) -> ApiError:
    return ApiError(404, f"there is no {kind} {id!r}", "not_found", param)


# Files.


async def _upload(request: Request, service: BatchService, owner: str) -> FileObject:
    max_bytes = service.settings.max_file_bytes
    receive = limited(request.receive, max_bytes + _FORM_BYTES, service.body_timeout_s, partial(_too_long, max_bytes))
    try:
        async with Request(request.scope, receive).form(max_files=1, max_fields=20) as form:
            upload, purpose = form.get("file"), form.get("purpose")
            if not isinstance(upload, UploadFile):
                what = "'file' is missing: a form of type multipart/form-data"
                raise ApiError(400, what, "missing_required_parameter", "file")
            if purpose != "batch":
                what = f"files are for batches: purpose {purpose!r}; expected 'batch'"
                raise ApiError(400, what, "invalid_value", "purpose")
            if (upload.size or 0) > max_bytes:
                raise _too_long(max_bytes)
            async with service.store.begin() as connection:
                await files.require_room(connection, owner, upload.size or 0, service.settings.max_stored_bytes)
                name = (upload.filename or "file").replace("\0", "")[:255]
                writer = FileWriter(connection, owner, name, purpose)
                while data := await upload.read(PART_BYTES):
                    await writer.write(data)
                return await writer.close()
    except (HTTPException, MultiPartException) as error:
        what = error.detail if isinstance(error, HTTPException) else error.message
        raise ApiError(400, f"expected a form with a file: {what}", "invalid_form") from None


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(413, f"the file is longer than {max_bytes:,} bytes", "file_too_long", "file")


async def _list_files(request: Request, service: BatchService, owner: str) -> FileList:
    purpose = request.query_params.get("purpose")
    if purpose not in (None, *PURPOSES):
        raise ApiError(400, f"{purpose!r}; expected one of {', '.join(PURPOSES)}", "invalid_value", "purpose")
    return await files.list_files(service.store, owner, _page(request), purpose)


async def _get_file(request: Request, service: BatchService, owner: str) -> FileObject:
    return await _find(files.find_file, service, owner, request.path_params["id"], "file")


async def _delete_file(request: Request, service: BatchService, owner: str) -> DeletedFile:
    file = await _get_file(request, service, owner)
    await files.delete_file(service.store, owner, file.id)
    return DeletedFile(id=file.id, object="file", deleted=True)


async def _get_content(request: Request, service: BatchService, owner: str) -> Response:
    file = await _get_file(request, service, owner)
    headers = {"content-length": str(file.bytes)}
    if request.method == "HEAD":
        return Response(headers=headers, media_type="application/jsonl")
    try:
        return _CopyResponse(await files.copy_file(service.store, file), headers)
    except files.DeletedError:
        raise _missing("file", file.id, "id") from None


class _CopyResponse(StreamingResponse):
    """Streams a copy of a file, so that a deletion does not truncate the response."""

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


async def _create_batch(request: Request, service: BatchService, owner: str) -> BatchObject:
    new: NewBatch = await read_json(request, service.body_timeout_s, NewBatch, "no batch")
    if new.endpoint not in BATCH_ENDPOINTS:
        what = f"{new.endpoint!r}; expected one of {', '.join(BATCH_ENDPOINTS)}"
        raise ApiError(400, what, "invalid_value", "endpoint")
    window = new.completion_window
    if not _WINDOW.fullmatch(window):
        what = f"{window!r}; expected '24h', or others up to '30d'"
        raise ApiError(400, what, "invalid_value", "completion_window")
    window_s = int(window[:-1]) * _UNIT_S[window[-1]]
    file = await _find(files.find_file, service, owner, new.input_file_id, "file", "input_file_id")
    async with service.store.begin() as connection:
        await files.require_room(connection, owner, file.bytes, service.settings.max_stored_bytes)
    batch = await queue.create_batch(service.store, owner, file.id, new.endpoint, window, window_s, new.metadata)
    service.wake()
    return batch


async def _list_batches(request: Request, service: BatchService, owner: str) -> BatchList:
    return await queue.list_batches(service.store, owner, _page(request))


async def _get_batch(request: Request, service: BatchService, owner: str) -> BatchObject:
    return await _find(queue.find_batch, service, owner, request.path_params["id"], "batch")


async def _cancel_batch(request: Request, service: BatchService, owner: str) -> BatchObject:
    batch = await _get_batch(request, service, owner)
    await queue.cancel_batch(service.store, owner, batch.id)
    service.wake()
    return await _get_batch(request, service, owner)


def _page(request: Request) -> Page:
    number = request.query_params.get("limit", "20")
    limit = int(number) if number.isascii() and number.isdigit() and len(number) < 6 else 0
    if not 1 <= limit <= 10_000:
        raise ApiError(400, f"{number!r}; expected a number from 1 to 10000", "invalid_value", "limit")
    after = request.query_params.get("after")
    if after is not None and not _ID.fullmatch(after):
        raise ApiError(400, f"{after!r}; expected the last id of the page before", "invalid_value", "after")
    return Page(after, min(limit, 100))


_UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
}
_ONE = (path_id({"type": "string"}),)
_PURPOSE = query("purpose", {"enum": list(PURPOSES)})


def _endpoint(method: str, path: str, summary: str, handler: _Handler, returns: type, **options: Any) -> Endpoint:
    return Endpoint(method, path, summary, _with_service(handler), returns, _ACCESS, **options)


ENDPOINTS = [
    _endpoint("POST", "/v1/files", "Upload a file", _upload, FileObject, form=_UPLOAD, errors=(429,)),
    _endpoint("GET", "/v1/files", "The newest files", _list_files, FileList, parameters=(*PAGE, _PURPOSE)),
    _endpoint("GET", "/v1/files/{id}", "A file", _get_file, FileObject, parameters=_ONE),
    _endpoint("DELETE", "/v1/files/{id}", "Delete a file", _delete_file, DeletedFile, parameters=_ONE),
    _endpoint("GET", "/v1/files/{id}/content", "The content of a file", _get_content, str, parameters=_ONE,
              media_types=("application/jsonl",)),
    _endpoint("POST", "/v1/batches", "Create a batch", _create_batch, BatchObject, accepts=NewBatch,
              errors=(404, 429)),
    _endpoint("GET", "/v1/batches", "The newest batches", _list_batches, BatchList, parameters=PAGE),
    _endpoint("GET", "/v1/batches/{id}", "A batch", _get_batch, BatchObject, parameters=_ONE),
    _endpoint("POST", "/v1/batches/{id}/cancel", "Cancel a batch: no more of its requests are started", _cancel_batch,
              BatchObject, parameters=_ONE),
]  # fmt: skip
