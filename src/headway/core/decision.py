"""All that a policy may do."""

from __future__ import annotations

from msgspec import Struct


class Placement(Struct, frozen=True, gc=False):
    """Put the request on this replica. `scores` are (replica id, score) pairs for the decision log."""

    replica: int
    scores: tuple[tuple[int, float], ...] = ()
