"""The decisions that policies return."""

from __future__ import annotations

from msgspec import Struct


class Placement(Struct, frozen=True, gc=False):
    """Place the request on this replica, and on `decode` after its prefill (None: the same replica).

    `scores` are (replica id, score) pairs for the decision log.
    """

    replica: int
    decode: int | None = None
    scores: tuple[tuple[int, float], ...] = ()


class Release(Struct, frozen=True, gc=False):
    """Release a held request. `tier`: the request's tier from now on; None: its own. In a new tier the request queues
    behind earlier arrivals, as if it arrived now. With `region`, the request goes to a replica there if one can take
    it.
    """

    request: int
    tier: int | None = None
    region: str = ""


class Move(Struct, frozen=True, gc=False):
    """Move a request to another replica, with its KV cache if there is one. With `stage_blocks`, a decoding request
    keeps decoding while its cache is copied in stages of this many KV blocks, and pauses only for the last stage.
    Without `stage_blocks`, the request pauses, its cache is copied, and the request continues at the target.
    """

    request: int
    target: int
    stage_blocks: int | None = None
    scores: tuple[tuple[int, float], ...] = ()
