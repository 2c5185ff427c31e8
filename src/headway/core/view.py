"""The views through which policies read state. Views are read-only, valid during the call, and computed on demand.

A driver may pass its own objects as views; a policy may use only the attributes declared here. Metrics reported by
engines (running and waiting requests, KV blocks) may be stale, as the fleet's scrape settings say (`control.observe`).
The gateway's own counts are never stale.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from typing import Any, Protocol, TypeVar

from headway.core.fleet import Role
from headway.core.request import Phase, Segment

T = TypeVar("T")
Bounds = tuple[float, float, float, float, Any]
"""Four numbers of a replica and its kind; see `FleetView.find_least_score`."""


class RequestView(Protocol):
    """One request, without its future."""

    @property
    def id(self) -> int:
        """Number in order of arrival, unique in a run."""

    @property
    def arrival_s(self) -> float:
        """Time of arrival, in seconds since the start of the run."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt; in a gateway, an estimate."""

    @property
    def model(self) -> str:
        """Name of the requested model; "" = the fleet's only model."""

    @property
    def tier(self) -> int:
        """Priority class. 0 is the most urgent."""

    @property
    def tier_since_s(self) -> float:
        """The time at which the request got its tier: its arrival, or its promotion by an admission policy."""

    @property
    def region(self) -> str:
        """Region that the request comes from; "" = unknown."""

    @property
    def tenant(self) -> str:
        """The sender: in a gateway, the name of its API key; "" = unknown."""

    @property
    def lora(self) -> str:
        """The LoRA adapter that answers; "" = the base model."""

    @property
    def session_id(self) -> int | None:
        """Session of a multi-turn request; None = no session."""

    @property
    def prefix(self) -> tuple[Segment, ...]:
        """Segments of the prompt with a content identity, in order; () = unknown."""

    @property
    def slo_ttft_s(self) -> float | None:
        """Target for the time to first token, in seconds; None = no target."""

    @property
    def slo_tpot_s(self) -> float | None:
        """Target for the time per output token, in seconds; None = no target."""

    @property
    def slo_e2e_s(self) -> float | None:
        """Target for the time to the last token, in seconds; None = no target."""

    @property
    def deadline_s(self) -> float | None:
        """Deadline for the last token, in seconds since the start of the run; None = no deadline."""

    @property
    def generated_tokens(self) -> int:
        """Output tokens so far, reasoning tokens included."""

    @property
    def answer_tokens(self) -> int:
        """Answer tokens so far, which follow the reasoning."""

    @property
    def phase(self) -> Phase:
        """Whether the request currently generates reasoning or its answer."""

    @property
    def turn(self) -> int:
        """Place in the round-robin order of a replica's requests: the lowest runs first. A new place is a higher
        number.

        It is set when the request joins a queue, after each quantum, and at each change announced by
        `SteppedOrdering.next_change_tokens`.
        """

    @property
    def attempt(self) -> int:
        """Number of times that the request was placed again after a crash or failure; 0 = the first attempt."""

    @property
    def replica(self) -> int:
        """Id of the replica of the last placement; -1 = none yet."""


class PlacedRequestView(RequestView, Protocol):
    """A request at a replica, as a migration policy sees it."""

    @property
    def is_running(self) -> bool:
        """Whether the request decodes, rather than waits or prefills."""

    @property
    def is_waiting(self) -> bool:
        """Whether the request waits in the replica's queue."""

    @property
    def has_kv(self) -> bool:
        """Whether the replica has KV of the request, on the GPU or in host memory; if not, a move costs nothing."""

    @property
    def is_moving(self) -> bool:
        """Whether a move of the request is in progress. Another move cannot begin before this move ends."""


class OracleRequestView(RequestView, Protocol):
    """A request with its future, for policies marked `oracle`. The gateway rejects such policies."""

    @property
    def output_tokens(self) -> int:
        """True output length, reasoning tokens included."""

    @property
    def reasoning_tokens(self) -> int:
        """True number of reasoning tokens."""

    @property
    def quality(self) -> tuple[tuple[str, float], ...]:
        """(model, score) pairs: the true quality of each model's answer, 0 to 100."""


