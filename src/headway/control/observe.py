"""The replica views that policies see: fresh, or as stale and lossy as scraped metrics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from random import Random
from typing import Any, Literal, Protocol, TypeVar

from msgspec import Struct, field

from headway.control.cache_index import CacheIndex, Change
from headway.control.changes import KEPT_FROM, Changes, KeptValues
from headway.control.recent_adapters import RecentAdapters
from headway.control.search import Search
from headway.core.errors import HeadwayError
from headway.core.policy import PhasedOrdering
from headway.core.request import Phase
from headway.core.view import REPLICA_FIELDS, Bounds, OracleReplicaView, PoolView, ReplicaView, RequestView

T = TypeVar("T")
_MOST_KEYS = 16
_ENGINE_METRICS = (
    "num_waiting",
    "num_running",
    "kv_blocks_used",
    "kv_blocks_host",
    "head_demand_blocks",
    "output_tokens_left",
)
"""Metrics that engines report. Every other value is the gateway's own count and always fresh."""
_LORA_METRICS = (*_ENGINE_METRICS, "loras_running", "loras_waiting")
"""Metrics reported by engines with LoRA slots."""


LEAST_PERIOD_S = 0.001
"""Minimum period; a shorter period would make a run endless."""


class CacheObservation(Struct, frozen=True, forbid_unknown_fields=True):
    """How policies learn the contents of the replicas' prefix caches."""

    source: Literal["exact", "events", "placements"] = "exact"
    """`exact`: read from the caches, without delay. `events`: from batches of the engines' cache events. `placements`:
    without events; a replica is assumed to cache the prompts placed there, up to its KV blocks."""
    period_s: float = 0.1
    """Time between two event batches of a replica."""
    delay_s: float = 0.0
    """Delay until policies see a batch."""
    placed: bool = True
    """With `events`. True: a prompt counts as cached from its placement until an event mentions it; from then on events
    decide. False: events alone decide."""
    loss: float = 0.0
    """Share of batches that are lost."""
    replay: bool = True
    """Whether a lost batch is detected and fetched with the next batch, as from vLLM's replay endpoint. Otherwise the
    index stays wrong until the same blocks change again."""

    def __post_init__(self) -> None:
        if self.period_s < LEAST_PERIOD_S or self.delay_s < 0 or not 0 <= self.loss < 1:
            raise HeadwayError("observe: cache: period_s must be 0.001 or more, delay_s >= 0, and loss in [0, 1)")


class SchedulersObservation(Struct, frozen=True, forbid_unknown_fields=True):
    """Several schedulers, as with several gateways. Each scheduler sees its own placements at once, and the other
    schedulers' placements by messages.

    Each request arrives at a random scheduler. Each scheduler has its own policies and hold queue.
    """

    num: int = 1
    period_s: float = 0.05
    """Time between two messages of a scheduler."""
    delay_s: float = 0.005
    """Delay until the other schedulers receive a message."""
    lease_s: float = 2.0
    """Time without a message after which a scheduler counts as gone and its load is ignored."""
    shared: bool = True
    """Whether the schedulers exchange messages at all."""
    away: tuple[tuple[float, float], ...] = ()
    """(start, end) of intervals without messages, such as outages of the shared store."""

    def __post_init__(self) -> None:
        if self.num < 1 or self.period_s < LEAST_PERIOD_S or self.delay_s < 0 or self.lease_s <= self.period_s:
            what = "num must be >= 1, period_s 0.001 or more, delay_s >= 0, and lease_s > period_s"
            raise HeadwayError(f"observe: schedulers: {what}")
        if any(start_s > end_s for start_s, end_s in self.away):
            raise HeadwayError("observe: schedulers: away: expected pairs of two times, the earlier one first")


class Scrape(Struct, frozen=True, forbid_unknown_fields=True):
    """How engine metrics reach the policies. With a period of 0, every read is fresh."""

    period_s: float = 0.0
    """Time between two scrapes."""
    delay_s: float = 0.0
    """Delay until policies see a scrape."""
    loss: float = 0.0
    """Share of a replica's scrapes that fail and keep the previous values."""
    cache: CacheObservation = field(default_factory=CacheObservation)
    """The source of the policies' knowledge of the prefix caches."""
    schedulers: SchedulersObservation = field(default_factory=SchedulersObservation)
    """Several schedulers, each with a delayed view of the other schedulers."""

    def __post_init__(self) -> None:
        if self.period_s and self.period_s < LEAST_PERIOD_S:
            raise HeadwayError("observe: period_s must be 0, or 0.001 or more")
        if self.delay_s < 0 or not 0 <= self.loss < 1:
            raise HeadwayError("observe: delay_s must be >= 0, and loss in [0, 1)")


