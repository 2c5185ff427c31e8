"""Detects stalls: engines that hold requests and generate no tokens, and single requests without progress.

Health checks show neither. Every quarter of a second, the tokens of all requests are compared with the previous check,
at no cost per token. Silence is counted in checks and not by the clock, so that a pause of the gateway itself does not
count as silence.

An engine that is silent towards all of its requests for longer than `TimeLimits` allows is suspected: a one-token
request shows whether it generates. An engine is also suspected if several of its streams began at least a second ago,
and it is silent towards all of these while new streams get their first tokens. A request that is silent for much
longer, while its engine generates for other requests, is aborted and continues elsewhere. It is aborted sooner if the
engine is silent towards all its running requests, and serves only new requests. A request at an engine with a queue is
not aborted for its silence: the engine may compute prompts first, or may have preempted the request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.gateway.scheduling.replica import LiveReplica
from headway.gateway.settings import TimeLimits
from headway.gateway.upstream.outliers import OutlierDetector
from headway.perf.engine_times import PoolTimes

PERIOD_S = 0.25
_PART = 500
"""Maximum number of requests compared at once: no more than a millisecond, in which no token is passed on."""
_STUCK_FACTOR, _SILENT_FACTOR = 5, 2
_MIN_BEGUN: Final = 3
"""Number of begun streams that represent an engine's pace."""
_BEGUN_CHECKS: Final = 4
"""Number of checks after its first token from which a stream counts as begun."""
_ALONE_FACTOR = 4
_CANARY_SHARE = 1 / 3
"""Time that a silent engine has for a request of one token, as a share of its limit. If the engine answers the request,
begun streams that stay silent for this additional time are aborted, because their tokens should have come, too."""
_MAX_LEARNT: Final = 4
"""Maximum number of finished requests of a replica to learn from between two checks."""
_WEIGHT = 0.2
"""Weight of the newest observation in a replica's mean ratio of observed to expected times."""


class Suspicions(Protocol):
    """The part of the health monitor that handles stalls."""

    def suspect(self, replica: LiveReplica, timeout_s: float) -> None:
        """Check that a replica completes a request of one token within this time. If it does not, the replica is
        down."""


class _Stay:
    """The state of a request's stay at one replica, at the last check."""

    __slots__ = (
        "expected_s",
        "has_tokens",
        "is_paced",
        "key",
        "num_checks",
        "replica",
        "silent_s",
        "start_tokens",
        "tokens",
    )

    def __init__(
        self, key: tuple[int, ...], replica: LiveReplica, tokens: int, has_tokens: bool, expected_s: float
    ) -> None:
        self.key, self.replica = key, replica
        self.start_tokens = self.tokens = tokens
        self.expected_s = expected_s
        """Expected time to the first token at this replica."""
        self.is_paced = False
        """Whether its time between tokens has been observed."""
        self.silent_s = 0.0
        self.has_tokens = has_tokens
        """Whether a token has come from this replica."""
        self.num_checks = 0
        """Number of checks since the check that first saw tokens of the stream at this replica."""

    @property
    def has_begun(self) -> bool:
        """Whether the stream began so long ago that it shows its engine's pace."""
        return self.num_checks >= _BEGUN_CHECKS


class _Streams:
    """The begun streams of one engine, at one check."""

    def __init__(self) -> None:
        self.num = 0
        self.has_progressed = False


