"""How the gateway behaves towards clients and engines: the `gateway` section of a fleet file."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Literal

from msgspec import Meta, Struct

Api = Literal["vllm", "sglang", "llama.cpp", "openai"]
"""Whose dialect an engine speaks."""
_Seconds = Annotated[float, Meta(gt=0)]
_Sum = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Key(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one key allows."""

    sha256: _Sum
    """The key's SHA-256 in hexadecimal."""
    tier: Annotated[int, Meta(ge=0)] = 0
    """The most urgent tier that it may ask for; requests of more urgent ones are of this one."""
    requests_per_minute: Annotated[float, Meta(gt=0)] | None = None
    """On average; as many may come at once. More get a 429 that says when to come back."""
    tokens_per_minute: Annotated[float, Meta(gt=0)] | None = None
    """Of prompts and answers together, as above."""
    expires: date | None = None
    """Its last day (UTC)."""


class Batches(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Work that nobody waits for: OpenAI's files and batches."""

    store: str = "batches.sqlite"
    """Where they are kept: a file, made where there is none, or `postgresql://user@host/database`."""
    tier: Annotated[int, Meta(ge=0)] = 2
    """Of their requests, until the admission policy says otherwise."""
    max_file_bytes: Annotated[int, Meta(ge=1)] = 100 << 20
    """Longest file."""
    max_lines: Annotated[int, Meta(ge=1)] = 50_000
    """Most requests of a batch."""
    max_open: Annotated[int, Meta(ge=1)] = 256
    """Most requests of batches that wait for the admission policy or are at engines; more stay in the database."""
    max_attempts: Annotated[int, Meta(ge=1)] = 10
    """How often a request that fails is tried again, at growing intervals. To have no room does not count."""


class Judge(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """For `headway serve`: who scores a cascade's answers. A simulation knows what they are worth."""

    by: Literal["model", "confidence"] = "model"
    """A model that is asked for a number from 0 to 100, or the answering model's own log probabilities: 100 times
    the geometric mean of its tokens' probabilities."""
    url: str = ""
    """Where the judging model listens, `http://host:port`: anything that speaks OpenAI's API."""
    model: str = ""
    """What it calls its model."""
    prompt: str = ""
    """What it is asked; `{question}` and `{answer}` stand for what is judged. Without one: Headway's own words."""
    max_tokens: Annotated[int, Meta(ge=1)] = 1024
    """Most that it may say, its thoughts included."""
    key_env: str = ""
    """The environment variable that holds the API key for it."""
    timeout_s: _Seconds = 30.0
    """It has to have said its number by then."""
    on_failure: Literal["escalate", "accept"] = "escalate"
    """What becomes of an answer that got no score."""


class Settings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `headway serve` goes by."""

    timeout_s: _Seconds = 600.0
    """A request is given up this long after it came."""
    hold_s: Annotated[float, Meta(ge=0)] = 30.0
    """While no replica is up, a request waits this long for one."""
    max_held: Annotated[int, Meta(ge=0)] = 10_000
    """Most requests held back for one model; more are turned away."""
    max_body_bytes: Annotated[int, Meta(ge=1)] = 32 << 20
    """Longest request body."""
    scrape_period_s: _Seconds = 1.0
    """Time between two readings of an engine's metrics and health."""
    stale_s: _Seconds = 5.0
    """Metrics older than this are unknown; the gateway's own counts stand in."""
    probe_timeout_s: _Seconds = 5.0
    """An engine that has not said by then that it is well may not be."""
    max_attempts: Annotated[int, Meta(ge=1)] = 3
    """How often a request is sent to an engine before its client hears of an error."""
    body_timeout_s: _Seconds = 60.0
    """A request's body has to be there by then."""
    api_keys: tuple[_Sum | Key, ...] = ()
    """The keys that clients may send as bearer tokens: SHA-256 sums in hexadecimal, or what each allows. Without any,
    everybody is served, and engines are sent the keys that clients send."""
    admin_keys: tuple[_Sum, ...] = ()
    """Keys, in the same form, that may see and change what replicas there are. Without any, nobody may."""
    dashboard: Literal["key", "open", "off"] = "key"
    """Who may look at /dashboard: who has one of the `admin_keys`, everybody, or nobody."""
    explain: bool = False
    """Whether clients may ask, by `x-headway-explain: 1`, how long their request was held and which attempt this is."""
    max_decisions_bytes: Annotated[int, Meta(ge=1 << 10)] = 256 << 20
    """A file of decisions that is so long becomes FILE.1, in the place of the one before it."""
    tracing: bool = False
    """Spans of each request, sent by OpenTelemetry's exporter to where its OTEL_* environment variables say."""
    batches: Batches | None = None
    """Without it, there are no files and batches."""
    hang_s: _Seconds = 10.0
    """With several workers: one that says nothing for so long is ended, and another one started; and while the
    scheduler says nothing for so long, clients get a 503."""
    drain_s: Annotated[float, Meta(ge=0)] = 30.0
    """At shutdown, streams may go on for so long."""