class EngineTimes(Protocol):
    """The expected times of an engine, from the step-time model of its model, GPU and parallelism."""

    def prefill_s(self, tokens: int, /) -> float:
        """Seconds to compute this many prompt tokens on an otherwise idle engine."""

    def step_s(self, num_decoding: int, context_tokens: int, /) -> float:
        """Seconds of an iteration with this many decoding sequences and KV tokens in total."""


class ReplicaView(Protocol):
    """One replica: its identity and load."""

    @property
    def id(self) -> int:
        """Number of the replica in the fleet, from 0."""

    @property
    def pool(self) -> str:
        """Name of the pool that the replica belongs to."""

    @property
    def model(self) -> str:
        """Name of the model that the replica serves."""

    @property
    def gpu(self) -> str:
        """Name of the replica's GPU type."""

    @property
    def region(self) -> str:
        """Name of the replica's region; "" = no regions."""

    @property
    def role(self) -> Role:
        """The replica's current role: "mixed", "prefill" or "decode"."""

    @property
    def combo(self) -> int:
        """Number of the replica's combo. Replicas hand requests over only within their combo. A replica without a combo
        has a number of its own."""

    @property
    def is_single_phase(self) -> bool:
        """Whether the engine was started for prefill only or decode only, and cannot serve the other phase."""

    @property
    def is_shared(self) -> bool:
        """Whether other schedulers also place requests here. Counts include the other schedulers' requests. The ends of
        those requests are not reported."""

    @property
    def goodput_rps(self) -> float | None:
        """Requests per second that the replica's combo serves within the SLOs, as profiled; None = not profiled."""

    @property
    def times(self) -> EngineTimes | None:
        """The expected times of the replica's engine, one object for all equal replicas; None = unknown. The times come
        from a model, and are not corrected by observations.
        """

    @property
    def num_in_flight(self) -> int:
        """Requests placed here that have not ended. Never stale."""

    @property
    def num_waiting(self) -> int:
        """Requests in the engine's queue."""

    @property
    def num_running(self) -> int:
        """Requests in the engine's batch."""

    @property
    def max_num_seqs(self) -> int:
        """Maximum requests in the engine's batch."""

    @property
    def kv_blocks_used(self) -> int:
        """GPU KV blocks held by requests. Idle blocks of a prefix cache count as free."""

    @property
    def kv_blocks_total(self) -> int:
        """GPU KV blocks of the replica."""

    @property
    def block_size_tokens(self) -> int:
        """Tokens in one block of the engine's KV cache."""

    @property
    def kv_blocks_host(self) -> int:
        """KV blocks of preempted requests in host memory."""

    @property
    def head_demand_blocks(self) -> int:
        """KV blocks that the first waiting request needs to run; 0 = no request waits."""

    @property
    def loras(self) -> Collection[str]:
        """LoRA adapters that are probably in the engine's slots: the adapters of running requests, by the engine's
        metrics, and the adapters of the requests placed last."""

    @property
    def loras_waiting(self) -> Collection[str]:
        """LoRA adapters of requests in the engine's queue."""

    @property
    def max_loras(self) -> int:
        """Slots for LoRA adapters; 0 = the engine has no slots, or does not report them."""

    @property
    def num_by_tier(self) -> Mapping[int, int]:
        """Requests placed here, by tier; tiers without requests may be absent or 0."""

    @property
    def queue_lengths(self) -> Sequence[int]:
        """Number of requests placed at this replica in each queue of the ordering (`QueuedOrdering`). Other orderings
        have one queue."""

    @property
    def answers_on_pace(self) -> bool:
        """Whether every reader of an answer generated at this replica has unread tokens (`core.pacer`). Answers of
        `paused` requests are included."""

    @property
    def num_arriving(self) -> int:
        """Requests that are being moved here."""

    @property
    def is_draining(self) -> bool:
        """Whether the replica takes no new requests and stops when it is empty."""

    @property
    def requests(self) -> Sequence[PlacedRequestView]:
        """The requests placed here, unsorted. Takes linear time."""

    @property
    def paused(self) -> Sequence[RequestView]:
        """Requests that were paused at this replica to make room for other requests. They have no KV cache now, and are
        held until there is room."""

    @property
    def prefill_tokens_left(self) -> int:
        """Prompt tokens not computed yet, of all requests placed here."""

    @property
    def tokens_generated(self) -> int:
        """Output tokens so far, of all requests placed here."""

    def cached_tokens(self, request: RequestView, /) -> int:
        """Leading tokens of a request whose KV is in the GPU prefix cache, so the replica need not compute them.

        At least one token of a request is always computed. As stale as cache events are (`observe.cache`); without
        events, an estimate from the prompts placed here. Takes linear time in the prefix length.
        """

    @property
    def expected_cached_tokens(self) -> int:
        """The part of `prefill_tokens_left` that caches are expected to save.

        It sums the values that `cached_tokens` and `loadable_tokens` returned at the placement of requests whose
        prefill has not begun (in a gateway: that have no token yet).
        """

    def loadable_tokens(self, request: RequestView, /) -> int:
        """Tokens after `cached_tokens` that the replica can load from host memory or a shared store."""

    def kv_transfer_s(self, num_tokens: int, /) -> float:
        """Seconds to receive the KV of this many tokens from another replica over an idle network."""

    def latency_s(self, region: str, /) -> float:
        """Median seconds between a client in this region and the replica, each way; 0 if either region is unknown."""


