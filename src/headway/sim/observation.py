"""How and when policies see the replicas: scrapes, cache events, and messages between schedulers."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final

from headway.control.cache_index import CacheIndex, SchedulersIndex
from headway.control.control import Control
from headway.control.observe import CacheEvents, ReplicaViews, Scrape
from headway.core.view import ReplicaView
from headway.sim.kernel import TICK, Kernel
from headway.sim.replica import Replica
from headway.sim.schedulers import Schedulers

_SEND: Final = -(1 << 16)
_RECEIVE: Final = -(1 << 15)
"""Keys of schedulers' messages among the ticks of one instant."""


class Observation:
    """The views of the replicas, and the ticks that refresh them while `is_active(now)`."""

    __slots__ = ("_cache_events", "_control", "_is_active", "_kernel", "_schedulers", "_views")

    def __init__(
        self,
        scrape: Scrape,
        kernel: Kernel,
        control: Control,
        schedulers: Schedulers | None,
        is_active: Callable[[float], bool],
        seed: int,
    ) -> None:
        self._kernel, self._control, self._schedulers = kernel, control, schedulers
        self._is_active = is_active
        self._cache_events = CacheEvents(scrape.cache, Random(f"{seed}/cache events"))
        self._views = ReplicaViews((), scrape, Random(f"{seed}/scrape"))

    # The views.

    def add(self, replica: Replica) -> None:
        """Observe one more replica. Call it in order of ids, and before the replica's first request."""
        if self._cache_events.config.source != "exact":
            self._index_cache(replica)
        self._views.add(replica.view)

    def _index_cache(self, replica: Replica) -> None:
        """Set up how policies see a replica's prefix cache, by the scenario's observation settings."""
        config = self._cache_events.config
        source = config.source
        num, view = 1 if self._schedulers is None else self._schedulers.config.num, replica.view
        block, total = view.block_size_tokens, view.kv_blocks_total
        indexes = [CacheIndex(block, total, source == "placements", adds_placed=config.placed) for _ in range(num)]
        replica.placed.cache_index = index = indexes[0]
        if self._schedulers is not None:
            replica.placed.cache_index = index = shared = SchedulersIndex(indexes)
            self._schedulers.follow(shared)
        if source == "events":
            replica.batch.report_cache_changes()
            self._cache_events.add(index, view)

    def view(self, replica: Replica, scheduler: int) -> ReplicaView:
        """A replica as a scheduler sees it."""
        view: ReplicaView = self._views.views[replica.id]
        return view if self._schedulers is None else self._schedulers.view(scheduler, replica, view)

    @property
    def is_fresh(self) -> bool:
        """Whether there is one scheduler and every read is fresh."""
        return self._schedulers is None and not self._views.scrape_config.period_s

    # Ticks.

    def start(self) -> None:
        """Schedule the first scrape, the first cache events and each scheduler's first message."""
        if self._views.scrape_config.period_s:
            self._kernel.at(0.0, TICK, 0, self._scrape)
        if self._cache_events.config.source == "events":
            self._kernel.at(self._cache_events.config.period_s, TICK, -2, self._collect_cache_events)
        if self._schedulers is not None and self._schedulers.config.shared:
            for scheduler in range(self._schedulers.config.num):
                start_s = self._schedulers.first_s(scheduler)
                self._kernel.at(start_s, TICK, _SEND - scheduler, self._send_state, scheduler)

    def _scrape(self, now: float, _: Any) -> None:
        config = self._views.scrape_config
        if self._is_active(now):
            self._kernel.at(now + config.period_s, TICK, 0, self._scrape)
        self._kernel.at(now + config.delay_s, TICK, 1, self._show, self._views.scrape(now))

    def _show(self, now: float, samples: Any) -> None:
        self._views.show(samples)
        self._control.on_views_refreshed(now)

    def _collect_cache_events(self, now: float, _: Any) -> None:
        config = self._cache_events.config
        if self._is_active(now):
            self._kernel.at(now + config.period_s, TICK, -2, self._collect_cache_events)
        batches = self._cache_events.collect()
        if batches:
            self._kernel.at(now + config.delay_s, TICK, -1, self._apply_cache_events, batches)

    def _apply_cache_events(self, _: float, batches: Any) -> None:
        self._cache_events.apply(batches)

    def _send_state(self, now: float, scheduler: int) -> None:
        """Send a scheduler's loads to the other schedulers."""
        assert self._schedulers is not None
        config = self._schedulers.config
        if self._is_active(now):
            self._kernel.at(now + config.period_s, TICK, _SEND - scheduler, self._send_state, scheduler)
        self._schedulers.forget_silent(scheduler, now)
        if not self._schedulers.is_away(now):
            state = self._schedulers.state(scheduler)
            self._kernel.at(now + config.delay_s, TICK, _RECEIVE - scheduler, self._receive_state, (scheduler, state))

    def _receive_state(self, now: float, message: Any) -> None:
        assert self._schedulers is not None
        scheduler, state = message
        self._schedulers.receive(scheduler, state, now)
        self._control.on_views_refreshed(now)
