"""Builds what policies see: fresh, or as stale and lossy as a fleet's scraped metrics are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.core.fleet import Role
from headway.core.view import OracleReplicaView, PlacedRequestView, PoolView, ReplicaView

_LOADS = (
    "num_waiting", "num_running", "kv_blocks_used", "kv_blocks_host", "head_demand_blocks", "output_tokens_left",
)  # fmt: skip
"""What an engine tells of itself. What passes through the gateway, requests and their tokens, it counts itself."""
_SHOWN = (*_LOADS, "seen_s")


class Scrape(Struct, frozen=True, forbid_unknown_fields=True):
    """How metrics reach the policies. A period of 0: every read is fresh. Requests in flight, the prompts among them
    that are not computed yet, and tokens so far are the gateway's own counts, and always fresh."""

    period_s: float = 0.0
    """Time between two scrapes."""
    delay_s: float = 0.0
    """From the scrape to its being visible."""
    loss: float = 0.0
    """Share of scrapes of a replica that fail; the last values stay."""

    def __post_init__(self) -> None:
        if self.period_s < 0 or self.delay_s < 0 or not 0 <= self.loss < 1:
            raise HeadwayError("observe: period_s and delay_s must be >= 0, and loss in [0, 1)")


class View:
    """`core.view.FleetView`: one object, refilled for every call."""

    __slots__ = ("now", "random", "replicas")

    def __init__(self, random: Random) -> None:
        self.now = 0.0
        self.random = random
        self.replicas: Sequence[ReplicaView] = ()


class FleetOfPools:
    """`core.view.PoolsView`: one object, refilled for every call."""

    __slots__ = ("arrived", "now", "pools", "random")

    def __init__(self, random: Random) -> None:
        self.now = 0.0
        self.random = random
        self.pools: Sequence[PoolView] = ()
        self.arrived: dict[tuple[str, str, int], tuple[int, int]] = {}


class ScrapedReplica:
    """A replica as last scraped. What the placer knows itself, who is there and how far they are, is always fresh."""

    def __init__(self, replica: OracleReplicaView) -> None:
        self._replica = replica
        self.id, self.pool, self.model = replica.id, replica.pool, replica.model
        self.gpu, self.region = replica.gpu, replica.region
        self.combo, self.goodput_rps = replica.combo, replica.goodput_rps
        self.max_num_seqs, self.kv_blocks_total = replica.max_num_seqs, replica.kv_blocks_total
        self.block_size_tokens = replica.block_size_tokens
        self.num_waiting = self.num_running = self.kv_blocks_used = self.kv_blocks_host = self.head_demand_blocks = 0
        self.output_tokens_left = 0
        self.seen_s = float("-inf")
        """When this load was read."""

    @property
    def num_in_flight(self) -> int:
        """Placed here and not yet ended."""
        return self._replica.num_in_flight

    @property
    def role(self) -> Role:
        """What it is for at present."""
        return self._replica.role

    @property
    def num_by_tier(self) -> Mapping[int, int]:
        """The same, by tier."""
        return self._replica.num_by_tier

    @property
    def queue_lengths(self) -> Sequence[int]:
        """The same, by the ordering's queue."""
        return self._replica.queue_lengths

    @property
    def num_arriving(self) -> int:
        """Moves under way to it."""
        return self._replica.num_arriving

    @property
    def is_draining(self) -> bool:
        """It takes nothing new."""
        return self._replica.is_draining

    @property
    def requests(self) -> Sequence[PlacedRequestView]:
        """Who is placed here."""
        return self._replica.requests

    @property
    def prefill_tokens_left(self) -> int:
        """Of prompts that are not computed yet."""
        return self._replica.prefill_tokens_left

    @property
    def tokens_generated(self) -> int:
        """Of who is placed here."""
        return self._replica.tokens_generated

    @property
    def answers_on_pace(self) -> bool:
        """Every reader of an answer still has tokens to read."""
        return self._replica.answers_on_pace

    def sample(self, now: float) -> tuple[float, ...]:
        """The load right now, and when that is."""
        return *(getattr(self._replica, name) for name in _LOADS), now

    def show(self, sample: tuple[float, ...]) -> None:
        """Make a sample visible."""
        for name, value in zip(_SHOWN, sample, strict=True):
            setattr(self, name, value)


class Observer:
    """The views of a fleet's replicas. With a scrape period, the driver calls `scrape` on every tick."""

    def __init__(self, replicas: Sequence[OracleReplicaView], scrape: Scrape, random: Random) -> None:
        self.scrape_config = scrape
        self._random = random
        self._scraped: list[ScrapedReplica] = []
        self.views: list[OracleReplicaView] = []
        for replica in replicas:
            self.add(replica)

    def add(self, replica: OracleReplicaView) -> OracleReplicaView:
        """One more replica; returns its view."""
        if self.scrape_config.period_s:
            scraped = ScrapedReplica(replica)
            self._scraped.append(scraped)
            self.views.append(scraped)
        else:
            self.views.append(replica)
        return self.views[-1]

    def scrape(self, now: float = 0.0) -> list[tuple[ScrapedReplica, tuple[float, ...]]]:
        """Sample every replica; hand the result to `show` once the delay is over."""
        loss = self.scrape_config.loss
        return [(r, r.sample(now)) for r in self._scraped if not loss or self._random.random() >= loss]

    @staticmethod
    def show(samples: list[tuple[ScrapedReplica, tuple[float, ...]]]) -> None:
        """Make samples visible."""
        for replica, sample in samples:
            replica.show(sample)