class OracleReplicaView(ReplicaView, Protocol):
    """A replica with its requests' future, for policies marked `oracle`."""

    @property
    def output_tokens_left(self) -> int:
        """True number of remaining output tokens of all requests placed here."""


REPLICA_FIELDS = frozenset(name for name in dir(OracleReplicaView) if not name.startswith("_"))
"""The names of all fields of a replica's view. Views that pass a replica on, and the conformance kit, follow this
declaration."""


class PolicyView(Protocol):
    """The view that every policy gets: the time, and a stream of random numbers."""

    @property
    def now(self) -> float:
        """Seconds since the start of the run."""

    @property
    def random(self) -> Random:
        """The policy's own random stream."""


class FleetView(PolicyView, Protocol):
    """The view of routers and migration policies."""

    @property
    def replicas(self) -> Sequence[ReplicaView]:
        """For a router: the candidate replicas, at least one, in a fixed order. For a migration policy: all replicas of
        a model that are up, including draining replicas.
        """

    @property
    def wants_scores(self) -> bool:
        """Whether the driver may read the scores of the decision, so that the policy must return scores."""

    def map(self, key: Callable[[ReplicaView], T]) -> Sequence[T]:
        """`[key(replica) for replica in replicas]`; do not change it.

        A driver may cache values, and call `key` only for replicas that have changed since the last call with the same
        `key`. So `key` must be a stateless function of one replica's fields.
        """

    def find_least(self, key: Callable[[ReplicaView], Any], grows: bool = False) -> ReplicaView | None:
        """`min(replicas, key=key)`, if the driver knows it without reading all replicas; else None.

        `key` is a function as for `map`. `grows`: its value does not fall while the replica changes only by ticks, so
        that fewer replicas are read. On ties, the first replica in `replicas` is returned.
        """

    def find_least_score(
        self,
        bounds: Callable[[ReplicaView], Bounds],
        weights: tuple[float, float, float],
        score: Callable[[ReplicaView], float],
        falls: bool = False,
    ) -> ReplicaView | None:
        """The replica with the least `score`, if the driver finds it without reading all replicas; else None.

        `bounds`, a function like the key of `map`, returns four numbers and a kind. The first number plus the other
        numbers times their weights (0 or more) is a lower bound of the score. It must hold now, and as long as the
        replica changes only by ticks. Replicas of equal kind have equal numbers and equal scores, which do not fall as
        long as the replica changes only by ticks; None means no kind. What the policy learns changes only the weights:
        bounds and kinds hold before and after. `falls`: bounds and kinds hold only until the next tick, so that more
        of them are computed. On ties, the lowest id is returned.
        """


