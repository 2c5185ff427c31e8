"""The counts of a replica, read together.

A view is known by its protocol alone, so compiled code reads each of its fields by name, at 250 instructions a field. A
view that extends `Counted` is read by one call.
"""

from __future__ import annotations

from typing import Final

from headway.core.subclasses import mypyc_attr
from headway.core.view import EngineTimes, ReplicaView

UNKNOWN: Final = 1 << 40
"""More tokens than any replica holds."""


class Counted:
    """A replica's view that writes all its counts at once."""

    __slots__ = ()

    def count_into(self, counts: Counts) -> None:
        """Set all fields of `counts`: `growth_tokens`, and the others to the view's fields of the same names."""
        raise NotImplementedError


@mypyc_attr(allow_interpreted_subclasses=True)
class Counts:
    """Fields of `core.view.ReplicaView` at one moment."""

    __slots__ = (
        "block_size_tokens", "expected_cached_tokens", "growth_tokens", "id", "kv_blocks_total", "kv_blocks_used",
        "max_num_seqs", "num_in_flight", "num_running", "prefill_tokens_left", "replica", "role", "times",
        "tokens_generated",
    )  # fmt: skip

    replica: ReplicaView
    id: int
    role: str
    times: EngineTimes | None
    max_num_seqs: int
    block_size_tokens: int
    kv_blocks_total: int
    kv_blocks_used: int
    num_in_flight: int
    num_running: int
    prefill_tokens_left: int
    expected_cached_tokens: int
    tokens_generated: int
    growth_tokens: int
    """KV tokens by which ticks let the blocks in use grow at most, until the replica changes otherwise; `UNKNOWN` if
    the view does not tell."""

    def __init__(self, replica: ReplicaView) -> None:
        self.replica = replica
        view: object = replica
        if isinstance(view, Counted):
            view.count_into(self)
            return
        self.id, self.role, self.times = replica.id, replica.role, replica.times
        self.max_num_seqs, self.block_size_tokens = replica.max_num_seqs, replica.block_size_tokens
        self.kv_blocks_total, self.kv_blocks_used = replica.kv_blocks_total, replica.kv_blocks_used
        self.num_in_flight, self.num_running = replica.num_in_flight, replica.num_running
        self.prefill_tokens_left = replica.prefill_tokens_left
        self.expected_cached_tokens = replica.expected_cached_tokens
        self.tokens_generated, self.growth_tokens = replica.tokens_generated, UNKNOWN
