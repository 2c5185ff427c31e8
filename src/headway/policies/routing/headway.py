"""Headway's own router: chooses the replica, or pair of replicas, at which a request adds the least time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from math import inf
from typing import Final

from headway.core.decision import Placement
from headway.core.record import Ended
from headway.core.subclasses import mypyc_attr
from headway.core.view import Bounds, EngineTimes, FleetView, ReplicaView, RequestView
from headway.policies.engine_pace import EngineSpeed
from headway.policies.routing.headway_load import SHARE_WINDOW_S, SHORT, WAIT_WEIGHT, ReplicaLoad, ReplicaState
from headway.policies.routing.slo_misses import (
    RATE_WINDOW_S,
    late_probability,
    long_probability,
    num_delayed,
    slow_probability,
)
from headway.policies.routing.work_left import MeanOutput

_LOST_S: Final = 100.0
"""Seconds that a missed SLO counts as."""
_SLOWED: Final = 2.0
"""Factor on the requests whose time per token one more request spoils: about as many requests as decode there arrive
meanwhile, and are spoiled, too."""
_MEAN_OVER: Final = 16.0
"""Prompts or decisions over which a mean is taken."""
_MOST_SHARE: Final = 0.98
_MOST_PLACED: Final = 100_000
"""Maximum number of requests in flight whose placement is kept."""
_FORGET_S: Final = 3600.0
"""Seconds after which a replica that was not seen may be forgotten."""


class _Candidate:
    """A replica or pair of replicas for the request."""

    __slots__ = ("decode", "prompt_s", "prompt_tokens", "replica", "score")

    def __init__(self, score: float, replica: int, decode: int, prompt_s: float, prompt_tokens: int) -> None:
        self.score, self.replica = score, replica
        self.decode = decode
        """Id of the decode replica; -1 if it is the same replica."""
        self.prompt_s = prompt_s
        """Expected seconds to compute the prompt, without the correction by observations."""
        self.prompt_tokens = prompt_tokens
        """Prompt tokens to compute: those not cached."""

    def precedes(self, other: _Candidate) -> bool:
        """Whether the score is less; of equals, the first by id."""
        if self.score != other.score:
            return self.score < other.score
        return self.replica < other.replica or (self.replica == other.replica and self.decode < other.decode)


class _Features:
    """Properties of the request that all candidates share."""

    __slots__ = (
        "e2e_slo_s",
        "has_prefix",
        "mean_kv_tokens",
        "now",
        "output_tokens",
        "prompt_tokens",
        "region",
        "tpot_slo_s",
        "ttft_slo_s",
    )

    def __init__(self, request: RequestView, output_tokens: float, now: float) -> None:
        self.now = now
        self.region = request.region
        self.has_prefix = bool(request.prefix)
        self.prompt_tokens = request.prompt_tokens + request.generated_tokens
        self.output_tokens = output_tokens
        self.mean_kv_tokens = self.prompt_tokens + 0.5 * output_tokens
        """Mean KV tokens of the request over its decoding."""
        self.ttft_slo_s, self.tpot_slo_s = request.slo_ttft_s or 0.0, request.slo_tpot_s or 0.0
        self.e2e_slo_s = request.slo_e2e_s or 0.0


@mypyc_attr(allow_interpreted_subclasses=True)
class HeadwayRouter:
    """Chooses the candidate at which a request adds the least time, to itself and to the requests there.

    A candidate is a replica, a pair of a prefill and a decode replica of one combo, or one of the two for the whole
    request (unless its engine runs one phase only). The time until the first token sums: the rest of the current
    iteration; the prompt tokens yet to compute there; the request's own prompt tokens, except cached or loadable ones;
    the wait for a batch slot or KV blocks if none is free; and the network latency from the request's region. Then an
    output of mean length is decoded among the requests there, and each of them is slowed down by the prompt and by a
    longer iteration. A second before the first token counts as eight later ones.

    Times come from the replica's step-time model (`ReplicaView.times`). They are multiplied by the ratio of the actual
    to the expected time of its last prompts and tokens, if that ratio is above 1.3 or below 1/1.3. Engines without a
    model are assumed to be equal, and only that ratio distinguishes them. The ratio is unknown for replicas that other
    gateways use, too. The gateway's own counts are preferred to engine metrics, which may be stale.

    If a request has SLOs, a likely miss counts 100 s: its own misses, and the misses that its work causes.

    *First tokens.* Waiting requests are served in order of arrival, so a new request delays none of them. It delays
    requests that arrive while its work is there. Let b be the busy share of the fleet, by its scarcest resource: time
    for prompts, batch slots or KV blocks. A wait w then shrinks by d = 1 - b per second, and r requests arrive at the
    replica per second. Of the requests that arrive in the next T seconds, r times the integral of P(w - d t) over t
    from 0 to T are late, where P(w) is the probability that a first token is late after a wait of w. Let G be the
    integral of P. Then the new request's prompt of p seconds makes this many requests late:

        N(w + p) - N(w),    N(w) = r (G(w) - G(w - d T)) / d.

    An idle replica has w = 0: no request is late unless the prompt alone takes nearly as long as the SLO. A replica
    that is already late drains p / d seconds later, so that r p / d more requests are late: it attracts no requests.
    Only beyond the fleet's capacity (d = 0), where all requests that arrive within T are late anyway, one more costs
    nothing. A request that is late everywhere then goes to a replica whose requests are late anyway, and the rest of
    the fleet stays on time. Fast replicas, which receive more requests, are kept on time before slow ones, and small
    requests before large ones. b is the fleet's value and not the replica's: if other replicas have time, the router
    sends less to a late one. T is the time over which r is measured. Arriving requests are assumed to have the new
    request's SLO.

    *Times per token and last tokens* of requests that decode there grow with prompts and longer iterations. The
    remaining output is unknown, so output lengths are assumed to be exponential.
    """

    pairs = True

    def __init__(self) -> None:
        self._output = MeanOutput()
        self._speeds: dict[str, EngineSpeed] = {}
        """Engine speeds by pool."""
        self._states: dict[int, ReplicaState] = {}
        """States by replica."""
        self._decoding: dict[int, tuple[int, int]] = {}
        """Holds, for each request in flight, its decode replica and its prompt tokens."""
        self._busy = self._seen_busy = 0.0
        """Busy share, averaged over replicas and over the last decisions."""
        self._num_seen = 0
        self._turn = 0
        self._off: dict[int, int] = {}
        """Maps the id of each replica that is slower or faster than expected to its position among all replicas when it
        was observed."""
        self._unnoted: tuple[set[int], set[int]] = set(), set()
        """Replicas whose scores have fallen since their bounds were computed though they did not change, as a request
        that was placed there has ended elsewhere; by the two kinds of bounds."""
        self._least_capacity_tokens = sys.maxsize
        """KV tokens of the smallest replica so far."""
        self._read: ReplicaLoad | None = None
        """The values of the replica whose bounds or score were computed last, during one search."""
        self._best: ReplicaLoad | None = None
        """The replica with the least score so far, during one search."""
        self._least_s = inf
        """The score of `_best`."""
        self._reads_all = False
        """Whether all replicas must be read: a request has had an SLO, or a replica has a role."""

    def route(self, request: RequestView, view: FleetView) -> Placement:
        features = _Features(request, self._output.tokens, view.now)
        scores: list[tuple[int, float]] = []
        best = self._search(request, features, view) or self._scan(request, features, view, scores)
        if self._num_seen:
            self._busy += (self._seen_busy / self._num_seen - self._busy) / _MEAN_OVER
            self._seen_busy, self._num_seen = 0.0, 0
        self._place(request, features, best)
        self._observe(view.replicas, view.now)
        return Placement(
            best.replica, None if best.decode < 0 else best.decode, tuple(scores) if view.wants_scores else ()
        )

    def learn(self, record: Ended) -> None:
        self._output.learn(record)
        state = self._states.get(record.replica)
        if state is not None:
            state.ended_tokens += record.generated_tokens
        self._forget(record.id, record.replica)

    # Candidates.

    def _search(self, request: RequestView, features: _Features, view: FleetView) -> _Candidate | None:
        """The best replica by `ReplicaLoad.bounds`, if the bounds are valid; None if all replicas must be read."""
        if features.ttft_slo_s or features.tpot_slo_s or features.e2e_slo_s:
            self._reads_all = True
        if self._reads_all or features.has_prefix or view.wants_scores:
            return None
        output_tokens = features.output_tokens
        weights = float(features.prompt_tokens), output_tokens, output_tokens * features.mean_kv_tokens
        is_short = self._is_short(features)
        bounds = self._bounds_if_short if is_short else self._bounds
        found = view.find_least_score(bounds, weights, partial(self._score_of, request, features))
        least = self._best
        self._read = self._best = None
        if found is None or least is None or self._reads_all or (is_short and not self._is_short(features)):
            return None
        best, replicas = self._candidate(request, features, least, self._least_s), view.replicas
        apart = []
        for id, place in self._off.items():
            if place >= len(replicas) or replicas[place].id != id:
                return None
            apart.append(replicas[place])
        if unnoted := self._unnoted[is_short]:
            apart += [replica for replica in replicas if replica.id in unnoted]
        for replica in apart:
            other = self._single(request, features, replica, replica.num_in_flight)
            if other.precedes(best):
                best = other
        return best

    def _is_short(self, features: _Features) -> bool:
        """Whether the prompt is short for all replicas so far."""
        return SHORT * features.prompt_tokens <= self._least_capacity_tokens

    def _bounds(self, replica: ReplicaView, is_short: bool = False) -> Bounds:
        load = self._read = self._load(replica)
        if load.role != "mixed":
            self._reads_all = True
        self._least_capacity_tokens = min(self._least_capacity_tokens, load.capacity_tokens)
        self._unnoted[is_short].discard(load.id)
        return load.bounds(is_short)

    def _bounds_if_short(self, replica: ReplicaView) -> Bounds:
        return self._bounds(replica, is_short=True)

    def _score_of(self, request: RequestView, features: _Features, replica: ReplicaView) -> float:
        load, best = self._read, self._best
        if load is None or load.replica is not replica:
            load = self._load(replica)
        score = self._added_s(request, features, load)
        if best is None or score < self._least_s or (score == self._least_s and load.id < best.id):
            self._best, self._least_s = load, score
        return score

    def _scan(
        self, request: RequestView, features: _Features, view: FleetView, scores: list[tuple[int, float]]
    ) -> _Candidate:
        """The best of all candidates. Scores are appended to `scores` if it is given."""
        split: list[ReplicaView] = []
        least, chosen = inf, None
        for load in view.map(self._load):
            if load.role != "mixed":
                split.append(load.replica)
                continue
            score = self._added_s(request, features, load)
            if view.wants_scores:
                scores.append((load.id, score))
            if chosen is None or score < least or (score == least and load.id < chosen.id):
                least, chosen = score, load
        found = [] if chosen is None else [self._candidate(request, features, chosen, least)]
        if split or not found:
            others = self._in_combos(request, features, split)
            if not others and not found:  # single-phase engines without a partner: control chooses the decode replica
                one = next((replica for replica in split if replica.role == "prefill"), split[0])
                others.append(self._single(request, features, one, one.num_in_flight))
            found += others
            scores += [(each.replica, each.score) for each in others]
        best = found[0]
        for each in found:
            if each.precedes(best):
                best = each
        return best

    def _load(self, replica: ReplicaView) -> ReplicaLoad:
        load = ReplicaLoad(replica)
        load.assess(self._state(replica, load.id, load.times), load.num_in_flight)
        return load

    def _single(self, request: RequestView, features: _Features, replica: ReplicaView, num: int) -> _Candidate:
        """The replica for the whole request, beside `num` others that decode there now or later."""
        load = ReplicaLoad(replica)
        load.assess(self._state(replica, load.id, load.times), num)
        return self._candidate(request, features, load, self._added_s(request, features, load))

    def _candidate(self, request: RequestView, features: _Features, load: ReplicaLoad, score: float) -> _Candidate:
        prompt_s, tokens = self._prompt(request, features, load.replica, load.state.speed)
        return _Candidate(score, load.id, -1, prompt_s, tokens)

    def _added_s(self, request: RequestView, features: _Features, load: ReplicaLoad) -> float:
        """The score of a replica for the whole request."""
        state, num, held = load.state, load.num, load.held_tokens
        state.pass_time(features.now)
        speed, ratio = state.speed, state.observed.factor
        prompt_s = self._prompt(request, features, load.replica, speed)[0]
        needed = held + load.waiting_tokens + features.prompt_tokens
        if 2 * needed > load.capacity_tokens:  # current answers will have grown by the time that others have ended
            needed += max(int(num * features.output_tokens) - load.tokens_generated, 0)
        beside, step_s, next_base_s, context_s = num, load.step_s, load.next_base_s, load.next_context_s
        start_s, context, room_s, more_room_s = load.start_s, load.context_tokens, 0.0, 0.0
        if num >= load.max_num_seqs or needed > load.capacity_tokens:
            beside = min(num, max(load.num_running, 1))  # requests that already wait are not slowed down
            context = max(context * beside // max(num, 1), held + load.waiting_tokens)
            base_s, context_s = speed.line(beside)
            step_s = base_s + context_s * context
            next_base_s, context_s = speed.line(beside + 1)
            start_s = step_s + speed.first_s + load.waiting_tokens * speed.token_s
            request_s = step_s * features.output_tokens
            room_s = _room_s(load.max_num_seqs, load.capacity_tokens, num, needed, held, request_s)
            more_room_s = -room_s + _room_s(
                load.max_num_seqs, load.capacity_tokens, num + 1, needed + features.prompt_tokens, held, request_s
            )
        next_step_s = next_base_s + context_s * (context + features.mean_kv_tokens)
        way_s = 2.0 * load.replica.latency_s(features.region) if features.region else 0.0
        share, wait_s = state.prompts_s / SHARE_WINDOW_S, ratio * (start_s + room_s) + way_s
        delayed = 0.0
        if features.ttft_slo_s:
            self._see_busy(ratio * share, (num + 1) / max(load.max_num_seqs, 1), needed / max(load.capacity_tokens, 1))
            delayed = num_delayed(
                features.ttft_slo_s,
                state.rate_rps,
                wait_s + ratio * state.mean_prompt_s,
                ratio * (prompt_s + more_room_s),
                self._busy,
            )
        return self._score(
            features,
            wait_s=wait_s + ratio * prompt_s,
            move_s=0.0,
            prompt_s=ratio * prompt_s,
            delayed=delayed,
            step_s=ratio * step_s,
            next_step_s=ratio * next_step_s,
            num_beside=beside,
            num=beside,
            share=share,
        )

    def _pair(self, request: RequestView, features: _Features, first: ReplicaView, last: ReplicaView) -> _Candidate:
        """A pair: one replica for the prompt and another for the answer."""
        at_first, at_last = self._state_of(first), self._state_of(last)
        at_first.pass_time(features.now)
        at_last.pass_time(features.now)
        speed = at_first.speed
        prompt_s, tokens = self._prompt(request, features, first, speed)
        waiting = max(first.prefill_tokens_left - first.expected_cached_tokens, 0)
        num_beside = at_first.num_decoding
        start_s = speed.line(num_beside)[0] + speed.first_s + waiting * speed.token_s
        num = max(last.num_in_flight, at_last.num_decoding)
        held = last.kv_blocks_used * last.block_size_tokens
        context = at_last.context_tokens(num, held, last.tokens_generated)
        base_s, context_s = at_last.speed.line(num)
        step_s = base_s + context_s * context
        base_s, context_s = at_last.speed.line(num + 1)
        next_step_s = base_s + context_s * (context + features.mean_kv_tokens)
        move_s = last.kv_transfer_s(features.prompt_tokens)
        needed = held + features.prompt_tokens
        capacity = last.kv_blocks_total * last.block_size_tokens
        if num >= last.max_num_seqs or needed > capacity:
            move_s += _room_s(last.max_num_seqs, capacity, num, needed, held, step_s * features.output_tokens)
        way_s = 2.0 * first.latency_s(features.region) if features.region else 0.0
        of_first, of_last = at_first.observed.factor, at_last.observed.factor
        wait_s, share = of_first * start_s + way_s, at_first.prompts_s / SHARE_WINDOW_S
        delayed = 0.0
        if features.ttft_slo_s:
            self._see_busy(of_first * share, 0.0, 0.0)
            delayed = num_delayed(
                features.ttft_slo_s,
                at_first.rate_rps,
                wait_s + of_first * at_first.mean_prompt_s,
                of_first * prompt_s,
                self._busy,
            )
        score = self._score(
            features,
            wait_s=wait_s + of_first * prompt_s,
            move_s=of_last * move_s,
            prompt_s=of_first * prompt_s,
            delayed=delayed,
            step_s=of_last * step_s,
            next_step_s=of_last * next_step_s,
            num_beside=num_beside,
            num=num,
            share=at_last.prompts_s / SHARE_WINDOW_S,
        )
        return _Candidate(score, first.id, last.id, prompt_s, tokens)

    def _in_combos(self, request: RequestView, features: _Features, split: Sequence[ReplicaView]) -> list[_Candidate]:
        """Candidates among single-phase replicas: pairs, and replicas that could run both phases."""
        found: list[_Candidate] = []
        for one in split:
            state = self._state_of(one)
            state.pass_time(features.now)
            num = state.num_decoding
            if one.role == "decode":
                num = max(num, one.num_in_flight)
            else:
                others = [other for other in split if other.role == "decode" and other.combo == one.combo]
                found += [self._pair(request, features, one, other) for other in others]
            if not one.is_single_phase:
                found.append(self._single(request, features, one, num))
        return found

    def _see_busy(self, prompts: float, seats: float, blocks: float) -> None:
        """Count how busy a replica is, by its scarcest resource."""
        self._seen_busy += max(prompts, seats, blocks)
        self._num_seen += 1

    # Times.

    @staticmethod
    def _score(
        features: _Features,
        *,
        wait_s: float,
        move_s: float,
        prompt_s: float,
        delayed: float,
        step_s: float,
        next_step_s: float,
        num_beside: int,
        num: int,
        share: float,
    ) -> float:
        """Total seconds added: to the request, to the requests beside its prompt and its answer, and to the `delayed`
        future requests that it makes late."""
        output_tokens = features.output_tokens
        own_s = move_s + output_tokens * next_step_s
        score = WAIT_WEIGHT * wait_s + own_s + num_beside * prompt_s
        score += num * output_tokens * (next_step_s - step_s)
        missed = 0.0
        slo_s = features.ttft_slo_s
        if slo_s:
            missed = late_probability(wait_s / slo_s)
            score += _LOST_S * delayed
        if features.tpot_slo_s or features.e2e_slo_s:
            step_s /= 1.0 - min(share, _MOST_SHARE)
            next_step_s /= 1.0 - min(share + prompt_s / SHARE_WINDOW_S, _MOST_SHARE)
        slo_s = features.tpot_slo_s
        if slo_s:
            slow = slow_probability(next_step_s / slo_s)
            score += _LOST_S * _SLOWED * num * (slow - slow_probability(step_s / slo_s))
            missed = max(missed, slow)
        slo_s = features.e2e_slo_s
        if slo_s:
            left_s = slo_s - wait_s - move_s
            late = long_probability(left_s, output_tokens * next_step_s)
            if num:
                score += _LOST_S * num * (late - long_probability(left_s, output_tokens * step_s))
            missed = max(missed, late)
        return score + _LOST_S * missed

    @staticmethod
    def _prompt(
        request: RequestView, features: _Features, replica: ReplicaView, speed: EngineSpeed
    ) -> tuple[float, int]:
        """Seconds to compute or load the request's own prompt, and the tokens to compute."""
        tokens = features.prompt_tokens
        if not features.has_prefix:
            return tokens * speed.token_s, tokens
        tokens -= replica.cached_tokens(request)
        loadable = replica.loadable_tokens(request)
        if not loadable:
            return tokens * speed.token_s, tokens
        load_s = min(replica.kv_transfer_s(loadable), loadable * speed.token_s)
        return (tokens - loadable) * speed.token_s + load_s, tokens - loadable

    # The state of the replicas.

    def _state_of(self, replica: ReplicaView) -> ReplicaState:
        return self._state(replica, replica.id, replica.times)

    def _state(self, replica: ReplicaView, id: int, times: EngineTimes | None) -> ReplicaState:
        state = self._states.get(id)
        if state is None:
            state = self._states[id] = ReplicaState(self._speed(replica), replica.region)
        elif state.speed.times is not times:
            state.speed = self._speed(replica)
        return state

    def _speed(self, replica: ReplicaView) -> EngineSpeed:
        speed = self._speeds.get(replica.pool)
        if speed is None or speed.times is not replica.times:
            speed = self._speeds[replica.pool] = EngineSpeed(replica.times, replica.max_num_seqs)
        return speed

    def _place(self, request: RequestView, features: _Features, best: _Candidate) -> None:
        """Add a request to the replica's expected prompts and request rate."""
        state = self._states[best.replica]
        state.prompts_s += best.prompt_s
        if features.ttft_slo_s:
            state.rate_rps += 1.0 / RATE_WINDOW_S
        state.mean_prompt_s += (best.prompt_s - state.mean_prompt_s) / _MEAN_OVER
        state.placed_tokens += best.prompt_tokens
        self._forget(request.id, -1)  # for a request that is placed again
        if len(self._decoding) < _MOST_PLACED:
            decode = best.replica if best.decode < 0 else best.decode
            state = self._states[decode]
            state.num_decoding += 1
            state.decoding_tokens += features.prompt_tokens
            self._decoding[request.id] = decode, features.prompt_tokens

    def _forget(self, request: int, replica: int) -> None:
        """Forget where a request was placed. `replica`: where it has ended; -1 if it has not."""
        placed = self._decoding.pop(request, None)
        if placed is not None and (state := self._states.get(placed[0])) is not None and state.num_decoding:
            state.num_decoding -= 1
            state.decoding_tokens -= placed[1]
            if placed[0] != replica:
                for unnoted in self._unnoted:
                    unnoted.add(placed[0])

    def _observe(self, replicas: Sequence[ReplicaView], now: float) -> None:
        """Observe one of the replicas. Each call observes another replica."""
        self._turn += 1
        place = self._turn % len(replicas)
        replica = replicas[place]
        state = self._state_of(replica)
        state.pass_time(now)
        if replica.is_shared:  # ends at other gateways are unknown, so the done work is unknown, too
            return
        if state.observed.is_due(now):
            left = max(replica.prefill_tokens_left - replica.expected_cached_tokens, 0)
            num_running, generated = replica.num_running, replica.tokens_generated
            held = replica.kv_blocks_used * replica.block_size_tokens
            context = state.context_tokens(num_running, held, generated)
            state.observed.update(
                state.speed, now, num_running, context, state.placed_tokens - left, state.ended_tokens + generated
            )
        if state.observed.factor != 1.0:
            self._off[replica.id] = place
        else:
            self._off.pop(replica.id, None)
        if len(self._states) > 2 * len(replicas) + 64:
            self._states = {id: one for id, one in self._states.items() if one.updated_s > now - _FORGET_S}
            self._off = {id: place for id, place in self._off.items() if id in self._states}
            for unnoted in self._unnoted:
                unnoted.intersection_update(self._states)


def _room_s(max_num_seqs: int, capacity_tokens: int, num: int, needed: int, held: int, request_s: float) -> float:
    """Seconds until a replica has a batch slot, and KV blocks for `needed` tokens, if each request takes
    `request_s`."""
    seat_s = (num + 1 - max_num_seqs) * request_s / max(max_num_seqs, 1)
    blocks_s = (needed - capacity_tokens) * request_s / held if held else 0.0
    return max(seat_s, blocks_s, 0.0)