class MutableFleetView:
    """Implements `core.view.MigrationView` with one object, whose attributes are set before every policy call."""

    __slots__ = ("_kept", "_searches", "changes", "now", "phased", "random", "replicas", "wants_scores")

    def __init__(self, random: Random, wants_scores: bool = True) -> None:
        self.now = 0.0
        self.random = random
        self.replicas: Sequence[ReplicaView] = ()
        self.wants_scores = wants_scores
        self.phased: PhasedOrdering | None = None
        """The ordering, if it has separate queues for reasoning requests."""
        self.changes: Changes | None = None
        """The list in which replicas note their changes; None: replicas note no changes."""
        self._kept: dict[tuple[Callable[[ReplicaView], Any], bool], KeptValues] = {}
        """Keyed by key, and whether its values only grow."""
        self._searches: dict[tuple[Callable[[ReplicaView], Bounds], bool], Search] = {}
        """Keyed by bounds, and whether ticks may lower the scores."""

    def num_reasoning(self, replica: ReplicaView, /) -> int:
        phased, lengths = self.phased, replica.queue_lengths
        if phased is None or len(lengths) != phased.num_queues:  # the ordering acts in front of the replicas
            return sum(map(self._reasons, [*replica.requests, *replica.paused]))
        return sum([lengths[queue] for queue in phased.reasoning_queues]) + sum(map(self._reasons, replica.paused))

    def _reasons(self, request: RequestView) -> bool:
        if request.phase is not Phase.REASONING:
            return False
        return self.phased is None or self.phased.queue(request) in self.phased.reasoning_queues

    def map(self, key: Callable[[ReplicaView], T]) -> Sequence[T]:
        replicas = self.replicas
        if self.changes is None or len(replicas) < KEPT_FROM:
            return [key(replica) for replica in replicas]
        return self._kept_by(key, self.changes, False).values(replicas, self.now)

    def find_least(self, key: Callable[[ReplicaView], Any], grows: bool = False) -> ReplicaView | None:
        replicas = self.replicas
        if self.changes is None or len(replicas) < KEPT_FROM:
            return None
        position = self._kept_by(key, self.changes, grows).first_least(replicas, self.now)
        return None if position < 0 else replicas[position]

    def find_least_score(
        self,
        bounds: Callable[[ReplicaView], Bounds],
        weights: tuple[float, float, float],
        score: Callable[[ReplicaView], float],
        falls: bool = False,
    ) -> ReplicaView | None:
        replicas = self.replicas
        if self.changes is None or len(replicas) < KEPT_FROM:
            return None
        search = self._searches.get((bounds, falls))
        if search is None:
            if len(self._searches) >= _MOST_KEYS:
                self._searches.clear()
            search = self._searches[bounds, falls] = Search(bounds, self.changes, falls)
        position = search.least(replicas, weights, score, self.now)
        return None if position < 0 else replicas[position]

    def _kept_by(self, key: Callable[[ReplicaView], Any], changes: Changes, grows: bool) -> KeptValues:
        kept = self._kept.get((key, grows))
        if kept is None:
            if len(self._kept) >= _MOST_KEYS:
                self._kept.clear()  # limits the memory if a policy defines new keys in each call
            kept = self._kept[key, grows] = KeptValues(key, changes, grows)
        return kept


class MutablePoolsView:
    """Implements `core.view.PoolsView` with one object, whose attributes are set before every policy call."""

    __slots__ = ("arrived", "now", "pools", "random")

    def __init__(self, random: Random) -> None:
        self.now = 0.0
        self.random = random
        self.pools: Sequence[PoolView] = ()
        self.arrived: dict[tuple[str, str, int], tuple[int, int]] = {}


class ObservedReplica(OracleReplicaView, Protocol):
    """A replica whose `loras` combine the gateway's own knowledge and the engine's."""

    @property
    def recent_loras(self) -> RecentAdapters: ...
    @property
    def loras_running(self) -> Collection[str]:
        """Adapters of requests in the engine's batch."""


View: Any = object
"""The base of views that `passing_on` completes, whose fields the type checker does not know."""


