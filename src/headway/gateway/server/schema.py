"""The bodies of the HTTP API: the fields that Headway reads of requests for engines, and Headway's own bodies."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from headway.control.decisions import Decision
from headway.core.fleet import Role
from headway.gateway.relay.request import MAX_NAME_CHARS, MAX_TIER
from headway.gateway.scheduling.shadows import ShadowedDecisions, ShadowPlacements
from headway.gateway.telemetry.autopilot import AutopilotState
from headway.gateway.telemetry.drift import PredictionRatio
from headway.gateway.telemetry.reloads import Reload
from headway.gateway.telemetry.rolling_stats import (
    Cost,
    Num,
    RecentRates,
    SloCounts,
    SlotSeries,
    TenantStats,
    TierStats,
)
from headway.gateway.telemetry.slowest import SlowRequest
from headway.gateway.upstream.chunks import Chunk

# Errors.


class Error(Struct):
    """OpenAI's error object; an engine's own error may have further fields."""

    message: str
    type: str | None = None
    param: Any = None
    code: Any = None


class ErrorBody(Struct):
    """The body of an error response."""

    error: Error


# Requests for engines. Other fields go to the engine unchanged.


class EngineRequest(Struct, kw_only=True):
    """The fields that the endpoints share."""

    model: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None
    """A model of `GET /v1/models`, or the catalog's or the engine's own name for it. Required if there are several
    models."""
    stream: bool | None = None
    n: int | None = None
    max_tokens: Any = None
    """A whole number. Other values are left to the engine. The same holds for the next two fields."""
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    stream_options: Any = None
    priority: Annotated[int, Meta(ge=0, le=MAX_TIER)] | None = None
    """The tier; 0 is the most urgent."""
    service_tier: Any = None
    """`flex` means tier 1, and the request may wait until its deadline."""
    prompt_cache_key: Any = None
    """The id of a session."""


class ChatRequest(EngineRequest, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Any = None


class CompletionRequest(EngineRequest, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: Any = None
    """A text, several texts, token ids, or the token ids of several prompts."""


class InputRequest(EngineRequest, kw_only=True):
    """The body of POST /v1/embeddings, /v1/responses, /pooling and /classify."""

    input: Any = None
    messages: Any = None
    previous_response_id: str | None = None
    """The id of the previous response, in /v1/responses. The request goes to the engine that generated that
    response."""


class RerankRequest(EngineRequest, kw_only=True):
    """The body of POST /v1/rerank."""

    query: Any = None
    documents: Any = None


class SpeechRequest(EngineRequest, kw_only=True):
    """The body of POST /v1/audio/speech."""

    input: Any = None


class ImageRequest(EngineRequest, kw_only=True):
    """The body of POST /v1/images/generations."""

    prompt: Any = None


AUDIO_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["model", "file"],
    "properties": {
        "model": {"type": "string", "minLength": 1},
        "file": {"type": "string", "format": "binary"},
        "prompt": {"type": "string"},
        "stream": {"type": "boolean"},
    },
}
"""The form of POST /v1/audio/transcriptions and translations."""


class ScoreRequest(EngineRequest, kw_only=True):
    """The body of POST /v1/score."""

    text_1: Any = None
    text_2: Any = None


class TokenizeRequest(EngineRequest, kw_only=True):
    """The body of POST /tokenize."""

    prompt: Any = None
    messages: Any = None


class DetokenizeRequest(EngineRequest, kw_only=True):
    """The body of POST /detokenize."""

    tokens: Any = None


class MessagesRequest(EngineRequest, kw_only=True):
    """The body of POST /v1/messages and /v1/messages/count_tokens."""

    messages: Any = None
    system: Any = None


Completion = Chunk


# Models, health and version.


class ModelObject(Struct, forbid_unknown_fields=True):
    """A model that requests may name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | UnsetType = UNSET
    """The model of a LoRA adapter."""


class ModelList(Struct, forbid_unknown_fields=True):
    """All models that requests may name."""

    object: Literal["list"]
    data: list[ModelObject]


class HealthStatus(Struct, forbid_unknown_fields=True):
    """Whether a replica is up."""

    status: Literal["ok", "unavailable"]
    up: Num
    replicas: Num
    peers: Num | UnsetType = UNSET
    """Other gateways of this fleet, if the fleet may have several."""
    peer_store: Literal["up", "away"] | UnsetType = UNSET
    """Whether the store that the gateways share can be used. While it is away, each gateway uses only its own
    counts."""


class Welcome(Struct, forbid_unknown_fields=True):
    """The service at this address, and the paths that a newcomer looks for."""

    about: str
    version: str
    docs: str
    openapi: str
    models: str
    health: str
    dashboard: str | None
    """Path of the dashboard; null if this gateway has none."""


class VersionInfo(Struct, forbid_unknown_fields=True):
    """The answer of GET /version."""

    version: str


# Replicas, for administrators.


class NewWorker(Struct, forbid_unknown_fields=True):
    """The body of POST /workers."""

    pool: str
    url: Annotated[str, Meta(extra_json_schema={"pattern": "^https?://"})]


class NewRole(Struct, forbid_unknown_fields=True):
    """The body of POST /workers/ID/role."""

    role: Role


