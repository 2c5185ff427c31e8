"""Health of replicas: probes, load metrics and one circuit breaker per replica.

A breaker opens at once when a connection cannot be opened or is broken off, when health checks fail, and after several
failed requests in a row; then the replica gets no requests. After a pause, which doubles each time and is zero at first
after a broken connection, a probe is sent: the health check and, if requests had failed, a canary completion of one
token. The breaker closes only if all of the probe succeeds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from headway.gateway.errors import logged
from headway.gateway.settings import Settings
from headway.gateway.upstream.dialects import Load
from headway.gateway.upstream.engine import EngineEndpoint
from headway.gateway.upstream.errors import BrokenOffError, EngineError, RefusedError, UnreachableError

log = logging.getLogger("headway.gateway")
MAX_FAILURES = 3
"""Failures in a row that open the breaker."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.25, 5.0
Replica = TypeVar("Replica", bound=EngineEndpoint)


class Breaker:
    """One replica's circuit breaker, open until the replica's first successful probe."""

    def __init__(self) -> None:
        self.is_open = True
        self.num_failures = self.num_failed_probes = 0
        """In a row."""
        self.pause_s = MIN_PAUSE_S
        self.needs_canary = False
        """Requests had failed, so a health check alone does not close the breaker."""
        self.probe_now = False
        """The next probe is sent without a pause."""

    def failed(self, error: EngineError) -> bool:
        """Count a failed request. Returns True if the breaker opens because of it."""
        if not (isinstance(error, RefusedError) and error.status in (408, 429)):
            self.num_failures += 1
        if self.is_open or not (isinstance(error, UnreachableError) or self.num_failures >= MAX_FAILURES):
            return False
        self.needs_canary = not isinstance(error, UnreachableError)
        self.is_open = True
        return True

    def succeeded(self) -> None:
        """Reset the failure count and the pause."""
        self.num_failures = 0
        self.pause_s = MIN_PAUSE_S

    def next_pause_s(self) -> float:
        """The time until the next probe of an open breaker, doubled with each call."""
        pause_s, self.pause_s = self.pause_s, min(2 * self.pause_s, MAX_PAUSE_S)
        return pause_s


class HealthMonitor(Generic[Replica]):
    """Probes all replicas and keeps their breakers.

    `on_up` and `on_down` are called when a breaker closes and opens, `on_unresponsive` after `on_down` if health checks
    failed, and `on_load` when metrics were read.
    """

    def __init__(
        self,
        replicas: list[Replica],
        settings: Settings,
        on_up: Callable[[Replica], None],
        on_down: Callable[[EngineEndpoint], None],
        on_unresponsive: Callable[[Replica], None],
        on_load: Callable[[Replica, Load], None],
    ) -> None:
        self.replicas = list(replicas)
        self._settings = settings
        self._on_up, self._on_down, self._on_unresponsive, self._on_load = on_up, on_down, on_unresponsive, on_load
        self.breakers = {replica.id: Breaker() for replica in replicas}
        self._failures = {replica.id: asyncio.Event() for replica in replicas}
        """Set when a request fails: the next probe is due."""
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def start(self) -> None:
        for replica in self.replicas:
            self._tasks[replica.id] = asyncio.create_task(self._monitor(replica))

    def add(self, replica: Replica) -> None:
        """Start to monitor a replica, which is down until its first probe."""
        self.replicas.append(replica)
        self.breakers[replica.id], self._failures[replica.id] = Breaker(), asyncio.Event()
        self._tasks[replica.id] = asyncio.create_task(self._monitor(replica))

    def remove(self, replica: Replica) -> None:
        """Stop monitoring a replica; it is down from now on."""
        self._tasks.pop(replica.id).cancel()
        self.replicas.remove(replica)
        self.breakers[replica.id].is_open = True
        self._on_down(replica)

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def is_up(self, replica: EngineEndpoint) -> bool:
        return not self.breakers[replica.id].is_open

    def failed(self, replica: EngineEndpoint, error: EngineError) -> None:
        """Report a failed request, which may open the breaker."""
        breaker = self.breakers[replica.id]
        if breaker.failed(error):
            self._report_down(replica, error)
        elif isinstance(error, BrokenOffError) and self.is_up(replica):
            # The engine may have died. A probe tells before another request fails.
            breaker.is_open = breaker.probe_now = True
            self._report_down(replica, error)
        self._failures[replica.id].set()

    def succeeded(self, replica: EngineEndpoint) -> None:
        """Report an answered request, which resets the failure count."""
        self.breakers[replica.id].succeeded()

    def _report_down(self, replica: EngineEndpoint, error: EngineError) -> None:
        log.warning("%s at %s is down: %s", replica.name, replica.url, error)
        self._on_down(replica)

    async def _monitor(self, replica: Replica) -> None:
        """Probe a replica for ever: at an interval, and soon after a request failed."""
        breaker, failure = self.breakers[replica.id], self._failures[replica.id]
        while True:
            failure.clear()
            with logged(f"{replica.name}: a callback of the health monitor failed"):
                await self._probe_and_count(replica, breaker)
            interval_s = MIN_PAUSE_S if breaker.num_failed_probes else self._settings.scrape_period_s
            pause_s = breaker.next_pause_s() if breaker.is_open else interval_s
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await failure.wait()
                    await asyncio.sleep(MIN_PAUSE_S if breaker.is_open and not breaker.probe_now else 0)
            breaker.probe_now = False

    async def _probe_and_count(self, replica: Replica, breaker: Breaker) -> None:
        try:
            await self._probe(replica, breaker)
        except EngineError as error:
            breaker.num_failed_probes += 1
            is_gone = isinstance(error, UnreachableError) or breaker.num_failed_probes >= MAX_FAILURES
            if not breaker.is_open and is_gone:
                breaker.is_open = True
                self._report_down(replica, error)
                self._on_unresponsive(replica)
        else:
            breaker.num_failed_probes = 0

    async def _probe(self, replica: Replica, breaker: Breaker) -> None:
        """Check health, read details and load; if all is well, close the breaker. EngineError if not."""
        timeout_s = self._settings.probe_timeout_s
        await replica.check_health(timeout_s)
        if replica.reported_model is None or breaker.is_open:
            await replica.read_details(timeout_s)
        if (load := await replica.read_load(timeout_s)) is not None:
            self._on_load(replica, load)
        if not breaker.is_open:
            return
        if breaker.needs_canary:
            await replica.run_canary(timeout_s)
            breaker.num_failures = 0
        if self._failures[replica.id].is_set():
            return  # a request failed during the probe, which may have been answered before
        breaker.is_open = breaker.needs_canary = False
        model = replica.reported_model or "the requested model"
        log.info("%s at %s is up, and serves %s", replica.name, replica.url, model)
        self._on_up(replica)
