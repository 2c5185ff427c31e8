"""Health of replicas: probes, load metrics and one circuit breaker per replica.

A breaker opens at once when a connection cannot be opened or is broken off, when health checks fail, and after several
failed requests in a row; then the replica gets no requests. After a pause, a probe is sent. The pause doubles each
time, and is zero at first after a broken connection. The probe is the health check. If requests had failed, the probe
is also a canary completion of one token. If streams had broken, the canary completion is a stream with more tokens than
the broken streams had. The breaker closes only if the whole probe succeeds.

A replica whose breaker is closed may still be ejected (`outliers`), or be suspected of generating nothing
(`scheduling.stalls`): then a canary decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import monotonic
from typing import Generic, Protocol, TypeVar

from headway import catalog
from headway.core.errors import HeadwayError
from headway.gateway.errors import logged
from headway.gateway.settings import Settings
from headway.gateway.upstream.dialects import Load
from headway.gateway.upstream.engine import EngineEndpoint
from headway.gateway.upstream.errors import (
    NOT_IMPLEMENTED,
    BrokenOffError,
    EngineError,
    ExhaustedError,
    RefusedError,
    UnreachableError,
)
from headway.gateway.upstream.outliers import Ejection, OutlierDetector

log = logging.getLogger("headway.gateway")
MAX_FAILURES = 3
"""Number of failures in a row that opens the breaker."""
TRUSTED_REFUSALS = 3
"""Number of refusals that are attributed to the request after another replica has confirmed one, because each
confirmation takes time."""
_ALWAYS_CONFIRMED = frozenset((401, 403, 404, 405, NOT_IMPLEMENTED))
_MORE_TOKENS, _MAX_CANARY_TOKENS = 8, 256
"""(number of tokens that a canary has in addition to the most tokens that broken streams had, maximum number of a
canary's tokens)."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.25, 5.0
_PROBES_BEFORE_NOTE = 5
"""Number of failed probes, in about four seconds, after which the log reports that a new replica is not up yet."""
_HOSTED_PERIOD_S = 30.0
"""Time between two probes of a hosted service. Such services limit their customers' requests."""
Replica = TypeVar("Replica", bound=EngineEndpoint)


def _is_overload(error: EngineError) -> bool:
    return isinstance(error, RefusedError) and error.status in (408, 429)


def _group(replica: EngineEndpoint) -> tuple[str, str]:
    """The group of replicas that serve the same requests on the same hardware."""
    return replica.pool, str(getattr(replica, "role", "mixed"))


def _other_model(replica: EngineEndpoint) -> str | None:
    """The engine's model, if the catalog knows that it is not the pool's model. Any other name may be an alias."""
    try:
        served, wanted = catalog.model(replica.reported_model or replica.model), catalog.model(replica.model)
    except HeadwayError:
        return None
    return served.name if served.name != wanted.name else None


class Refusals:
    """Decides whether a refusal (4xx) is caused by the request or by the replica. Another replica confirms that the
    request is the cause."""

    def __init__(self) -> None:
        self._num_trusted: dict[int, int] = {}
        """Maps each replica to the number of refusals that are still relayed without a second attempt."""

    def needs_confirmation(self, replica: EngineEndpoint, status: int) -> bool:
        """Whether to try another replica when one has refused a request.

        The gateway has already checked key, path and model, so an engine's objection to these is always confirmed.
        Other refusals are confirmed unless other replicas have confirmed this replica's last refusals.
        """
        num_trusted = self._num_trusted.get(replica.id, 0)
        if status in _ALWAYS_CONFIRMED or not num_trusted:
            return True
        self._num_trusted[replica.id] = num_trusted - 1
        return False

    def confirmed(self, replica: EngineEndpoint) -> None:
        """Another replica has refused the same request."""
        self._num_trusted[replica.id] = TRUSTED_REFUSALS


class HealthReports(Protocol):
    """The interface for relays' reports on how replicas handled requests. Implemented by the health monitor, and by a
    client that sends the reports to the monitor."""

    def failed(self, replica: EngineEndpoint, error: EngineError) -> None: ...
    def succeeded(self, replica: EngineEndpoint) -> None: ...
    def needs_confirmation(self, replica: EngineEndpoint, status: int) -> bool:
        """Report a refused request. Returns whether to try another replica."""

    def refusal_confirmed(self, replica: EngineEndpoint) -> None:
        """Another replica has refused the same request."""

    def has_other(self, replica: EngineEndpoint) -> bool:
        """Whether another replica of the model may be up."""


class Breaker:
    """One replica's circuit breaker, open until the replica's first successful probe."""

    def __init__(self) -> None:
        self.is_open = True
        self.num_failures = self.num_failed_probes = 0
        """Failures in a row."""
        self.pause_s = MIN_PAUSE_S
        self.needs_canary = False
        """Whether requests had failed, so that a health check alone does not close the breaker."""
        self.canary_tokens = 1
        """Number of tokens of a canary that proves that the replica serves."""
        self.probe_now = False
        """Whether the next probe is sent without a pause."""
        self.passes_health = False
        """Whether the current probe has passed the health check."""
        self.is_lost = False
        """Whether the replica cannot be reached, or its last health check has failed."""
        self.why = ""
        """The last error; empty if there was none."""

    def failed(self, error: EngineError) -> bool:
        """Count a failed request. Returns True if the breaker opens because of it."""
        self.num_failures += 1
        self.why = str(error)
        self.is_lost |= isinstance(error, UnreachableError)
        if error.after_tokens:
            tokens = min(error.after_tokens + _MORE_TOKENS, _MAX_CANARY_TOKENS)
            self.canary_tokens = max(self.canary_tokens, tokens)
        if self.is_open or not (isinstance(error, UnreachableError) or self.num_failures >= MAX_FAILURES):
            return False
        self.needs_canary = not isinstance(error, UnreachableError)
        self.is_open = True
        return True

    def next_pause_s(self) -> float:
        """The time until the next probe of an open breaker, doubled with each call."""
        pause_s, self.pause_s = self.pause_s, min(2 * self.pause_s, MAX_PAUSE_S)
        return pause_s


async def _pause(failure: asyncio.Event, breaker: Breaker, pause_s: float) -> None:
    """Wait for the next probe: for `pause_s`, or until a short time after a request has failed. The timer sets the
    failure's event, because a timeout of the wait would cost an exception for each probe."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + pause_s
    timer = loop.call_at(end_s, failure.set)
    try:
        await failure.wait()
        left_s = end_s - loop.time()
        if left_s > 0 and breaker.is_open and not breaker.probe_now:
            await asyncio.sleep(min(left_s, MIN_PAUSE_S))
    finally:
        timer.cancel()


class HealthMonitor(Generic[Replica]):
    """Probes all replicas and keeps their breakers.

    `on_up` and `on_down` are called when a replica starts and stops getting requests. `on_unresponsive` is called after
    `on_down` if health checks failed or the replica generates nothing. `on_load` is called when metrics were read.
    `on_ejection` is called when replicas are ejected, and when they return, before `on_up`.
    """

    def __init__(
        self,
        replicas: list[Replica],
        settings: Settings,
        on_up: Callable[[Replica], None],
        on_down: Callable[[EngineEndpoint], None],
        on_unresponsive: Callable[[Replica], None],
        on_load: Callable[[Replica, Load], None],
        on_ejection: Callable[[Replica, str, str], None] = lambda replica, reason, why: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`on_ejection(replica, reason, why)`; an empty reason means that the replica returns."""
        self.replicas = list(replicas)
        self._settings, self._on_ejection, self._now = settings, on_ejection, clock
        self.outliers = OutlierDetector(settings.outliers)
        self._refusals = Refusals()
        self._checks: dict[int, asyncio.Task[None]] = {}
        """Canaries of suspected replicas."""
        self._on_up, self._on_down, self._on_unresponsive, self._on_load = on_up, on_down, on_unresponsive, on_load
        self.breakers = {replica.id: Breaker() for replica in replicas}
        for replica in replicas:
            self.outliers.add(replica.id, _group(replica))
        self._failures = {replica.id: asyncio.Event() for replica in replicas}
        """Events that are set when a request fails, so that the next probe is due."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._is_exhausted = False
        """Whether the log says already that this process cannot probe replicas at the moment."""
        self._listed_s: dict[int, float] = {}
        """Maps each replica to the time at which it was last asked for its models and adapters."""

    def use(self, settings: Settings) -> None:
        """Use these settings from now on."""
        self._settings = settings
        self.outliers.settings = settings.outliers

    def start(self) -> None:
        for replica in self.replicas:
            self._tasks[replica.id] = asyncio.create_task(self._monitor(replica))

    def add(self, replica: Replica) -> None:
        """Start to monitor a replica. It counts as down until its first probe."""
        self.replicas.append(replica)
        self.outliers.add(replica.id, _group(replica))
        self.breakers[replica.id], self._failures[replica.id] = Breaker(), asyncio.Event()
        self._tasks[replica.id] = asyncio.create_task(self._monitor(replica))

    def remove(self, replica: Replica) -> None:
        """Stop monitoring a replica; it is down from now on."""
        self._tasks.pop(replica.id).cancel()
        self.replicas.remove(replica)
        self.outliers.remove(replica.id)
        self.breakers[replica.id].is_open = True
        self._on_down(replica)

    async def stop(self) -> None:
        tasks = [*self._tasks.values(), *self._checks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def is_up(self, replica: EngineEndpoint) -> bool:
        """Whether the replica gets requests: it passes its health checks, and is not ejected."""
        return not self.breakers[replica.id].is_open and not self.outliers.is_ejected(replica.id)

    def why_down(self, replica: EngineEndpoint) -> str:
        """The last error of a replica that fails its probes. Empty if there was no error, or the replica passes its
        probes."""
        breaker = self.breakers[replica.id]
        return breaker.why if breaker.is_open else ""

    def is_lost(self, replica: EngineEndpoint) -> bool:
        """Whether the replica cannot be reached, or fails its health checks."""
        return self.breakers[replica.id].is_lost

    def is_ejected(self, replica: EngineEndpoint) -> bool:
        """Whether the replica passes its health checks but gets no requests."""
        return self.outliers.is_ejected(replica.id) and not self.breakers[replica.id].is_open

    def failed(self, replica: EngineEndpoint, error: EngineError) -> None:
        """Report a failed request, which may open the breaker, or have the replica ejected."""
        if isinstance(error, ExhaustedError):
            return
        is_refusal = isinstance(error, RefusedError) and (400 <= error.status < 500 or error.status == NOT_IMPLEMENTED)
        # When an engine ends, all of its streams break at once. They count as one failure.
        is_known = isinstance(error, BrokenOffError) and self.breakers[replica.id].is_open
        if (
            not is_refusal and not is_known
        ):  # a probe shows nothing about refusals; only peers show whether the replica or the request is the cause
            self._fail_breaker(replica, error)
        is_counted = not isinstance(error, UnreachableError) and not _is_overload(error) and not is_known
        if is_known:
            self._failures[replica.id].set()
        if is_counted and self.outliers.failed(replica.id, self._now()):
            self.check_outliers()

    def _fail_breaker(self, replica: EngineEndpoint, error: EngineError) -> None:
        breaker = self.breakers[replica.id]
        if breaker.failed(error):
            self._report_down(replica, error)
        elif isinstance(error, BrokenOffError) and self.is_up(replica):
            # The engine may have died. A probe finds out before another request fails.
            breaker.is_open = breaker.probe_now = True
            self._report_down(replica, error)
        self._failures[replica.id].set()

    def succeeded(self, replica: EngineEndpoint) -> None:
        """Report an answered request, which resets the failure count."""
        breaker = self.breakers[replica.id]
        breaker.num_failures, breaker.pause_s = 0, MIN_PAUSE_S
        self.outliers.succeeded(replica.id)

    def needs_confirmation(self, replica: EngineEndpoint, status: int) -> bool:
        """Report a refused request. Returns whether to try another replica."""
        return self._refusals.needs_confirmation(replica, status)

    def refusal_confirmed(self, replica: EngineEndpoint) -> None:
        """Report that another replica has refused the same request."""
        self._refusals.confirmed(replica)

    def has_other(self, replica: EngineEndpoint) -> bool:
        """Whether another replica of the model is up."""
        return any(each is not replica and each.model == replica.model and self.is_up(each) for each in self.replicas)

    # Replicas that pass their health checks.

    def check_outliers(self) -> None:
        """Eject outliers, and readmit replicas whose ejection is over."""
        changes = self.outliers.check(self._now(), lambda id: not self.breakers[id].is_open)
        by_id = {replica.id: replica for replica in self.replicas} if changes else {}
        for change in changes:
            self._apply(by_id[change.replica], change)

    def _apply(self, replica: Replica, change: Ejection) -> None:
        if change.reason is not None:
            log.warning("%s at %s is ejected: %s", replica.name, replica.url, change.why)
            self._on_ejection(replica, change.reason, change.why)
            self._on_down(replica)
            return
        log.info("%s at %s returns from its ejection%s", replica.name, replica.url, change.why and f": {change.why}")
        self._on_ejection(replica, "", change.why)
        if not self.breakers[replica.id].is_open:
            self._on_up(replica)

    def suspect(self, replica: Replica, timeout_s: float) -> None:
        """Check that a replica completes a request of one token within this time. If it does not, the replica is
        down."""
        is_checked = replica.id in self._checks or replica.id not in self._tasks
        if not is_checked and not self.breakers[replica.id].is_open:
            check = asyncio.create_task(self._check_generation(replica, min(timeout_s, self._settings.probe_timeout_s)))
            self._checks[replica.id] = check

    async def _check_generation(self, replica: Replica, timeout_s: float) -> None:
        try:
            await replica.run_canary(timeout_s)
        except ExhaustedError:
            return
        except EngineError as error:
            breaker = self.breakers[replica.id]
            if not breaker.is_open:
                breaker.is_open = breaker.needs_canary = True
                breaker.why = f"generates nothing: {error}"
                with logged(f"{replica.name}: a callback of the health monitor failed"):
                    self._on_ejection(replica, "hangs", f"generates nothing: {error}")
                    self._report_down(replica, EngineError(f"generates nothing: {error}"))
                    self._on_unresponsive(replica)
                self._failures[replica.id].set()
        finally:
            del self._checks[replica.id]

    def _report_down(self, replica: EngineEndpoint, error: EngineError) -> None:
        log.warning("%s at %s is down: %s", replica.name, replica.url, error)
        self._on_down(replica)

    async def _monitor(self, replica: Replica) -> None:
        """Probe a replica forever: at intervals, and soon after a request failed."""
        breaker, failure = self.breakers[replica.id], self._failures[replica.id]
        while True:
            failure.clear()
            with logged(f"{replica.name}: a callback of the health monitor failed"):
                await self._probe_and_count(replica, breaker)
            period_s = max(self._settings.scrape_period_s, _HOSTED_PERIOD_S if replica.is_hosted else 0.0)
            interval_s = MIN_PAUSE_S if breaker.num_failed_probes else period_s
            await _pause(failure, breaker, breaker.next_pause_s() if breaker.is_open else interval_s)
            breaker.probe_now = False

    async def _probe_and_count(self, replica: Replica, breaker: Breaker) -> None:
        try:
            await self._probe(replica, breaker)
        except ExhaustedError as error:  # the earlier knowledge about the replica still holds
            if not self._is_exhausted:
                self._is_exhausted = True
                log.warning("replicas are not probed: %s %s", replica.name, error)
        except EngineError as error:
            breaker.num_failed_probes += 1
            breaker.why = str(error)
            breaker.is_lost |= isinstance(error, UnreachableError) or not breaker.passes_health
            if breaker.num_failed_probes == _PROBES_BEFORE_NOTE and replica.id not in self._listed_s:
                log.warning("%s at %s is not up yet: %s", replica.name, replica.url, error)
            is_gone = isinstance(error, UnreachableError) or breaker.num_failed_probes >= MAX_FAILURES
            if not breaker.is_open and is_gone:
                breaker.is_open = True
                self._report_down(replica, error)
                self._on_unresponsive(replica)
        else:
            breaker.num_failed_probes = 0
            self._is_exhausted = False

    async def _probe(self, replica: Replica, breaker: Breaker) -> None:
        """Check health, read details and load, and close the breaker on success. Otherwise raises EngineError."""
        timeout_s = self._settings.probe_timeout_s
        breaker.passes_health = False
        await replica.check_health(timeout_s)
        breaker.passes_health, breaker.is_lost = True, False
        now = self._now()
        age_s = now - self._listed_s.get(replica.id, now)
        is_old = replica.adapter.lists_adapters and age_s >= self._settings.models_period_s
        if replica.reported_model is None or breaker.is_open or is_old:
            await replica.read_details(timeout_s)
            self._listed_s[replica.id] = now
        if (load := await replica.read_load(timeout_s)) is not None:
            self._on_load(replica, load)
        if not breaker.is_open:
            return
        if breaker.needs_canary:
            await replica.run_canary(timeout_s, breaker.canary_tokens)
            breaker.num_failures, breaker.canary_tokens = 0, 1
        if self._failures[replica.id].is_set():
            return  # a request failed during the probe, and the probe may be older
        breaker.is_open = breaker.needs_canary = False
        model = replica.reported_model or "the requested model"
        log.info("%s at %s is up, and serves %s", replica.name, replica.url, model)
        if (other := _other_model(replica)) is not None:
            log.warning("%s serves %s, but pool %s has `model: %s`", replica.name, other, replica.pool, replica.model)
        if not self.outliers.is_ejected(replica.id):
            self._on_up(replica)
