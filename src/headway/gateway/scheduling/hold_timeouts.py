"""Timeouts of requests that are held while no replica of their model is up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from headway.control.live import HELD
from headway.control.service import Service
from headway.gateway.clock import Clock
from headway.gateway.scheduling.control import LiveControl
from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.gateway.scheduling.replica import LiveReplica

_MOMENT_S = 0.02
_HOLD_S, _LOST_HOLD_S = 30.0, 0.2
"""(longest default wait for a replica while none is up, longest default wait if all are lost)."""


class HoldTimeouts:
    """Rejects held requests when their wait for a replica ends."""

    def __init__(
        self,
        clock: Clock,
        control: LiveControl,
        requests: Mapping[int, InFlightRequest],
        replicas: Sequence[LiveReplica],
        hold_s: float | None,
    ) -> None:
        """`requests`: unfinished requests by id."""
        self._clock, self._control, self._requests, self._replicas = clock, control, requests, replicas
        self.hold_s = hold_s
        """Longest wait for a replica while none is up; None: `_HOLD_S`, or `_LOST_HOLD_S` if all are lost."""
        self.is_lost: Callable[[LiveReplica], bool] = lambda replica: False
        """Whether a replica is unreachable, or fails its health checks."""

    def start(self, request: InFlightRequest) -> None:
        """Start a held request's timeout if no replica is up. The timeout ends just before the client's own timeout,
        because the client's timeout would give no reason."""
        live = request.live
        if live.stage is HELD and request.outcome is None and not self._control.by_model[live.model].any_up:
            if request.hold_timeout is not None:
                request.hold_timeout.cancel()
            end_s = self._clock.now + (_HOLD_S if self.hold_s is None else self.hold_s)
            if live.timeout_s is not None:
                end_s = min(end_s, live.arrival_s + live.timeout_s - _MOMENT_S)
            request.hold_end_s = end_s
            self._wait(request)

    def start_all(self, service: Service) -> None:
        """Start the timeouts of all requests held by a service if none of its replicas is up."""
        if not service.any_up:
            for live in service.hold_queue.requests():
                self.start(self._requests[live.id])

    def _wait(self, request: InFlightRequest) -> None:
        end_s = request.hold_end_s
        if self.hold_s is None:
            end_s = min(end_s, self._clock.now + _LOST_HOLD_S)
        request.hold_timeout = self._clock.at(end_s, self._expired, request)

    def _expired(self, now: float, request: InFlightRequest) -> None:
        service = self._control.by_model[request.live.model]
        if request.live.stage is not HELD or service.any_up:
            return
        if now >= request.hold_end_s or (self.hold_s is None and self._is_all_lost(service)):
            self._control.reject(request.live, now)
        else:
            self._wait(request)

    def _is_all_lost(self, service: Service) -> bool:
        """Whether no replica of the service is expected to be up soon."""
        if not service.members:
            return self._control.parts.scaling is None
        replicas = [self._replicas[member.view.id] for member in service.members]
        return all(self.is_lost(replica) and not replica.is_starting for replica in replicas)
