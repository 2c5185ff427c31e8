"""Is a file a batch? One request a line, each with a name of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec

from headway.gateway.batch import files, queue
from headway.gateway.batch.queue import Line
from headway.gateway.batch.store import Store

_CHUNK = 500
MAX_ID_CHARS = 512
_MOST_ERRORS = 100
"""That a batch's client is told of."""


class _Request(msgspec.Struct):
    custom_id: str
    body: msgspec.Raw
    url: str
    method: str = "POST"


_decode = msgspec.json.Decoder(_Request).decode


class Checked:
    """What a file's lines come to."""

    def __init__(self, batch: str, endpoint: str, max_lines: int, max_line_bytes: int) -> None:
        self.errors: list[dict[str, Any]] = []
        self.num = 0
        """Requests."""
        self._batch, self._endpoint = batch, endpoint
        self._max_lines, self._max_line_bytes = max_lines, max_line_bytes
        self._seen: set[str] = set()

    def line(self, number: int, raw: bytes) -> Iterator[Line]:
        """The request of a line; nothing for a blank line, or one with a mistake."""
        if not raw.strip():
            return
        self.num += 1
        if self.num > self._max_lines:
            self._wrong(number, "too_many_lines", f"a batch has at most {self._max_lines:,} requests", None)
        elif len(raw) > self._max_line_bytes:
            self._wrong(number, "line_too_long", f"a line has at most {self._max_line_bytes:,} bytes", None)
        else:
            yield from self._request(number, raw)

    def _request(self, number: int, raw: bytes) -> Iterator[Line]:
        try:
            asked = _decode(raw)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            self._wrong(number, "invalid_json_line", f"expected a request with custom_id, url and body: {error}", None)
            return
        if asked.method != "POST":
            self._wrong(number, "invalid_method", f"{asked.method!r}; expected 'POST'", "method")
        elif asked.url != self._endpoint:
            self._wrong(number, "mismatched_url", f"{asked.url!r}; the batch is for {self._endpoint!r}", "url")
        elif not 0 < len(asked.custom_id) <= MAX_ID_CHARS or "\0" in asked.custom_id:
            self._wrong(number, "invalid_custom_id", f"expected 1 to {MAX_ID_CHARS} characters, no zeros", "custom_id")
        elif asked.custom_id in self._seen:
            self._wrong(number, "duplicate_custom_id", f"{asked.custom_id!r} is another line's, too", "custom_id")
        elif not bytes(asked.body).lstrip().startswith(b"{"):
            self._wrong(number, "invalid_body", "the body must be a JSON object", "body")
        else:
            self._seen.add(asked.custom_id)
            yield Line(self._batch, number, asked.custom_id, bytes(asked.body))

    def _wrong(self, number: int, code: str, message: str, param: str | None) -> None:
        if len(self.errors) < _MOST_ERRORS:
            self.errors.append({"code": code, "message": message, "param": param, "line": number})

    @property
    def is_hopeless(self) -> bool:
        """There is no need to read on."""
        return self.num > self._max_lines or len(self.errors) >= _MOST_ERRORS


async def validate(store: Store, batch: dict[str, Any], max_lines: int, max_line_bytes: int) -> None:
    """Put the lines of a new batch into the queue, or say what is wrong with them."""
    id = batch["id"]
    await queue.empty(store, id)
    checked = Checked(id, batch["endpoint"], max_lines, max_line_bytes)
    file = await files.find(store, batch["owner"], batch["input_file_id"])
    try:
        if file is None:
            raise files.DeletedError
        await _take_in(store, checked, files.lines(store, file, max_line_bytes))
    except files.DeletedError:
        checked.errors = [_error("file_deleted", "the file was deleted before it had been read")]
    else:
        if not checked.num:
            checked.errors.append(_error("empty_file", "the file has no requests"))
    if checked.errors:
        await queue.empty(store, id)
        await queue.reject(store, id, checked.errors)
    else:
        await queue.begin(store, id, checked.num)


async def _take_in(store: Store, checked: Checked, lines: AsyncIterator[bytes]) -> None:
    """All lines that are requests, as far as there is any use in it."""
    number, chunk = 0, list[Line]()
    async for raw in lines:
        number += 1
        chunk.extend(checked.line(number, raw))
        if checked.is_hopeless:
            return
        if len(chunk) == _CHUNK:
            await queue.add(store, chunk)
            chunk = []
    if chunk:
        await queue.add(store, chunk)


def _error(code: str, message: str) -> dict[str, Any]:
    return {"code": code, "message": message, "param": None, "line": None}
