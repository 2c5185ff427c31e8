"""Requests and fleets made by hand, for tests of policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import strategies as st

from headway.core.record import Ended, Outcome
from headway.core.request import Phase, Segment
from headway.core.view import REPLICA_FIELDS, UnkeptValues


@dataclass
class FakeRequest:
    """`core.view.OracleRequestView`."""

    id: int = 0
    arrival_s: float = 0.0
    prompt_tokens: int = 100
    model: str = ""
    tier: int = 0
    region: str = ""
    session_id: int | None = None
    prefix: tuple[Segment, ...] = ()
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    slo_e2e_s: float | None = None
    deadline_s: float | None = None
    generated_tokens: int = 0
    answer_tokens: int = 0
    phase: Phase = Phase.ANSWERING
    turn: int = 0
    attempt: int = 0
    replica: int = -1
    output_tokens: int = 100
    reasoning_tokens: int = 0
    tenant: str = ""
    lora: str = ""
    promoted_s: float | None = None

    @property
    def tier_since_s(self) -> float:
        return self.arrival_s if self.promoted_s is None else self.promoted_s


@dataclass
class FakePlaced(FakeRequest):
    """`core.view.PlacedRequestView`."""

    is_running: bool = True
    is_waiting: bool = False
    has_kv: bool = True
    is_moving: bool = False


@dataclass
class FakeReplica:
    """`core.view.OracleReplicaView`."""

    id: int = 0
    num_in_flight: int = 0
    num_waiting: int = 0
    num_running: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 1000
    prefill_tokens_left: int = 0
    tokens_generated: int = 0
    output_tokens_left: int = 0
    max_num_seqs: int = 256
    pool: str = "main"
    model: str = ""
    gpu: str = ""
    region: str = ""
    block_size_tokens: int = 16
    kv_blocks_host: int = 0
    head_demand_blocks: int = 0
    num_by_tier: dict[int, int] = field(default_factory=dict)
    queue_lengths: Sequence[int] = (0,)
    answers_on_pace: bool = True
    num_arriving: int = 0
    is_draining: bool = False
    requests: Sequence[FakePlaced] = ()
    paused: Sequence[FakeRequest] = ()
    role: str = "mixed"
    combo: int = 0
    goodput_rps: float | None = None
    is_single_phase: bool = False
    is_shared: bool = False
    times: Any = None
    loras: Sequence[str] = ()
    loras_waiting: Sequence[str] = ()
    max_loras: int = 0
    expected_cached_tokens: int = 0
    cached: dict[int, int] = field(default_factory=dict)
    """Cached tokens by request."""
    loadable: dict[int, int] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        """0, or False, for fields that are not among these."""
        if name in REPLICA_FIELDS:
            return 0
        raise AttributeError(name)

    def cached_tokens(self, request: Any, /) -> int:
        return self.cached.get(request.id, 0)

    def loadable_tokens(self, request: Any, /) -> int:
        return self.loadable.get(request.id, 0)

    def kv_transfer_s(self, num_tokens: int, /) -> float:
        return num_tokens * 1e-5

    def latency_s(self, region: str, /) -> float:
        return 0.05 if region and self.region and region != self.region else 0.0


@dataclass
class FakeFleet(UnkeptValues):
    """`core.view.MigrationView`."""

    replicas: Sequence[Any]
    now: float = 0.0
    random: Random = field(default_factory=lambda: Random(0))
    wants_scores: bool = True
    reasoning_queues: Sequence[int] = (0,)

    def num_reasoning(self, replica: Any, /) -> int:
        return sum(replica.queue_lengths[queue] for queue in self.reasoning_queues)


@dataclass
class FakePool:
    """`core.view.PoolView`."""

    name: str = "main"
    replicas: Sequence[FakeReplica] = ()
    num_starting: int = 0
    min_replicas: int = 1
    max_replicas: int = 10
    model: str = ""
    gpu: str = ""
    region: str = ""
    goodput_rps: float | None = None
    usd_per_hour: float = 1.0
    gpus: dict[str, int] = field(default_factory=dict)
    num_queued: int = 0
    num_down: int = 0
    num_failed: int = 0

    @property
    def num_serving(self) -> int:
        return sum(not replica.is_draining for replica in self.replicas)


@dataclass
class FakePools:
    """`core.view.PoolsView`."""

    pools: Sequence[FakePool]
    now: float = 0.0
    arrived: dict[tuple[str, str, int], tuple[int, int]] = field(default_factory=dict)
    random: Random = field(default_factory=lambda: Random(0))


def fleet(*in_flight: int) -> FakeFleet:
    """Replicas 0, 1, ... with this many requests in flight."""
    return FakeFleet([FakeReplica(i, num_in_flight=n, num_running=n) for i, n in enumerate(in_flight)])


def finished(generated_tokens: int, outcome: Outcome = Outcome.FINISHED) -> Ended:
    """A request that ended with this many output tokens."""
    return Ended(0, outcome, "", 0, 0, 0.0, 1.0, 2.0, 10, generated_tokens)


counts = st.one_of(st.integers(0, 4), st.integers(0, 10**6))
fleets = st.lists(
    st.builds(
        FakeReplica,
        num_in_flight=counts,
        num_waiting=counts,
        num_running=counts,
        kv_blocks_used=st.integers(0, 1000),
        prefill_tokens_left=counts,
        tokens_generated=counts,
        output_tokens_left=counts,
    ),
    min_size=1,
    max_size=12,
).map(lambda replicas: FakeFleet([numbered(replica, i) for i, replica in enumerate(replicas)]))


def numbered(replica: FakeReplica, id: int) -> FakeReplica:
    """The replica, with this id."""
    replica.id = id
    return replica