class EngineLoad(Struct, forbid_unknown_fields=True):
    """An engine's load by its own metrics; null if it does not report one."""

    running: Num | None
    waiting: Num | None
    kv_share: float | None


class PrefixCacheState(Struct, forbid_unknown_fields=True):
    """The gateway's knowledge of a replica's prefix cache."""

    state: Literal["guess", "connecting", "live", "incomplete", "degraded"]
    """`guess`: events are not read, or disagree with the engine's answers; prompts placed at the replica are assumed to
    be cached."""
    why: str
    """The reason for the state; empty if the events are live."""
    blocks: Num
    """Known KV blocks on the GPU."""
    gaps: Num
    """Number of times that batches of events were missing."""
    lost: Num
    """Number of batches of events that no replay recovered."""
    age_s: float | None
    """Seconds since the last batch of events; null if none has come."""


class ReplicaState(Struct, forbid_unknown_fields=True):
    """The current state of a replica."""

    id: Num
    name: str
    pool: str
    model: str
    url: str
    status: Literal["up", "starting", "down", "ejected", "draining", "unready", "leaving"]
    combo: str | None
    role: Role
    in_flight: Num
    empty: bool
    engine: EngineLoad
    why: str | None
    """The last error of the replica: the reason why it is ejected or down."""
    prediction: PredictionRatio | None
    """Ratio of predicted to observed latencies; null if the replica's GPU is unknown, or too few requests have
    ended."""
    prefix_cache: PrefixCacheState | None
    """Null if the pool's profile has no prefix cache."""
    shadow: ShadowPlacements | None
    """Placements of the candidate that runs in shadow; null if no candidate routes."""


class FailedPool(Struct, forbid_unknown_fields=True):
    """A pool with wanted replicas that fail to start."""

    pool: str
    replicas: Num
    why: str
    """The error of the last start."""


class ReplicaList(Struct, forbid_unknown_fields=True):
    """All replicas, and the pools whose last starts failed."""

    object: Literal["list"]
    data: list[ReplicaState]
    failed: list[FailedPool]


# The dashboard.


class ReplicaRow(ReplicaState):
    """A replica on the dashboard."""

    gpu: str
    region: str
    most_in_flight: int
    kv_share: Annotated[float, Meta(ge=0)]
    by_tier: dict[str, Num]
    age_s: float | None


class HeldRequests(Struct, forbid_unknown_fields=True):
    """Held requests of one model and tier in the gateway."""

    model: str
    tier: Num
    held: Num
    oldest_s: float


class Trouble(Struct, forbid_unknown_fields=True):
    """A problem that an operator should look at, in words."""

    where: str
    """The affected replica, pool, model or part of the gateway."""
    what: Literal["down", "ejected", "fails to start", "slow", "full", "waits", "late", "not current"]
    is_severe: bool
    """Whether clients are affected, or will be after one more failure."""
    why: str


class PolicyNames(Struct, forbid_unknown_fields=True):
    """The policies with their arguments, as `headway serve` prints them; null for none."""

    routing: str
    ordering: str
    ordering_at: str
    window: int | None
    admission: str | None
    migration: str | None
    scaling: str | None
    slo_ttft_s: float | None
    slo_tpot_s: float | None
    slo_e2e_s: float | None
    """SLOs of requests without their own."""


class DashboardData(Struct, forbid_unknown_fields=True):
    """All data of the dashboard."""

    version: str
    time_s: float
    uptime_s: float
    closing: bool
    replicas: list[ReplicaRow]
    queues: list[HeldRequests]
    in_flight: Num
    held: Num
    up: Num
    batch_requests_open: Num
    window_s: float
    troubles: list[Trouble]
    """Severe problems first."""
    policies: PolicyNames
    slo: SloCounts
    """SLO counts over the last minutes."""
    cost: Cost | None
    """Null if the pools have no prices."""
    rates: RecentRates
    tiers: list[TierStats]
    tenants: list[TenantStats]
    """Tenants with the most tokens over the last minutes."""
    num_tenants: Num
    series: SlotSeries
    slowest: list[SlowRequest] = []
    """The slowest requests that finished in the last minutes."""
    decisions: list[Decision] = []
    reload: Reload | None = None
    """The last reload of the fleet file."""
    shadow: list[ShadowedDecisions] = []
    """Decisions of the candidate of `--shadow`."""
    autopilot: AutopilotState | None = None


PUBLISHED_NAMES = {
    "BatchErrorList": "BatchErrors", "BatchList": "Batches", "BatchObject": "Batch", "DashboardData": "Dashboard",
    "DeletedFile": "Deleted", "EngineLoad": "Engine", "FailedPool": "Failed", "FileList": "Files", "FileObject": "File",
    "HealthStatus": "Health", "HeldRequests": "Queue", "LatencyQuantiles": "Quantiles", "ModelList": "Models",
    "ModelObject": "Model", "OfferedReplica": "Offered", "RecentRates": "Rates", "ReplicaList": "Workers",
    "ReplicaRow": "Shown", "ReplicaState": "Worker", "SloCounts": "Slo",
    "SlotSeries": "Series", "TenantStats": "Tenant", "TierStats": "Tier", "VersionInfo": "Version",
}  # fmt: skip
"""Components of /openapi.json whose names differ from their classes."""
