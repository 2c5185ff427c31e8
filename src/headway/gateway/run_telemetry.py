"""The telemetry of a run: metrics, statistics, records and decisions of requests, and the comparison with
predictions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import time
from typing import Final

from headway.control.decisions import Decision, DecisionObserver
from headway.control.live import Live
from headway.core.record import Outcome, Records
from headway.gateway.clock import Clock
from headway.gateway.errors import logged
from headway.gateway.fleet.membership import LiveFleet
from headway.gateway.fleet.specs import ServingPlan
from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.gateway.scheduling.replica import LiveReplica
from headway.gateway.telemetry.drift import COMPARISON_PERIOD_S, PredictionDrift
from headway.gateway.telemetry.loop_delay import LoopDelay
from headway.gateway.telemetry.metrics import PrometheusMetrics
from headway.gateway.telemetry.recording import Recording
from headway.gateway.telemetry.rolling_stats import RollingStats
from headway.gateway.telemetry.slowest import SlowestRequests
from headway.gateway.telemetry.trial import Trial

_FINISHED: Final = Outcome.FINISHED
_RECORDS_PER_PART: Final = 20_000
"""Number of ended requests at which the records are written early."""


class RunTelemetry:
    """Observes the requests of one gateway."""

    def __init__(
        self,
        clock: Clock,
        plan: ServingPlan,
        fleet: LiveFleet,
        recording: Recording,
        decision_log: Callable[[Decision], None] | None,
        request_id: Callable[[Live], str],
    ) -> None:
        """`request_id` returns a request's id as its client knows it."""
        self._clock, self._fleet, self.recording = clock, fleet, recording
        self.settings = plan.settings
        self.metrics = PrometheusMetrics()
        self.loop_delay = LoopDelay(clock)
        self.drift = PredictionDrift(fleet.step_times, fleet.correct, self.loop_delay.at)
        plan.use_corrections(self.drift.corrections)
        fleet.on_removed.append(lambda replica: self.drift.forget(replica.id))
        self.decisions: DecisionObserver | None = None
        """The decision observer, for the decision log and the dashboard; None without either."""
        self.trial: Trial | None = None
        """Counts requests by periods, if a change may be tried."""
        self.rolling_stats: RollingStats | None = None
        self.slowest: SlowestRequests | None = None
        if decision_log is not None or self.settings.has_dashboard:
            self.decisions = decisions = DecisionObserver(request_id, time() - clock.now, is_live=True)
            if decision_log is not None:
                decisions.listeners.append(decision_log)
            if self.settings.has_dashboard:
                self.rolling_stats, self.slowest = RollingStats(decisions, lambda: self.usd), SlowestRequests()
        cascade = plan.policies.cascade
        self._cascade, self._judge_usd = ("", 0.0) if cascade is None else (cascade.name, cascade.judge_usd)
        self._records_timer: asyncio.TimerHandle | None = None
        """Set if records are written during the run."""

    @property
    def usd(self) -> float:
        """The fleet's cost so far."""
        return sum(self._fleet.usd(self.metrics.hosted_tokens).values())

    def start(self) -> None:
        """Start to compare predictions and to write records."""
        self.loop_delay.start()
        self._compare_predictions(self._clock.now)
        if self.recording.is_written:
            self._flush_periodically(self._clock.now, None)

    def stop(self) -> None:
        """Stop writing records periodically."""
        self.loop_delay.stop()
        if self._records_timer is not None:
            self._records_timer.cancel()

    def request_ended(self, request: InFlightRequest, outcome: Outcome, now: float) -> None:
        """Count and record a request."""
        live, replica = request.live, request.replica
        is_single_stream = not request.answer.is_unstreamed and live.num_sequences == 1
        is_comparable = live.enqueued_s == live.placed_s and is_single_stream
        if outcome is _FINISHED and replica is not None and is_comparable:
            self.drift.add(replica.id, replica.pool, live, now)
        self.metrics.count_end(request, outcome, now)
        if live.fallback is not None and replica is not None:
            self.metrics.count_fallback(live.fallback.model, live.fallback.why)
        if self.decisions is not None:
            if outcome is Outcome.REJECTED:
                self.decisions.record_hold_refusal(live, now, request.request_id or str(live.id))
            self.decisions.forget(live)
        if self.trial is not None:
            self.trial.ended(live, outcome, now)
        if self.rolling_stats is not None:
            self.rolling_stats.count_end(live, outcome, now)
        if self.slowest is not None and outcome is _FINISHED:
            name = "" if replica is None else replica.name
            self.slowest.add(live, request.request_id or str(live.id), name, now)
        if self.recording.enabled:
            cascade = "" if live.stage_index < 0 else self._cascade
            self.recording.add(
                live, cascade, request.request_id, request.answer.longest_gap_s, request.answer.resumed_s
            )
        if self.recording.num_waiting >= _RECORDS_PER_PART and self._records_timer is not None:
            self.flush()

    def replica_ejected(self, replica: LiveReplica, reason: str, why: str) -> None:
        """Count and record the ejection of a replica. Without a reason: its return."""
        if reason:
            self.metrics.count_ejection(replica.model, reason)
        if self.decisions is not None:
            self.decisions.record_ejection(replica.id, replica.model, why, not reason, self._clock.now)

    def cache_state_changed(self, replica: LiveReplica, state: str, why: str) -> None:
        """Record whether the events of a replica's prefix cache are up to date."""
        if self.decisions is not None:
            self.decisions.record_cache_state(replica.id, replica.model, state, why, self._clock.now)

    def records(self) -> Records:
        """All requests that have ended."""
        return self.recording.records(self._fleet.records(), self._clock.now, self._judge_usd)

    def flush(self) -> None:
        """Give the records of ended requests to the recording's writer."""
        if self.recording.enabled:
            self.recording.flush(self._fleet.records(), self._clock.now, self._judge_usd)

    def _flush_periodically(self, now: float, _: None) -> None:
        self._records_timer = self._clock.at(now + self.settings.records_period_s, self._flush_periodically, None)
        if self.recording.num_waiting:
            self.flush()

    def _compare_predictions(self, now: float, _: object = None) -> None:
        """Compare recently ended requests with the step-time models' predictions."""
        self._clock.at(self._clock.now + COMPARISON_PERIOD_S, self._compare_predictions, None)
        with logged("predictions could not be compared"):
            in_flight = {replica.id: replica.requests for replica in self._fleet.replicas}
            self.drift.compare(in_flight, self._clock.now)
