"""The `gateway` section of a fleet file, and the `judge` of its cascade."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Literal

from msgspec import Meta, Struct

Api = Literal["vllm", "sglang", "llama.cpp", "openai"]
"""The API that an engine serves."""
_Seconds = Annotated[float, Meta(gt=0)]
AutopilotKind = Literal["routing", "ordering", "admission", "migration", "scaling.settings"]
_ID_DIGITS = 12
_Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Key(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One API key, and its limits."""

    sha256: _Sha256
    """The key's SHA-256 in hexadecimal."""
    name: str = ""
    """The tenant, in records, metrics and the ordering `fair`. Keys with the same name are one tenant. Unset: the first
    digits of the sum."""
    weight: Annotated[float, Meta(gt=0)] = 1.0
    """The tenant's share of the service relative to other tenants, while several tenants have waiting requests."""
    tier: Annotated[int, Meta(ge=0)] = 0
    """The most urgent tier of requests with the key. A request with a more urgent tier gets this tier."""
    requests_per_minute: Annotated[float, Meta(gt=0)] | None = None
    """Average rate, and largest burst. Requests beyond this rate get a 429 with the time to wait."""
    tokens_per_minute: Annotated[float, Meta(gt=0)] | None = None
    """As `requests_per_minute`, for prompt and output tokens together."""
    expires: date | None = None
    """The last day (UTC) on which the key is valid."""

    @property
    def tenant(self) -> str:
        """The name of the requests' tenant."""
        return self.name or key_id(self.sha256)


def key_id(sha256: str) -> str:
    """The name of a key in logs and metrics: the first digits of its hash. The key cannot be computed from them."""
    return sha256[:_ID_DIGITS]


class KeyStoreSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A database of keys and teams with budgets, which `headway keys` changes."""

    store: str = "keys.sqlite"
    """The database: an SQLite file, created if it does not exist, `postgresql://user@host/database`, or
    `redis://user:password@host:port/0` of Valkey or Redis."""
    refresh_s: _Seconds = 2.0
    """Time between two exchanges with the database, which write the spending and read the keys and the spending of
    other gateways."""
    on_failure: Literal["serve", "refuse"] = "serve"
    """The behaviour while the database cannot be used. `serve`: continue with the known keys and spending, and write
    the spending later. `refuse`: answer 503 to requests with keys of the database."""


class PeerSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Other gateways, or pickers, that serve the same fleet as this gateway."""

    store: str
    """The database through which the gateways exchange data: `postgresql://user@host/database`, or
    `redis://user:password@host:port/0` of Valkey or Redis."""
    name: str = ""
    """Name of this gateway in logs; default: the host's name."""
    period_s: _Seconds = 0.05
    """Minimum time between two messages to the other gateways about this gateway's load at the replicas."""
    lease_s: _Seconds = 2.0
    """Time after a gateway's last message for which its reports count."""
    streams: bool = True
    """Whether named streams are also kept in the store. Another gateway can then continue a stream for its client."""
    leader: Literal["store", "kubernetes"] = "store"
    """The place where the scaling gateway holds its lease: the store, or a Lease of the pods' cluster."""


