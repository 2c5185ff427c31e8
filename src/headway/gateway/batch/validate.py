"""Validation of a batch's input file: one request per line, each with its own id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from headway.gateway.batch import queue
from headway.gateway.batch.files import DeletedError, find_file, read_lines
from headway.gateway.batch.objects import BatchError
from headway.gateway.batch.queue import ActiveBatch, Line
from headway.gateway.batch.store import BatchStore
from headway.gateway.errors import DECODE_ERRORS, ApiError
from headway.gateway.relay.json_body import LONG_BYTES, check

_LINES_PER_WRITE = 500
_MAX_CUSTOM_ID_CHARS = 512
_MAX_ERRORS = 100


class _BatchRequest(msgspec.Struct):
    custom_id: str
    body: msgspec.Raw
    url: str
    method: str = "POST"


_decode = msgspec.json.Decoder(_BatchRequest).decode


class LineValidator:
    """Checks the lines of one batch and collects their errors."""

    def __init__(self, batch: str, endpoint: str, max_lines: int, max_line_bytes: int) -> None:
        self.errors: list[BatchError] = []
        self.num_requests = 0
        self._batch, self._endpoint = batch, endpoint
        self._max_lines, self._max_line_bytes = max_lines, max_line_bytes
        self._custom_ids: set[str] = set()

    def read(self, number: int, raw: bytes) -> Line | None:
        """The request of a line; None for a blank or an invalid line."""
        if not raw.strip():
            return None
        self.num_requests += 1
        try:
            request = self._decode(raw)
        except ApiError as error:
            if len(self.errors) < _MAX_ERRORS:
                self.errors.append(BatchError(error.code, error.message, error.param, number))
            return None
        self._custom_ids.add(request.custom_id)
        return Line(self._batch, number, request.custom_id, bytes(request.body))

    def _decode(self, raw: bytes) -> _BatchRequest:
        if self.num_requests > self._max_lines:
            raise ApiError(400, f"a batch has at most {self._max_lines:,} requests", "too_many_lines")
        if len(raw) > self._max_line_bytes:
            raise ApiError(400, f"a line has at most {self._max_line_bytes:,} bytes", "line_too_long")
        if len(raw) > LONG_BYTES:
            check(raw)
        try:
            request = _decode(raw)
        except DECODE_ERRORS as error:
            what = f"expected a request with custom_id, url and body: {error}"
            raise ApiError(400, what, "invalid_json_line") from None
        if request.method != "POST":
            raise ApiError(400, f"{request.method!r}; expected 'POST'", "invalid_method", "method")
        if request.url != self._endpoint:
            raise ApiError(400, f"{request.url!r}; the batch is for {self._endpoint!r}", "mismatched_url", "url")
        if not 0 < len(request.custom_id) <= _MAX_CUSTOM_ID_CHARS or "\0" in request.custom_id:
            what = f"expected 1 to {_MAX_CUSTOM_ID_CHARS} characters, no zeros"
            raise ApiError(400, what, "invalid_custom_id", "custom_id")
        if request.custom_id in self._custom_ids:
            what = f"{request.custom_id!r} is another line's, too"
            raise ApiError(400, what, "duplicate_custom_id", "custom_id")
        if not bytes(request.body).lstrip().startswith(b"{"):
            raise ApiError(400, "the body must be a JSON object", "invalid_body", "body")
        return request

    @property
    def can_stop(self) -> bool:
        """Whether the result of the validation is certain, so that no further line need be read."""
        return self.num_requests > self._max_lines or len(self.errors) >= _MAX_ERRORS


async def validate(store: BatchStore, batch: ActiveBatch, max_lines: int, max_line_bytes: int) -> None:
    """Queue the lines of a new batch and start the batch, or fail it with the errors of its file."""
    await queue.delete_lines(store, batch.id)
    validator = LineValidator(batch.id, batch.endpoint, max_lines, max_line_bytes)
    file = await find_file(store, batch.owner, batch.input_file_id)
    try:
        if file is None:
            raise DeletedError
        await _queue_lines(store, validator, read_lines(store, file, max_line_bytes))
        errors = validator.errors
        if not validator.num_requests:
            errors = [BatchError("empty_file", "the file has no requests", None, None)]
    except DeletedError:
        errors = [BatchError("file_deleted", "the file was deleted during its validation", None, None)]
    if errors:
        await queue.delete_lines(store, batch.id)
        await queue.fail_batch(store, batch.id, errors)
    else:
        await queue.start_batch(store, batch.id, validator.num_requests)


async def _queue_lines(store: BatchStore, validator: LineValidator, lines: AsyncIterator[bytes]) -> None:
    number, chunk = 0, list[Line]()
    async for raw in lines:
        number += 1
        is_long = len(raw) > LONG_BYTES
        line = await asyncio.to_thread(validator.read, number, raw) if is_long else validator.read(number, raw)
        if line is not None:
            chunk.append(line)
        if validator.can_stop:
            return
        if len(chunk) == _LINES_PER_WRITE:
            await queue.add_lines(store, chunk)
            chunk = []
    if chunk:
        await queue.add_lines(store, chunk)
