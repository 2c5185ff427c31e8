"""All that a policy may read. Read-only, valid during the call; what is not asked for is not computed.

A driver may hand its own objects as views; a policy sees only what stands here. Counts and loads may be as
stale as the fleet's metrics are (see `observe`); `in_flight` never is.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol

from headway.core.request import Phase, Segment


class RequestView(Protocol):
    """One request, without its future."""

    @property
    def id(self) -> int: ...
    @property
    def arrival_s(self) -> float: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def model(self) -> str: ...
    @property
    def tier(self) -> int:
        """0 is the most urgent."""

    @property
    def region(self) -> str: ...
    @property
    def session_id(self) -> int | None: ...
    @property
    def prefix(self) -> tuple[Segment, ...]: ...
    @property
    def slo_ttft_s(self) -> float | None: ...
    @property
    def slo_tpot_s(self) -> float | None: ...
    @property
    def slo_e2e_s(self) -> float | None: ...
    @property
    def deadline_s(self) -> float | None:
        """Absolute."""

    @property
    def generated_tokens(self) -> int:
        """Output tokens so far."""

    @property
    def phase(self) -> Phase: ...
    @property
    def turn(self) -> int:
        """Place in line: set when the request joins a queue and again at the end of each quantum; grows."""

    @property
    def attempt(self) -> int:
        """0, and one more each time the request was placed anew after a crash."""


class OracleRequestView(RequestView, Protocol):
    """What only an oracle may read. The gateway refuses policies that do."""

    @property
    def output_tokens(self) -> int: ...
    @property
    def reasoning_tokens(self) -> int: ...


class ReplicaView(Protocol):
    """One replica's identity and load."""

    @property
    def id(self) -> int: ...
    @property
    def pool(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def gpu(self) -> str: ...
    @property
    def region(self) -> str: ...
    @property
    def num_in_flight(self) -> int:
        """Requests placed here and not yet ended: the placer's own count, never stale."""

    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def kv_blocks_used(self) -> int:
        """GPU KV blocks held by requests (a prefix cache's idle blocks are free)."""

    @property
    def kv_blocks_total(self) -> int: ...
    @property
    def prefill_tokens_left(self) -> int:
        """Prompt tokens not yet computed, of all requests placed here."""

    @property
    def tokens_generated(self) -> int:
        """Output tokens so far of the requests now placed here."""


class OracleReplicaView(ReplicaView, Protocol):
    """What only an oracle may read."""

    @property
    def output_tokens_left(self) -> int:
        """True output tokens still to come of the requests placed here."""


class FleetView(Protocol):
    """What a router sees: the replicas that may be chosen now, in a fixed order, and never none of them."""

    @property
    def now(self) -> float: ...
    @property
    def random(self) -> Random:
        """This policy's own named stream."""

    @property
    def replicas(self) -> Sequence[ReplicaView]: ...