def passing_on(without: Collection[str] = ()) -> Callable[[type[T]], type[T]]:
    """A class decorator: adds properties that read the missing fields of `core.view.OracleReplicaView` from
    `_replica`.

    `without`: fields that the class's instances set, so that no property is added.
    """

    def complete(view: type[T]) -> type[T]:
        for name in REPLICA_FIELDS - vars(view).keys() - set(without):
            setattr(view, name, property(attrgetter(f"_replica.{name}")))
        return view

    return complete


_CONSTANT = (
    "id", "pool", "model", "gpu", "region", "combo", "max_num_seqs", "kv_blocks_total", "block_size_tokens",
)  # fmt: skip
"""Attributes that never change, copied because they are read often."""


@passing_on(without=(*_CONSTANT, *_LORA_METRICS))
class ScrapedReplica(View):  # type: ignore[misc]  # of Any
    """A replica whose engine metrics are those of the last scrape. Counts of the gateway itself are always fresh.

    Implements `core.view.OracleReplicaView`.
    """

    def __init__(self, replica: ObservedReplica) -> None:
        self._replica = replica
        for name in _CONSTANT:
            setattr(self, name, getattr(replica, name))
        for name in _ENGINE_METRICS:
            setattr(self, name, 0)
        self.loras_running: Collection[str] = ()
        self.loras_waiting: Collection[str] = ()
        self._metrics = _LORA_METRICS if replica.max_loras else _ENGINE_METRICS
        self.seen_s = float("-inf")
        """Time of the last visible scrape."""

    @property
    def loras(self) -> Collection[str]:
        return {*self._replica.recent_loras.names, *self.loras_running}

    def sample(self, now: float) -> dict[str, Any]:
        """The engine's current metrics, with the time `now`."""
        return {name: getattr(self._replica, name) for name in self._metrics} | {"seen_s": now}

    def show(self, sample: dict[str, Any]) -> None:
        """Make a scrape visible to policies."""
        for name, value in sample.items():
            setattr(self, name, value)


class ReplicaViews:
    """The views of a fleet's replicas. With a scrape period, the driver calls `scrape` and `show` on every tick."""

    def __init__(self, replicas: Sequence[ObservedReplica], scrape: Scrape, random: Random) -> None:
        self.scrape_config = scrape
        self._random = random
        self._scraped: list[ScrapedReplica] = []
        self.views: list[OracleReplicaView] = []
        for replica in replicas:
            self.add(replica)

    def add(self, replica: ObservedReplica) -> OracleReplicaView:
        """Create and return the view of one more replica."""
        view: OracleReplicaView = replica
        if self.scrape_config.period_s:
            view = ScrapedReplica(replica)
            self._scraped.append(view)
        self.views.append(view)
        return view

    def scrape(self, now: float = 0.0) -> list[tuple[ScrapedReplica, dict[str, Any]]]:
        """Scrape every replica; pass the result to `show` after the delay."""
        loss = self.scrape_config.loss
        return [(r, r.sample(now)) for r in self._scraped if not loss or self._random.random() >= loss]

    @staticmethod
    def show(samples: list[tuple[ScrapedReplica, dict[str, Any]]]) -> None:
        """Make scrapes visible to policies."""
        for replica, sample in samples:
            replica.show(sample)


class EventSource(Protocol):
    """An engine that reports changes of its prefix cache."""

    def cache_changes(self) -> list[Change]:
        """The changes since the last call."""


Batch = tuple[CacheIndex, list[Change]]


class CacheEvents:
    """Passes batches of cache events from engines to indexes. The driver calls `collect`, and later `apply`."""

    def __init__(self, config: CacheObservation, random: Random) -> None:
        self.config = config
        self._random = random
        self._feeds: list[tuple[CacheIndex, EventSource]] = []
        self._lost: dict[int, list[Change]] = {}
        """Maps each feed to lost batches to fetch again."""

    def add(self, index: CacheIndex, source: EventSource) -> None:
        self._feeds.append((index, source))

    def collect(self) -> list[Batch]:
        """The current batches that are not lost; pass them to `apply` after the delay."""
        loss, replay = self.config.loss, self.config.replay
        batches = []
        for number, (index, source) in enumerate(self._feeds):
            changes = [*self._lost.pop(number, ()), *source.cache_changes()]
            if not changes:
                continue
            if not loss or self._random.random() >= loss:
                batches.append((index, changes))
            elif replay:
                self._lost[number] = changes
        return batches

    @staticmethod
    def apply(batches: list[Batch]) -> None:
        for index, changes in batches:
            index.apply(changes)
