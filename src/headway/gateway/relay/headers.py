"""The headers of an answer: an engine's, or the gateway's own."""

from __future__ import annotations

from headway.control.live import Live
from headway.gateway.scheduling.in_flight import InFlightRequest


def headers(
    ticket: InFlightRequest, id: bytes, kind: bytes, length: int | None, explains: bool
) -> list[tuple[bytes, bytes]]:
    """`length`: None where it is not known yet. `explains`: the client wants to know what became of its request."""
    made = [(b"content-type", kind), (b"x-request-id", id)]
    if ticket.replica is not None:
        made.append((b"x-headway-replica", ticket.replica.name.encode("latin-1", "replace")))
        if explains:
            made += _explained(ticket.live)
    if length is not None:
        made.append((b"content-length", b"%d" % length))
    else:
        made += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
    return made


def _explained(live: Live) -> list[tuple[bytes, bytes]]:
    """What became of the request until now."""
    return [
        (b"x-headway-held-s", b"%.6f" % (live.placed_s - live.arrival_s)),
        (b"x-headway-attempts", b"%d" % (live.attempt + 1)),
        (b"x-headway-tier", b"%d" % live.tier),
        (b"x-headway-model", live.model.encode("latin-1", "replace")),
    ]
