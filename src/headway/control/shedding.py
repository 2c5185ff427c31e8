"""Sheds requests: rejects a request at once if it would wait too long for its first token.

A request is shed when its expected TTFT exceeds a share of its TTFT SLO. The replicas' step-time models predict the
TTFT from the work in front of the request: held requests that go first, requests in the engines' queues, and uncomputed
prompts. The actual TTFTs of recent requests correct the prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf

from headway.control.live import Live
from headway.control.service import Service
from headway.core.record import Ended
from headway.core.view import ReplicaView
from headway.policies.engine_pace import EngineSpeed, EngineSpeeds
from headway.policies.routing.work_left import MeanOutput, pending_tokens, uncached_tokens

_MEAN_OVER = 100
"""Number of arrivals in the moving average of the prompt length."""
_KEPT = 0.95
"""Share of the observed and predicted TTFT sums kept with each further request, so about twenty requests count."""
_FADE_S = 30.0
"""Time constant, in seconds, with which the sums of predicted and actual TTFTs decay."""
_PRIOR_S = 0.5
"""Prior weight, in seconds of expected TTFT, mixed into the observed ratio."""
_MOST = 20.0
"""Largest correction factor."""
_STEPS_BEFORE = 1.5
"""Iterations until a new prompt's iteration begins: on average half of the current iteration, plus the next iteration,
which an engine schedules ahead."""


class Shedding:
    """Sheds one service's requests that would miss their TTFT SLO. Learns from ended requests."""

    def __init__(self, service: Service) -> None:
        self.service, self.share = service, 1.0
        """`share`: limit of the expected TTFT, as a share of the request's SLO."""
        self._output = MeanOutput()
        self._prompt_tokens = self._computed_tokens = 0.0
        """(mean prompt tokens, mean prompt tokens that are not in a prefix cache), as moving averages."""
        self._num_seen = 0
        self._speeds = EngineSpeeds()
        self._expected_s: dict[int, float] = {}
        """Maps each request in flight to its predicted TTFT."""
        self._told_s = self._took_s = 0.0
        """(sum of predicted TTFTs, sum of actual TTFTs) over recent requests."""
        self._learnt_s = 0.0

    def learn(self, record: Ended) -> None:
        self._output.learn(record)
        expected_s = self._expected_s.pop(record.id, None)
        if expected_s is not None and record.first_token_s is not None:
            self._told_s = _KEPT * self._told_s + expected_s
            self._took_s = _KEPT * self._took_s + record.first_token_s - record.arrival_s
            self._learnt_s = record.end_s

    def _factor(self, now: float) -> float:
        """Ratio of the actual to the predicted TTFT of recent requests. The ratio decays to 1 while no request ends,
        because shedding itself may be the reason that no request ends."""
        kept = exp(min(self._learnt_s - now, 0.0) / _FADE_S)
        ratio = (kept * self._took_s + _PRIOR_S) / (kept * self._told_s + _PRIOR_S)
        return max(1 / _MOST, min(_MOST, ratio))

    def why(self, live: Live, now: float) -> str:
        """Why the request is shed; empty: it is served. No request is shed without a TTFT SLO, while no replica is up,
        or while a replica is idle."""
        replicas = self.service.able(live)
        if not replicas:
            return ""
        self._see(live, replicas)
        if live.slo_ttft_s is None:
            return ""
        told_s = self._waits_s(live, replicas, now)
        expected_s, most_s = self._factor(now) * told_s, self.share * live.slo_ttft_s
        if expected_s <= most_s or not all(replica.num_in_flight for replica in replicas):
            self._expected_s[live.id] = told_s
            return ""
        live.shed_s = expected_s - most_s
        return f"its first token is expected after {expected_s:.3g} s; it may take {most_s:.3g} s"

    def _see(self, live: Live, replicas: Sequence[ReplicaView]) -> None:
        """Update the averages with a prompt."""
        self._num_seen = min(self._num_seen + 1, _MEAN_OVER)
        computed = min(uncached_tokens(live, replica) for replica in replicas) if live.prefix else live.prompt_tokens
        self._prompt_tokens += (live.prompt_tokens - self._prompt_tokens) / self._num_seen
        self._computed_tokens += (computed - self._computed_tokens) / self._num_seen

    def _waits_s(self, live: Live, replicas: Sequence[ReplicaView], now: float) -> float:
        """Predicted seconds from now to the request's first token, if one of these replicas serves the request."""
        queue = self.service.hold_queue
        num_before = queue.num_before(live, now) if queue.num else 0
        hold_s = 0.0
        if num_before or not (roomy := self.service.with_room(live)):
            hold_s = (num_before + 1) / sum(map(self._starts_per_s, replicas))
        elif self.service.window is not None:
            replicas = [replica for replica in roomy if replica in replicas] or replicas
        return hold_s + min(self._start_s(live, replica, hold_s > 0) for replica in replicas)

    def _start_s(self, live: Live, replica: ReplicaView, is_held: bool) -> float:
        """Predicted seconds until the first token of a request sent to the replica."""
        speed, seats, num = self._speed(replica), self._seats(replica), replica.num_in_flight
        base_s, context_s = speed.line(min(num, seats))
        step_s = base_s + context_s * replica.kv_blocks_used * replica.block_size_tokens
        start_s = _STEPS_BEFORE * step_s + speed.first_s + uncached_tokens(live, replica) * speed.token_s
        way_s = 2.0 * replica.latency_s(live.region) if live.region else 0.0
        if is_held:
            return start_s + way_s
        if num >= seats:  # the request waits in the engine's queue
            return start_s + way_s + (num + 1 - seats) / self._starts_per_s(replica)
        return start_s + way_s + pending_tokens(replica) * speed.token_s

    def _starts_per_s(self, replica: ReplicaView) -> float:
        """Requests started per second by a replica whose batch is full."""
        speed, seats = self._speed(replica), self._seats(replica)
        output_tokens = 1.0 if replica.role == "prefill" else self._output.tokens
        base_s, context_s = speed.line(seats)
        step_s = base_s + context_s * seats * self._held_tokens
        return 1.0 / (output_tokens * step_s / seats + self._computed_tokens * speed.token_s)

    @property
    def _held_tokens(self) -> float:
        """Mean KV cache tokens of a request."""
        return self._prompt_tokens + 0.5 * self._output.tokens

    def _seats(self, replica: ReplicaView) -> int:
        """Number of requests that a replica runs at once."""
        tokens, window = replica.kv_blocks_total * replica.block_size_tokens, self.service.window
        most = min(replica.max_num_seqs, inf if window is None else window, tokens / self._held_tokens)
        return max(int(most), 1)

    def _speed(self, replica: ReplicaView) -> EngineSpeed:
        return self._speeds.of(replica.pool, replica.times, replica.max_num_seqs)
