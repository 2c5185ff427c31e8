"""The bodies of the HTTP API: those that clients send to engines, as far as Headway reads them, and Headway's own."""

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


# Requests for engines. Fields that are not listed go to the engine unchanged.


class EngineRequest(Struct, kw_only=True):
    """The fields that the endpoints share."""

    model: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None
    """One of `GET /v1/models`, or the catalog's or the engine's own name for one of them; of several models, needed."""
    stream: bool | None = None
    n: int | None = None
    max_tokens: Any = None
    """A count. Other values are the engine's to judge; the same for the next two."""
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    stream_options: Any = None
    priority: Annotated[int, Meta(ge=0, le=MAX_TIER)] | None = None
    """The tier; 0 is the most urgent."""
    service_tier: Any = None
    """`flex` is tier 1, and may wait until its deadline."""
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
    """Of /v1/responses: the request goes to the engine that has made this response."""


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
    """Of a LoRA adapter: its model."""


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
    """Other gateways of this fleet, where there may be any."""
    peer_store: Literal["up", "away"] | UnsetType = UNSET
    """Whether the store that they share can be used. While it cannot, each goes on alone."""


class Welcome(Struct, forbid_unknown_fields=True):
    """What answers here, and the paths of what a newcomer looks for."""

    about: str
    version: str
    docs: str
    openapi: str
    models: str
    health: str
    dashboard: str | None
    """None: this gateway has none."""


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
    """What the gateway knows of a replica's prefix cache."""

    state: Literal["guess", "connecting", "live", "incomplete", "degraded"]
    """`guess`: no events are read, or they do not agree with what answers report; prompts that were placed there are
    assumed to be cached."""
    why: str
    """The reason of the state; empty while all is well."""
    blocks: Num
    """KV blocks that it holds on the GPU, as far as is known."""
    gaps: Num
    """Times that batches of events were missing."""
    lost: Num
    """Batches of events that no replay had, either."""
    age_s: float | None
    """Since the last batch of events; null: none has come."""


class ReplicaState(Struct, forbid_unknown_fields=True):
    """The present state of a replica."""

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
    """Why the replica is ejected, or down: what went wrong last."""
    prediction: PredictionRatio | None
    """Null: its GPU is not known, or too few requests have ended."""
    prefix_cache: PrefixCacheState | None
    """Null: its engine has none, by the pool's profile."""
    shadow: ShadowPlacements | None
    """Null: no candidate routes beside."""


class FailedPool(Struct, forbid_unknown_fields=True):
    """Wanted replicas of a pool that fail to start."""

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
    """The requests of one model and tier that are held in the gateway."""

    model: str
    tier: Num
    held: Num
    oldest_s: float


class Trouble(Struct, forbid_unknown_fields=True):
    """Something that an operator should look at, in words."""

    where: str
    """A replica, a pool, a model, or a part of the gateway."""
    what: Literal["down", "ejected", "fails to start", "slow", "full", "waits", "late", "not current"]
    is_severe: bool
    """Clients are affected, or will be with one more failure."""
    why: str


class PolicyNames(Struct, forbid_unknown_fields=True):
    """The policies with their arguments, as `headway serve` prints them; null: none."""

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
    """Everything that the dashboard shows."""

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
    """The severe ones first."""
    policies: PolicyNames
    slo: SloCounts
    """Over the last minutes."""
    cost: Cost | None
    """Null: the pools have no prices."""
    rates: RecentRates
    tiers: list[TierStats]
    tenants: list[TenantStats]
    """Those with most tokens over the last minutes."""
    num_tenants: Num
    series: SlotSeries
    decisions: list[Decision] = []
    reload: Reload | None = None
    """The last reload of the fleet file."""
    shadow: list[ShadowedDecisions] = []
    """Of the candidate of `--shadow`."""
    autopilot: AutopilotState | None = None


PUBLISHED_NAMES = {
    "BatchErrorList": "BatchErrors", "BatchList": "Batches", "BatchObject": "Batch", "DashboardData": "Dashboard",
    "DeletedFile": "Deleted", "EngineLoad": "Engine", "FailedPool": "Failed", "FileList": "Files", "FileObject": "File",
    "HealthStatus": "Health", "HeldRequests": "Queue", "LatencyQuantiles": "Quantiles", "ModelList": "Models",
    "ModelObject": "Model", "OfferedReplica": "Offered", "RecentRates": "Rates", "ReplicaList": "Workers",
    "ReplicaRow": "Shown", "ReplicaState": "Worker", "SloCounts": "Slo",
    "SlotSeries": "Series", "TenantStats": "Tenant", "TierStats": "Tier", "VersionInfo": "Version",
}  # fmt: skip
"""The components of /openapi.json whose names differ from the names of their classes."""
