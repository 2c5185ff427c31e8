"""How the gateway behaves towards clients and engines: the `gateway` section of a fleet file."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Api = Literal["vllm", "sglang", "llama.cpp", "openai"]
"""Whose dialect an engine speaks."""
_Seconds = Annotated[float, Meta(gt=0)]


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
    api_keys: tuple[Annotated[str, Meta(pattern="^[0-9a-f]{64}$")], ...] = ()
    """SHA-256 of the keys that clients may send as bearer tokens, in hexadecimal. Without any, everybody is served,
    and engines are sent the keys that clients send."""
    drain_s: Annotated[float, Meta(ge=0)] = 30.0
    """At shutdown, streams may go on for so long."""
