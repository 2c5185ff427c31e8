"""A driver with replicas that are never sent anything, on a clock that the test sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from headway.catalog import engine, gpu, model
from headway.control.live import Live
from headway.control.policies import Policies
from headway.control.recorder import Recorder
from headway.core.fleet import Pool, Role
from headway.core.pacer import Pacer
from headway.core.record import Outcome
from headway.gateway.scheduling.driver import Driver
from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.gateway.scheduling.replica import LiveReplica
from headway.gateway.telemetry.metrics import PrometheusMetrics
from headway.gateway.upstream.dialects import ADAPTERS
from headway.policies.ordering.fcfs import FcfsOrdering
from headway.policies.routing.round_robin import RoundRobinRouter

MODEL = "qwen3-8b"


class _Timer:
    is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class ManualClock:
    """A clock that stands still until it is advanced."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, Callable[[float, Any], None], Any, _Timer]] = []

    def at(self, time_s: float, action: Callable[[float, Any], None], argument: Any) -> _Timer:
        timer = _Timer()
        self._timers.append((time_s, action, argument, timer))
        return timer

    @property
    def num_timers(self) -> int:
        return len(self._timers)

    def advance(self, now: float) -> None:
        """Set the time, and call what is due."""
        self.now = now
        due = sorted((entry for entry in self._timers if entry[0] <= now), key=lambda entry: entry[0])
        self._timers = [entry for entry in self._timers if entry[0] > now]
        for time_s, action, argument, timer in due:
            if not timer.is_cancelled:
                action(time_s, argument)


class Driven:
    """A driver over replicas that are up, with the outcomes that it reports."""

    def __init__(
        self,
        num_replicas: int,
        roles: Sequence[Role] = (),
        hold_s: float = 5.0,
        is_up: bool = True,
        models: Sequence[str] = (MODEL,),
        **policies: Any,
    ) -> None:
        """With `roles`, the replicas form one combo. The replicas serve the `models` in turn."""
        self.clock: Any = ManualClock()
        pools = [Pool("p" * (1 + i), model(name), gpu("h100"), engine("vllm-0.15")) for i, name in enumerate(models)]
        self.replicas = [
            LiveReplica(
                i,
                pools[i % len(pools)],
                f"http://h:{i}",
                ADAPTERS["vllm"],
                1000,
                FcfsOrdering(),
                Pacer(),
                self.clock,
                5.0,
            )
            for i in range(num_replicas)
        ]
        scorer: Any = SimpleNamespace(accepts_unscored=True)
        for replica, role in zip(self.replicas, roles, strict=False):
            replica.combo, replica.role = 0, role
        self.outcomes: dict[int, Outcome] = {}
        self.metrics = PrometheusMetrics()
        self.driver = Driver(
            self.clock, self.replicas, {name: (name,) for name in models},
            Policies(**{"router": RoundRobinRouter, "ordering": FcfsOrdering, **policies}), 0, Recorder(),
            self.metrics, hold_s, scorer, lambda services: None, None, self._ended, lambda replica, role, now: None,
        )  # fmt: skip
        if is_up:
            for replica in self.replicas:
                self.driver.roster.replica_up(replica)

    def _ended(self, request: InFlightRequest, outcome: Outcome, now: float) -> None:
        self.outcomes[request.live.id] = outcome

    def arrive(
        self,
        id: int,
        prompt_tokens: int = 100,
        timeout_s: float | None = None,
        model: str = MODEL,
        is_movable: bool = True,
    ) -> InFlightRequest:
        """Hand a request to the driver."""
        live = Live(id, self.clock.now, prompt_tokens, 10, model, timeout_s=timeout_s)
        request = InFlightRequest(live, f"id-{id}", is_movable=is_movable)
        self.driver.arrived(request)
        return request

    @property
    def num_in_flight(self) -> list[int]:
        """Requests by replica."""
        return [replica.num_in_flight for replica in self.replicas]
