"""All that a policy may read. Read-only, valid during the call; what is not asked for is not computed.

A driver may hand its own objects as views; a policy sees only what stands here. What engines tell of themselves
(who runs and waits there, KV blocks) may be as stale as the fleet's metrics are (see `observe`); what the gateway
counts itself never is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from random import Random
from typing import Protocol

from headway.core.fleet import Role
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
    def answer_tokens(self) -> int:
        """Answering tokens so far: output tokens that came after the reasoning."""

    @property
    def phase(self) -> Phase: ...
    @property
    def turn(self) -> int:
        """Place in line: set when the request joins a queue and again at the end of each quantum; grows."""

    @property
    def attempt(self) -> int:
        """0, and one more each time the request was placed anew after a crash."""

    @property
    def replica(self) -> int:
        """Where it was placed last; -1 = nowhere yet."""


class PlacedRequestView(RequestView, Protocol):
    """A request at a replica, as a migration policy sees it."""

    @property
    def is_running(self) -> bool:
        """It decodes. What waits or prefills does not."""

    @property
    def is_waiting(self) -> bool: ...
    @property
    def has_kv(self) -> bool:
        """Its KV cache is at the replica, on the GPU or in host memory; without, it moves for nothing."""

    @property
    def is_moving(self) -> bool:
        """A move is under way; until it is over, another is not begun."""


class OracleRequestView(RequestView, Protocol):
    """What only an oracle may read. The gateway refuses policies that do."""

    @property
    def output_tokens(self) -> int: ...
    @property
    def reasoning_tokens(self) -> int: ...
    @property
    def quality(self) -> tuple[tuple[str, float], ...]:
        """(model, score) pairs: what each model's answer would be worth."""


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
    def role(self) -> Role:
        """What it is for at present."""

    @property
    def combo(self) -> int:
        """Which combo it is part of: replicas of one combo hand requests over to each other. Alone: a number of its
        own."""

    @property
    def goodput_rps(self) -> float | None:
        """Requests per second that its combo serves within the SLOs, as profiled; None: not profiled."""

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
    def block_size_tokens(self) -> int: ...
    @property
    def kv_blocks_host(self) -> int:
        """KV blocks of preempted requests that wait in host memory."""

    @property
    def head_demand_blocks(self) -> int:
        """KV blocks that the first in line needs to run; 0 = nobody waits."""

    @property
    def num_by_tier(self) -> Mapping[int, int]:
        """Requests placed here, by tier; tiers without any may be absent or 0."""

    @property
    def queue_lengths(self) -> Sequence[int]:
        """Requests placed here by the queue of the ordering that they stand in (`QueuedOrdering`); else all in one."""

    @property
    def answers_on_pace(self) -> bool:
        """Every reader of an answer that is produced here still has tokens to read (`core.pacer`)."""

    @property
    def num_arriving(self) -> int:
        """Requests that are being moved here."""

    @property
    def is_draining(self) -> bool:
        """It takes nothing new, and stops once it is empty."""

    @property
    def requests(self) -> Sequence[PlacedRequestView]:
        """Who is placed here, in no order. Takes time in their number."""

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
    """What a router sees: the replicas that may be chosen now, in a fixed order, and never none of them.

    A migration policy sees all of a model's replicas that are up, draining ones too.
    """

    @property
    def now(self) -> float: ...
    @property
    def random(self) -> Random:
        """This policy's own named stream."""

    @property
    def replicas(self) -> Sequence[ReplicaView]: ...


class AdmissionView(Protocol):
    """What an admission policy sees: one model's replicas that are up, and who is kept back for them."""

    @property
    def now(self) -> float: ...
    @property
    def random(self) -> Random:
        """This policy's own named stream."""

    @property
    def replicas(self) -> Sequence[ReplicaView]: ...
    @property
    def held(self) -> Collection[RequestView]:
        """Who is kept back, in order of arrival."""


class StageView(Protocol):
    """One model of a cascade."""

    @property
    def model(self) -> str: ...
    @property
    def replicas(self) -> Sequence[ReplicaView]:
        """Those that are up."""


class CascadeView(Protocol):
    """What a cascade policy sees."""

    @property
    def now(self) -> float: ...
    @property
    def random(self) -> Random:
        """This policy's own named stream."""

    @property
    def stage(self) -> int:
        """Where the request is: the index of the model that answered; when it enters, 0."""

    @property
    def stages(self) -> Sequence[StageView]:
        """The cascade's models, the smallest first."""


class PoolCounts(Protocol):
    """Replicas that are alike, or combos that are: what they are, and how many. It counts in replicas, or in combos."""

    @property
    def name(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def gpu(self) -> str: ...
    @property
    def region(self) -> str: ...
    @property
    def usd_per_hour(self) -> float:
        """Price of one of them."""

    @property
    def gpus(self) -> Mapping[str, int]:
        """GPUs of one of them, by type."""

    @property
    def num_serving(self) -> int:
        """Those that are up and not draining."""

    @property
    def num_starting(self) -> int:
        """Those that have been asked for and are not up yet."""

    @property
    def num_down(self) -> int:
        """Those that have crashed and may come back. They serve nobody, and keep their GPUs."""

    @property
    def min_replicas(self) -> int: ...
    @property
    def max_replicas(self) -> int: ...


class PoolView(PoolCounts, Protocol):
    """A pool, or a kind of combo, as a scaler sees it."""

    @property
    def goodput_rps(self) -> float | None:
        """Of one of them, as profiled; None: not profiled."""

    @property
    def num_failed(self) -> int:
        """Those that were asked for and do not start: they are tried now and then, and are none of `num_starting`."""

    @property
    def num_queued(self) -> int:
        """Requests for its model that wait in front of all replicas, as there is no room at any."""

    @property
    def replicas(self) -> Sequence[ReplicaView]:
        """Those that are up, draining ones too."""


class PoolsView(Protocol):
    """What a scaler sees."""

    @property
    def now(self) -> float: ...
    @property
    def random(self) -> Random:
        """This policy's own named stream."""

    @property
    def pools(self) -> Sequence[PoolView]: ...
    @property
    def arrived(self) -> Mapping[tuple[str, str, int], tuple[int, int]]:
        """Requests and their prompt tokens since the start, by model asked for, region they came from, and tier."""