class StallWatch:
    """Detects stalls among a gateway's requests. A check must begin every PERIOD_S."""

    def __init__(
        self,
        limits: TimeLimits,
        outliers: OutlierDetector,
        health: Suspicions,
        times: Mapping[str, PoolTimes],
        has_alternative: Callable[[InFlightRequest, int], bool],
    ) -> None:
        """`times`: expected times of each pool's replicas. `has_alternative(request, replica)`: whether another replica
        could serve the request."""
        self._limits, self._outliers, self._health = limits, outliers, health
        self._times, self._has_alternative = times, has_alternative
        self._stays: dict[int, _Stay] = {}
        self._silent_s: dict[int, float] = {}
        """Maps each replica with requests to the time since the last sign of life."""
        self._streams_silent_s: dict[int, float] = {}
        """Maps each replica with several begun streams to the time since any of these streams brought a token."""
        self._silence_suspected_s: dict[int, float] = {}
        """Maps each replica to the length of its silence when it was last suspected."""
        self._ratios: dict[int, float] = {}
        """Maps each replica that has answered to the ratio of observed to expected times."""
        self._steps_s: dict[int, float] = {}
        """Maps each replica to the expected time of an iteration at this check."""
        self._num_learnt: dict[int, int] = {}
        """Maps each replica to the number of finished requests learnt from since the last check."""
        self._pools: dict[str, set[int]] = {}
        """Maps each pool to the replicas that have answered."""

    def use(self, limits: TimeLimits) -> None:
        """Use these limits from now on."""
        self._limits = limits

    def check(self, requests: Sequence[InFlightRequest], now: float) -> Iterator[None]:
        """Compare the requests with the last check, suspect engines that are silent for too long, and abort requests
        that are silent for too long while their engines generate for other requests.

        The check is done as the result is iterated over: each item is a place where other work can be done, among a few
        hundred requests each.
        """
        self._steps_s.clear()
        self._num_learnt.clear()
        stays: dict[int, _Stay] = {}
        busy: dict[int, LiveReplica] = {}
        alive: set[int] = set()
        streams: dict[int, _Streams] = {}
        silent: list[InFlightRequest] = []
        for i, request in enumerate(requests):
            if i and not i % _PART:
                yield
            if (replica := _waits_on(request)) is None:
                continue
            live = request.live
            key = (replica.id, live.attempt, live.moves, live.stage_index)
            stay = self._stays.get(live.id)
            if stay is None or stay.key != key:
                if stay is not None and stay.key[0] != replica.id and stay.key[1] == live.attempt:
                    alive.add(stay.replica.id)  # this replica has done its part, and the request is elsewhere
                    self._has_answered(stay.replica)
                has_tokens = live.first_token_s >= live.enqueued_s
                if has_tokens:
                    alive.add(replica.id)
                stay = _Stay(key, replica, live.generated_tokens, has_tokens, self._expected_first_s(replica))
            elif live.generated_tokens != stay.tokens:
                alive.add(replica.id)
                if stay.has_begun:
                    streams.setdefault(replica.id, _Streams()).has_progressed = True
                self._progressed(stay, request, now)
            elif request.answer.waits_for_client:
                stay.silent_s = 0.0
            else:
                stay.silent_s += PERIOD_S
                silent.append(request)
            stays[live.id] = stay
            if not request.answer.waits_for_client:
                busy[replica.id] = replica
                if stay.has_begun:
                    streams.setdefault(replica.id, _Streams()).num += 1
            stay.num_checks += stay.has_tokens
        self._stays = stays
        self._silent_s = {id: 0.0 if id in alive else self._silent_s.get(id, -PERIOD_S) + PERIOD_S for id in busy}
        self._streams_silent_s = {
            id: self._streams_silent_s.get(id, 0.0) + PERIOD_S
            for id, each in streams.items()
            if each.num >= _MIN_BEGUN and not each.has_progressed and id in busy and not busy[id].load.waiting
        }
        self._silence_suspected_s = {
            id: suspected_s
            for id, suspected_s in self._silence_suspected_s.items()
            if self._silence_s(id) >= suspected_s
        }
        for id, replica in busy.items():
            limit_s, silence_s = self._limit_s(replica), self._silence_s(id)
            if silence_s - self._silence_suspected_s.get(id, 0.0) > limit_s:
                self._silence_suspected_s[id] = silence_s
                self._health.suspect(replica, limit_s * _CANARY_SHARE)
        for i, request in enumerate(silent):
            if i and not i % _PART:
                yield
            self._abort_if_stuck(request)

    def _silence_s(self, replica: int) -> float:
        """Seconds for which a replica has been silent towards all of its requests, or towards all begun streams."""
        return max(self._silent_s.get(replica, 0.0), self._streams_silent_s.get(replica, 0.0))

    def _abort_if_stuck(self, request: InFlightRequest) -> None:
        stay, replica = self._stays.get(request.live.id), _waits_on(request)
        if stay is None or replica is None or stay.replica is not replica or not stay.silent_s:
            return
        limit_s = self._stuck_s(request, replica, stay)
        if limit_s is not None and stay.silent_s > limit_s:
            stay.silent_s = 0.0
            why = f"sent no token for {limit_s:.0f} s"
            if request.prefill_leg is not None:
                request.abort_prefill_leg(why)
            else:
                request.abort(why)

    def _stuck_s(self, request: InFlightRequest, replica: LiveReplica, stay: _Stay) -> float | None:
        """Seconds for which a request may be silent; None: forever."""
        limit_s = self._limit_s(replica)
        if self._silence_s(replica.id) > limit_s:  # the engine is silent, although it has completed the canary request
            limit_s *= 1 + _CANARY_SHARE if stay.has_tokens else _SILENT_FACTOR
        elif replica.is_saturated:
            return None
        else:
            limit_s = max(self._limits.stuck_s, _STUCK_FACTOR * limit_s)
        if not request.live.is_streamed:  # an unstreamed answer comes only when all of it is generated
            if request.live.output_tokens <= 1:
                return None
            answer_s = self._step_s(replica) * max(request.live.output_tokens, request.live.generated_tokens)
            limit_s += self._limits.factor * self._ratio(replica) * answer_s
        return limit_s if self._has_alternative(request, replica.id) else _ALONE_FACTOR * limit_s

    def finished(self, request: InFlightRequest, now: float) -> None:
        """Learn from a completely answered request, using times that were not observed while it ran.

        The tokens of several sequences are counted together and say nothing about the time between tokens.
        """
        replica, live, has_several = request.replica, request.live, request.live.num_sequences > 1
        if not isinstance(replica, LiveReplica) or live.enqueued_s != live.enqueued_s:
            return
        num_learnt = self._num_learnt[replica.id] = self._num_learnt.get(replica.id, 0) + 1
        if num_learnt > _MAX_LEARNT:
            return
        stay = self._stays.get(live.id)
        if isinstance(request.prefilled_by, LiveReplica):
            self._has_answered(request.prefilled_by)
        if replica.id in self._silent_s:
            self._silent_s[replica.id] = 0.0
        if stay is not None and stay.has_begun:
            self._streams_silent_s.pop(replica.id, None)
        step_s = self._step_s(replica)
        expected_s = self._times[replica.pool].prefill_s(live.prompt_tokens) + step_s
        if request.answer.is_unstreamed and has_several:
            self._has_answered(replica)
        elif request.answer.is_unstreamed:
            expected_s += step_s * max(live.output_tokens, live.generated_tokens)
            self._learn(replica, (now - live.enqueued_s) / expected_s)
        elif live.first_token_s > live.enqueued_s and (stay is None or stay.tokens == stay.start_tokens):
            first_s = live.first_token_s - live.enqueued_s
            self._outliers.observe(replica.id, "first token", first_s, expected_s, now)
            self._learn(replica, first_s / expected_s)
        is_whole_stream = not (request.answer.is_unstreamed or has_several) and (stay is None or not stay.is_paced)
        if is_whole_stream and live.generated_tokens > 1:
            expected_s = step_s * (live.generated_tokens - 1)
            self._outliers.observe(replica.id, "between tokens", now - live.first_token_s, expected_s, now)

    def _progressed(self, stay: _Stay, request: InFlightRequest, now: float) -> None:
        live = request.live
        replica, tokens = stay.replica, live.generated_tokens - stay.tokens
        if stay.tokens > stay.start_tokens:
            expected_s = self._step_s(replica) * max(tokens, 1)
            stay.is_paced = True
            if live.num_sequences == 1:
                self._outliers.observe(replica.id, "between tokens", stay.silent_s + PERIOD_S, expected_s, now)
        elif not stay.start_tokens:
            first_s = live.first_token_s - live.enqueued_s
            if first_s == first_s:
                self._outliers.observe(replica.id, "first token", first_s, stay.expected_s, now)
                self._learn(replica, first_s / stay.expected_s)
        stay.tokens, stay.silent_s, stay.has_tokens = live.generated_tokens, 0.0, True

    def _has_answered(self, replica: LiveReplica) -> None:
        """Record an answer that gives no time to learn from."""
        self._pools.setdefault(replica.pool, set()).add(replica.id)
        self._ratios.setdefault(replica.id, 1.0)

    def _learn(self, replica: LiveReplica, ratio: float) -> None:
        self._pools.setdefault(replica.pool, set()).add(replica.id)
        known = self._ratios.get(replica.id, ratio)
        self._ratios[replica.id] = known + _WEIGHT * (ratio - known)

    def _ratio(self, replica: LiveReplica) -> float:
        """Ratio of observed to expected times of the pool's fastest replica, at least 1."""
        return max(min((self._ratios[id] for id in self._pools.get(replica.pool, ())), default=1.0), 1.0)

    def _expected_first_s(self, replica: LiveReplica) -> float:
        """Expected time to the first token of a request that arrives now, after all prompts at the replica."""
        return self._times[replica.pool].prefill_s(replica.prefill_tokens_left) + self._step_s(replica)

    def _step_s(self, replica: LiveReplica) -> float:
        step_s = self._steps_s.get(replica.id)
        if step_s is None:
            tokens = replica.kv_blocks_used * replica.block_size_tokens
            step_s = self._steps_s[replica.id] = self._times[replica.pool].step_s(replica.num_in_flight, tokens)
        return step_s

    def _limit_s(self, replica: LiveReplica) -> float:
        """Seconds for which the replica may be silent towards all of its requests."""
        limits = self._limits
        least_s = limits.silence_s if self._pools.get(replica.pool) else max(limits.cold_s, limits.silence_s)
        return max(least_s, limits.factor * self._ratio(replica) * self._expected_first_s(replica))


def _waits_on(request: InFlightRequest) -> LiveReplica | None:
    """The replica that must generate the request's next token; None if the request is at no replica."""
    reservation = request.reservation
    if request.outcome is not None or reservation is None or reservation.waits_for_slot:
        return None
    replica = request.replica if request.prefill_leg is None else request.prefill_leg.replica
    return replica if isinstance(replica, LiveReplica) else None