class UnkeptValues:
    """The part of a `FleetView` that returns replica values, for a view without a cache."""

    replicas: Sequence[Any]

    def map(self, key: Callable[[Any], T]) -> Sequence[T]:
        return [key(replica) for replica in self.replicas]

    def find_least(self, key: Callable[[Any], Any], grows: bool = False) -> None:
        """Always None: this view caches no values."""

    def find_least_score(
        self,
        bounds: Callable[[Any], Bounds],
        weights: tuple[float, float, float],
        score: Callable[[Any], float],
        falls: bool = False,
    ) -> None:
        """Always None: this view caches no values."""


class MigrationView(FleetView, Protocol):
    """The view of a migration policy."""

    def num_reasoning(self, replica: ReplicaView, /) -> int:
        """Number of reasoning requests placed or paused at a replica, without those that the ordering puts behind
        answers. Takes constant time if the ordering has queues at the replica, else linear time in the replica's
        requests.
        """


class AdmissionView(PolicyView, Protocol):
    """The view of an admission policy: one model's replicas and the requests held for them."""

    @property
    def replicas(self) -> Sequence[ReplicaView]:
        """The replicas that are up."""

    @property
    def held(self) -> Collection[RequestView]:
        """The requests that the policy holds, in order of arrival."""


class StageView(Protocol):
    """One model of a cascade."""

    @property
    def model(self) -> str:
        """Name of this stage's model."""

    @property
    def replicas(self) -> Sequence[ReplicaView]:
        """The model's replicas that are up."""


class CascadeView(PolicyView, Protocol):
    """The view of a cascade policy."""

    @property
    def stage(self) -> int:
        """Index of the stage that has answered; 0 when a request enters."""

    @property
    def stages(self) -> Sequence[StageView]:
        """The cascade's models, smallest first."""


class PoolCounts(Protocol):
    """One pool, or the combos of one name: price, limits and counts. The unit is a replica, or a combo."""

    @property
    def name(self) -> str:
        """Name of the pool or combo."""

    @property
    def model(self) -> str:
        """Name of the model that the pool serves."""

    @property
    def gpu(self) -> str:
        """Name of the GPU type; for a combo, of its first part."""

    @property
    def region(self) -> str:
        """Name of the region; "" = no regions."""

    @property
    def usd_per_hour(self) -> float:
        """Price of one unit, in USD per hour."""

    @property
    def gpus(self) -> Mapping[str, int]:
        """GPUs of one unit, by type."""

    @property
    def num_serving(self) -> int:
        """Units that are up and not draining."""

    @property
    def num_starting(self) -> int:
        """Units requested but not up yet."""

    @property
    def num_down(self) -> int:
        """Units that have crashed and may recover. They serve no requests and keep their GPUs."""

    @property
    def min_replicas(self) -> int:
        """Lower limit of scaling, in units."""

    @property
    def max_replicas(self) -> int:
        """Upper limit of scaling, in units."""


class PoolView(PoolCounts, Protocol):
    """One pool, or the combos of one name, as a scaler sees it."""

    @property
    def goodput_rps(self) -> float | None:
        """Requests per second that one combo serves within the SLOs, as profiled; None = not profiled."""

    @property
    def num_failed(self) -> int:
        """Requested units that fail to start. They are retried, and not counted in `num_starting`."""

    @property
    def num_queued(self) -> int:
        """Requests in the hold queue of the pool's model."""

    @property
    def replicas(self) -> Sequence[ReplicaView]:
        """The pool's replicas that are up. Draining replicas are included."""


class PoolsView(PolicyView, Protocol):
    """The view of a scaler: the pools, and the demand so far."""

    @property
    def pools(self) -> Sequence[PoolView]:
        """All pools, with combos counted as pools."""

    @property
    def arrived(self) -> Mapping[tuple[str, str, int], tuple[int, int]]:
        """(requests, prompt tokens) since the start, by (model, region of origin, tier)."""