class Cors(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Web pages of other hosts that may send requests from browsers (cross-origin resource sharing)."""

    origins: Annotated[tuple[str, ...], Meta(min_length=1)]
    """Origins of the pages, such as `https://chat.example.com`. `*` for every page."""
    methods: tuple[str, ...] = ("GET", "POST", "DELETE")
    """Methods of their requests."""
    headers: tuple[str, ...] = ("*",)
    """Headers that the pages may send. `*` for every header."""
    max_age_s: Annotated[int, Meta(ge=0)] = 600
    """Time for which browsers keep the answer to a preflight request."""


class Batches(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """OpenAI's files and batches API."""

    store: str = "batches.sqlite"
    """The database: an SQLite file, created if it does not exist, or `postgresql://user@host/database`."""
    tier: Annotated[int, Meta(ge=0)] = 2
    """Tier of batch requests, until the admission policy changes it."""
    max_file_bytes: Annotated[int, Meta(ge=1)] = 100 << 20
    """Largest file."""
    max_stored_bytes: Annotated[int, Meta(ge=1)] = 10 << 30
    """Maximum number of bytes of files that one key stores. The file of an unfinished batch counts twice. Answers are
    always stored. Further uploads and batches get a 429 until files are deleted."""
    max_lines: Annotated[int, Meta(ge=1)] = 50_000
    """Largest number of requests in a batch."""
    max_open: Annotated[int, Meta(ge=1)] = 256
    """Largest number of batch requests in the gateway or at engines. Further batch requests stay in the database."""
    max_attempts: Annotated[int, Meta(ge=1)] = 10
    """Maximum number of attempts at a failing request, at growing intervals. Attempts that found no room do not
    count."""


class Judge(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """For `headway serve`: how a cascade's answers are scored. A simulation takes the scores from its workload."""

    by: Literal["model", "confidence"] = "model"
    """`model`: a model replies with a number from 0 to 100. `confidence`: 100 times the geometric mean of the answer's
    token probabilities, as reported by the answering model."""
    url: str = ""
    """Address of the judging model, `http://host:port`, which serves OpenAI's API."""
    model: str = ""
    """Name of the judging model."""
    prompt: str = ""
    """The judge's prompt, with the placeholders `{question}` and `{answer}`. Unset: a built-in prompt."""
    max_tokens: Annotated[int, Meta(ge=1)] = 1024
    """Largest number of tokens of the judge's reply, reasoning included."""
    key_env: str = ""
    """Environment variable that contains the judge's API key."""
    timeout_s: _Seconds = 30.0
    """Time limit for a score."""
    on_failure: Literal["escalate", "accept"] = "escalate"
    """The action for an answer that could not be scored."""


class TimeLimits(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The time for which an engine with requests may be silent. Expected times are those of the step model of the
    engine's model and GPU, times the measured slowdown of the pool's replicas."""

    factor: Annotated[float, Meta(gt=1)] = 10.0
    """Multiple of the expected time to the next token for which an engine may be silent."""
    silence_s: _Seconds = 3.0
    """Minimum time for which an engine may be silent. After a longer silence, the engine is sent a one-token request;
    without an answer the engine is down."""
    cold_s: _Seconds = 30.0
    """As `silence_s`, while no replica of the pool has answered yet: engines compile at their first requests."""
    stuck_s: _Seconds = 15.0
    """While the engine generates for others, one request may be silent for at least this time, and 5 times as long as
    an engine. After a longer silence the request continues at another engine. Without another engine, the limit is
    four times as long."""


class Outliers(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a replica is ejected that passes its health checks but serves worse than the other replicas of its
    pool."""

    failures: Annotated[int, Meta(ge=1)] = 5
    """Number of failed requests in a row."""
    failure_share: Annotated[float, Meta(gt=0, le=1)] = 0.3
    """Excess of the replica's share of failed requests over its peers' share."""
    min_requests: Annotated[int, Meta(ge=1)] = 10
    """Number of requests required for this comparison."""
    slow_factor: Annotated[float, Meta(gt=1)] = 5.0
    """Ratio of the replica's time to first token, or time between tokens, to that of its peers."""
    window_s: _Seconds = 30.0
    """Time window of these comparisons."""
    ejection_s: _Seconds = 10.0
    """Length of the first ejection. The second ejection is twice as long, the third is three times as long, and so
    on."""
    max_ejection_s: _Seconds = 300.0
    """Longest ejection. After a replica has served well for this long, its next ejection has the length of the
    first."""
    max_ejected_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Largest share of a pool's replicas that may be ejected. It allows at least one replica, and never all. 0: no
    replica is ejected."""
    slow_start_s: Annotated[float, Meta(ge=0)] = 10.0
    """Time over which a returned replica's share of the requests grows from a tenth to the full share."""


class DemandHistory(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Demand from before the start, for scalers that forecast: from `records` or `prometheus`."""

    records: str | None = None
    """The folder of `--records`. At each start, the demand in its records is added to the folder's file
    `demand.parquet`."""
    prometheus: str | None = None
    """Address of a Prometheus server that scrapes the gateway, `http://host:port`."""
    query: str = 'sum by (model) (rate(headway_tokens_total{kind="input"}[5m]))'
    """Query for prompt tokens per second. Its series have the label `model`; with several regions `region`; optionally
    `tier`."""
    days: Annotated[float, Meta(gt=0, le=60)] = 8.0
    """Length of the history before the start."""

    def __post_init__(self) -> None:
        if (self.records is None) == (self.prometheus is None):
            raise ValueError("expected either records or prometheus")


class AutopilotSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """For `headway serve --autopilot`: the changes that the autopilot may try, and the times at which it may try
    them."""

    allow: Annotated[tuple[AutopilotKind, ...], Meta(min_length=1)]
    """Kinds of changes. `scaling.settings`: other settings of the fleet's scaler."""
    max_usd_per_h: Annotated[float, Meta(ge=0)] | None = None
    """Upper limit of the fleet's hourly cost with all replicas that it may have; a change that may exceed it is not
    tried."""
    freeze: str | tuple[str, ...] = ()
    """Times of the week at which no change begins: `Mon 08:00-10:00`, `Mon-Fri 22:00-06:00`, `08:00-10:00`."""
    time_zone: str = "UTC"
    """Time zone of `freeze` and `at`, such as Europe/Berlin."""
    at: Annotated[str, Meta(pattern="^([01][0-9]|2[0-3]):[0-5][0-9]$")] | None = "02:00"
    """The time of day at which the autopilot looks for changes. None: only on `headway autopilot now`."""
    records_s: _Seconds = 86400.0
    """Length of the latest records from which a change is chosen."""
    judge_s: _Seconds = 7200.0
    """Time in which a change is to be judged; it gets the smallest share of traffic that suffices for this."""


class Settings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The key `gateway` of a fleet file: how `headway serve` answers."""

    timeout_s: _Seconds = 600.0
    """Time after its arrival at which a request is cancelled."""
    flex_s: _Seconds = 600.0
    """Deadline of a request with `service_tier: flex`, from its arrival, at most `timeout_s`. Until shortly before the
    deadline, the admission policy may hold the request while it would delay others."""
    hold_s: Annotated[float, Meta(ge=0)] | None = None
    """Longest wait for a replica while none is up. Unset: 0.2 s if all replicas are lost (no replica can be reached or
    passes its health check); 30 s while a replica starts, waits for its check, or is suspended."""
    max_held: Annotated[int, Meta(ge=0)] = 10_000
    """Largest number of held requests per model; further requests are rejected."""
    max_body_bytes: Annotated[int, Meta(ge=1)] = 32 << 20
    """Largest request body."""
    max_bodies_bytes: Annotated[int, Meta(ge=1)] = 512 << 20
    """Largest total of request bodies over 64 KiB that each process holds while it reads or serves the requests.
    Shorter bodies have a separate limit of the same size. A request whose body does not fit gets a 503. A request of a
    key whose bodies occupy half of the limit gets a 503, too."""
    scrape_period_s: _Seconds = 1.0
    """Time between two probes of an engine's health and metrics."""
    models_period_s: _Seconds = 10.0
    """Time between two requests for the lists of models and LoRA adapters of an engine that lists adapters."""
    stale_s: _Seconds = 5.0
    """Metrics older than this are replaced by the gateway's own counts."""
    probe_timeout_s: _Seconds = 5.0
    """Time limit for an engine's answer to a probe."""
    keep_alive_s: _Seconds | None = None
    """Time without data after which the client of a stream gets a comment (`: waiting`): proxies close silent
    connections, and a request may be silent while it is held, while its prompt is computed, or while another engine
    takes over. After the first comment, an error is an event in a response with status 200. Without it: no comments."""
    max_waiting: Annotated[int, Meta(ge=0)] | None = None
    """New requests get a 429 while each running replica of their model reports at least this many waiting requests.
    Unset: no limit. Engines that report no number are ignored."""
    pace_s: _Seconds | None = None
    """Minimum time between two answer tokens sent to the client of a stream, such as the pacer's `tpot_s`. Tokens
    generated faster are kept for later, and sent at once while the request waits. Without it: tokens are sent at once.
    """
    max_attempts: Annotated[int, Meta(ge=1)] = 3
    """Attempts at a request before its client gets an error. No engine gets the request more often than this, unless
    earlier attempts made progress."""
    quarantine_s: Annotated[float, Meta(ge=0)] = 60.0
    """Time for which a request that broke two engines, and copies of it, are barred from all engines."""
    limits: TimeLimits = TimeLimits()
    """The time for which an engine may be silent."""
    outliers: Outliers = Outliers()
    """The conditions under which a replica that serves worse than its peers is ejected."""
    body_timeout_s: _Seconds = 60.0
    """Time limit for receiving a request's body."""
    api_keys: tuple[_Sha256 | Key, ...] = ()
    """Keys that clients may send as bearer tokens: SHA-256 hashes in hexadecimal, or hashes with limits. Without keys
    and `key_store`, all requests are served, and engines get the clients' keys."""
    hosts: tuple[str, ...] = ()
    """Without `api_keys`: host names that clients may use in requests, besides loopback names and the listening
    address. `*` for every host. A gateway that does not only listen on a loopback address accepts all IP addresses."""
    key_store: KeyStoreSettings | None = None
    """Keys in a database, in addition to `api_keys`."""
    peers: PeerSettings | None = None
    """Other gateways of the same fleet, through a shared store. Unset: this gateway is the only one."""
    cors: Cors | None = None
    """Origins of other hosts' web pages that may send requests. Unset: browsers withhold the answers from such
    pages."""
    admin_keys: tuple[_Sha256, ...] = ()
    """SHA-256 hashes of the keys that permit viewing and changing the replicas. Empty: no client may do so."""
    dashboard: Literal["key", "open", "off"] = "key"
    """Access to /dashboard: with one of the `admin_keys`, for everybody, or for nobody."""
    explain: bool = False
    """Whether the header `x-headway-explain: 1` adds response headers with the hold time, attempts, tier and model."""
    max_decisions_bytes: Annotated[int, Meta(ge=1 << 10)] = 256 << 20
    """Size at which the decision log is renamed to FILE.1, which replaces an older FILE.1."""
    records_period_s: _Seconds = 10.0
    """With `--records`: time between two writes of records. A gateway that is killed loses the records since the last
    write."""
    demand_history: DemandHistory | None = None
    """Demand from before the start. Unset: forecasts begin with the gateway."""
    tracing: bool = False
    """Whether OpenTelemetry spans are exported, as set by the OTEL_* environment variables."""
    batches: Batches | None = None
    """The files and batches API. Unset: off."""
    hang_s: _Seconds = 10.0
    """With several workers: a worker that is silent for this long is restarted. After the scheduler was silent for this
    long, clients get a 503."""
    objectives: dict[str, Annotated[int, Meta(ge=0)]] = {}
    """For `headway epp`: the tier by the name in a request's header `x-llm-d-inference-objective` or
    `x-gateway-inference-objective`. A request with another name keeps its default tier."""
    probe_port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    """A separate port for probes, on all addresses: `/livez` (200 while the process makes progress), and `/readyz` and
    `/health` (200 while a replica is up). A separate thread answers, independently of the load."""
    drain_s: Annotated[float, Meta(ge=0)] = 30.0
    """Time that streams have to end at shutdown."""

    @property
    def needs_key(self) -> bool:
        """Whether clients need a key."""
        return bool(self.api_keys) or self.key_store is not None

    @property
    def has_dashboard(self) -> bool:
        """Whether the gateway has a dashboard, open or for administrators only."""
        return self.dashboard == "open" or (self.dashboard == "key" and bool(self.admin_keys))
