"""The file and batch objects of OpenAI's API, as clients send and receive them."""

from __future__ import annotations

from typing import Annotated, Generic, Literal, Self, TypeVar

from msgspec import Meta, Struct

from headway.gateway.relay.request import CHAT, COMPLETIONS, EMBEDDINGS

BATCH_ENDPOINTS = (CHAT, COMPLETIONS, EMBEDDINGS)
ID_PATTERN = "^[A-Za-z0-9_-]{1,100}$"
WINDOW_PATTERN = "^([1-9][0-9]{0,3}m|([1-9][0-9]?|[1-6][0-9]{2}|7[01][0-9]|720)h|([1-9]|[12][0-9]|30)d)$"
"""Completion windows: minutes, hours or days, up to 30 days."""
PURPOSES = ("batch", "batch_output")
"""Purposes of files that clients upload, and of files that the gateway writes."""

_Count = Annotated[int, Meta(ge=0)]
_Id = Annotated[str, Meta(pattern=ID_PATTERN)]


class FileObject(Struct, forbid_unknown_fields=True):
    """A file in OpenAI's API."""

    id: _Id
    object: Literal["file"]
    bytes: _Count
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class DeletedFile(Struct, forbid_unknown_fields=True):
    """A file that was deleted."""

    id: str
    object: Literal["file"]
    deleted: bool


class NewBatch(Struct):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: Annotated[str, Meta(extra_json_schema={"enum": list(BATCH_ENDPOINTS)})]
    completion_window: Annotated[str, Meta(extra_json_schema={"pattern": WINDOW_PATTERN})]
    """`24h`, or another time up to `30d`."""
    metadata: dict[str, str] | None = None


class RequestCounts(Struct, forbid_unknown_fields=True):
    """Counts of a batch's requests."""

    total: _Count
    completed: _Count
    failed: _Count


class BatchError(Struct, forbid_unknown_fields=True):
    """An error in a line of a batch's input file."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrorList(Struct, forbid_unknown_fields=True):
    """The errors in an input file that made its batch fail."""

    object: Literal["list"]
    data: list[BatchError]


class BatchObject(Struct, forbid_unknown_fields=True):
    """A batch; times are in seconds since 1970."""

    id: _Id
    object: Literal["batch"]
    endpoint: str
    status: Literal["validating", "in_progress", "completed", "failed", "expired", "cancelling", "cancelled"]
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    completion_window: str
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None
    errors: BatchErrorList | None


T = TypeVar("T", FileObject, BatchObject)


class ObjectPage(Struct, Generic[T], forbid_unknown_fields=True):
    """One page of a list, in the format of OpenAI's API."""

    object: Literal["list"]
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, data: list[T], has_more: bool) -> Self:
        first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
        return cls("list", data, first_id, last_id, has_more)


class FileList(ObjectPage[FileObject]):
    """A page of the files of a key, as `GET /v1/files` answers."""


class BatchList(ObjectPage[BatchObject]):
    """A page of the batches of a key, as `GET /v1/batches` answers."""


class Page(Struct, frozen=True):
    """The part of a list that a client asks for."""

    after: str | None
    """The id of the last object that the client already has."""
    limit: int
