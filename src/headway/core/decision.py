"""All that a policy may do."""

from __future__ import annotations

from msgspec import Struct


class Placement(Struct, frozen=True, gc=False):
    """Put the request on this replica, and after its prefill on `decode`; None: it stays.

    `scores` are (replica id, score) pairs for the decision log.
    """

    replica: int
    decode: int | None = None
    scores: tuple[tuple[int, float], ...] = ()


class Release(Struct, frozen=True, gc=False):
    """Let a request that was held back go, as of this tier from now on; None: as it came.

    With `region`, it goes to a replica there, as long as one can take it.
    """

    request: int
    tier: int | None = None
    region: str = ""


class Move(Struct, frozen=True, gc=False):
    """Take a request to another replica, with its KV cache if it has one.

    With `stage_blocks`, a decoding request goes on while so many KV blocks are copied at a time, and stands still
    only for the last of them. Without, it stops, is copied, and goes on there.
    """

    request: int
    target: int
    stage_blocks: int | None = None
    scores: tuple[tuple[int, float], ...] = ()
