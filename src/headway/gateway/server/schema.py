"""What goes over the wire, for who reads /openapi.json: bodies, as far as Headway reads or writes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from headway.control.decisions import Decision
from headway.core.fleet import Role
from headway.gateway.relay.request import CHAT, COMPLETIONS, EMBEDDINGS, MOST_TIER, MOST_TOKENS
from headway.gateway.upstream import sse

BATCHED = (CHAT, COMPLETIONS, EMBEDDINGS)
"""What batches may ask for."""
ID = "^[A-Za-z0-9_-]{1,100}$"
WINDOW = "^([1-9][0-9]{0,3}m|([1-9][0-9]?|[1-6][0-9]{2}|7[01][0-9]|720)h|([1-9]|[12][0-9]|30)d)$"
"""30 days at most."""

Tokens = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
_Object = dict[str, Any]
_Some = Annotated[list[Any], Meta(min_length=1)]
_PROMPTS = [
    {"type": "string"},
    *({"type": "array", "minItems": 1, "items": {"type": kind}} for kind in ("string", "integer", "array")),
]
"""A text, texts, token ids, or several prompts' token ids."""
_Count = Annotated[int, Meta(ge=0)]
_Share = Annotated[float, Meta(ge=0)]


# Errors.


class Error(Struct):
    """What went wrong, in OpenAI's words; an engine's own error may say more."""

    message: str
    type: str | None = None
    param: Any = None
    code: Any = None


class ErrorBody(Struct):
    """In place of an answer."""

    error: Error


# What engines answer. All else in the bodies goes to them as it is.


class Request(Struct, kw_only=True):
    """What every endpoint that engines answer has in common."""

    model: str
    """One of `GET /v1/models`, the catalog's or the engine's own name."""
    stream: bool | None = None
    n: int | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    max_output_tokens: Tokens | None = None
    stream_options: _Object | None = None
    priority: Annotated[int, Meta(ge=0, le=MOST_TIER)] | None = None
    """The tier; 0 is the most urgent."""
    service_tier: Any = None
    """`flex` is tier 1."""
    prompt_cache_key: str | None = None
    """Names a session."""


class ChatRequest(Request, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[_Object], Meta(min_length=1)]


class CompletionRequest(Request, kw_only=True):
    """POST /v1/completions."""

    prompt: Annotated[Any, Meta(extra_json_schema={"anyOf": _PROMPTS})]


class InputRequest(Request, kw_only=True):
    """POST /v1/embeddings and POST /v1/responses."""

    input: str | _Some


class MessagesRequest(Request, kw_only=True):
    """POST /v1/messages."""

    messages: Annotated[list[_Object], Meta(min_length=1)]
    system: Any = None


Completion = sse.Chunk
"""An answer, whole, as far as Headway reads it."""


# Files and batches.


class File(Struct, forbid_unknown_fields=True):
    """A file."""

    id: Annotated[str, Meta(pattern=ID)]
    object: Literal["file"]
    bytes: _Count
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class Deleted(Struct, forbid_unknown_fields=True):
    """A file that is no more."""

    id: str
    object: Literal["file"]
    deleted: bool


class Files(Struct, forbid_unknown_fields=True):
    """A page of files."""

    object: Literal["list"]
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class NewBatch(Struct):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: Annotated[str, Meta(extra_json_schema={"enum": list(BATCHED)})]
    completion_window: Annotated[str, Meta(extra_json_schema={"pattern": WINDOW})]
    """`24h`, or others up to `30d`."""
    metadata: dict[str, str] | None = None


class RequestCounts(Struct, forbid_unknown_fields=True):
    """Of a batch."""

    total: _Count
    completed: _Count
    failed: _Count


class BatchError(Struct, forbid_unknown_fields=True):
    """What is wrong with a line of a batch."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(Struct, forbid_unknown_fields=True):
    """Why a batch failed."""

    object: Literal["list"]
    data: list[BatchError]


class Batch(Struct, forbid_unknown_fields=True):
    """A batch; times are seconds since 1970."""

    id: Annotated[str, Meta(pattern=ID)]
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
    errors: BatchErrors | None


class Batches(Struct, forbid_unknown_fields=True):
    """A page of batches."""

    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


# For who runs the gateway.


class Model(Struct, forbid_unknown_fields=True):
    """One that may be asked."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(Struct, forbid_unknown_fields=True):
    """All of them."""

    object: Literal["list"]
    data: list[Model]


class Health(Struct, forbid_unknown_fields=True):
    """Whether a replica is up."""

    status: Literal["ok", "unavailable"]
    up: _Count
    replicas: _Count


class Version(Struct, forbid_unknown_fields=True):
    """Headway's."""

    version: str


class Engine(Struct, forbid_unknown_fields=True):
    """What an engine says of itself; null: it does not."""

    running: _Count | None
    waiting: _Count | None
    kv_share: float | None


class NewWorker(Struct, forbid_unknown_fields=True):
    """POST /workers."""

    pool: str
    url: Annotated[str, Meta(extra_json_schema={"pattern": "^https?://"})]


class NewRole(Struct, forbid_unknown_fields=True):
    """POST /workers/ID/role."""

    role: Role


class Worker(Struct, forbid_unknown_fields=True):
    """A replica as it is now."""

    id: _Count
    name: str
    pool: str
    model: str
    url: str
    status: Literal["up", "starting", "down", "draining", "leaving"]
    combo: str | None
    role: Role
    in_flight: _Count
    empty: bool
    engine: Engine


class Failed(Struct, forbid_unknown_fields=True):
    """Replicas of a pool that are wanted and do not start."""

    pool: str
    replicas: _Count
    why: str
    """What became of the last start."""


class Workers(Struct, forbid_unknown_fields=True):
    """All of them."""

    object: Literal["list"]
    data: list[Worker]
    failed: list[Failed]


class Shown(Worker):
    """A replica, as the dashboard shows it."""

    gpu: str
    region: str
    most_in_flight: int
    kv_share: _Share
    by_tier: dict[str, _Count]
    age_s: float | None


class Queue(Struct, forbid_unknown_fields=True):
    """Who waits in the gateway for one model, in one tier."""

    model: str
    tier: _Count
    held: _Count
    oldest_s: float


class Quantiles(Struct, forbid_unknown_fields=True):
    """In seconds; null: nothing was observed."""

    p50: float | None
    p95: float | None
    p99: float | None


class Tier(Struct, forbid_unknown_fields=True):
    """One tier over the last minutes."""

    tier: _Count
    num: _Count
    failed: _Count
    ttft_s: Quantiles
    tpot_s: Quantiles
    e2e_s: Quantiles


class Rates(Struct, forbid_unknown_fields=True):
    """Over the last half minute."""

    requests_per_s: _Share
    failed_per_s: _Share
    tokens_per_s: _Share


class Series(Struct, forbid_unknown_fields=True):
    """The last minutes, slot by slot."""

    slot_s: float
    requests: list[_Count]
    tokens: list[_Count]
    failed: list[_Count]
    tiers: dict[str, dict[str, list[float | None]]]


class Dashboard(Struct, forbid_unknown_fields=True):
    """All that the dashboard shows."""

    version: str
    time_s: float
    uptime_s: float
    closing: bool
    replicas: list[Shown]
    queues: list[Queue]
    in_flight: _Count
    held: _Count
    up: _Count
    batch_requests_open: _Count
    window_s: float
    rates: Rates
    tiers: list[Tier]
    series: Series
    decisions: list[Decision] = field(default_factory=list)
