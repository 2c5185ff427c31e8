"""The trial of orderings, and the rules for ranks."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import Any

from headway.core.policy import MovingOrdering, Ordering, QueuedOrdering, SharingOrdering, SteppedOrdering
from headway.testing.stories import draw_request, progress
from headway.testing.strict_views import BrokenPolicyError, PolicyCall, request_view
from headway.testing.trial import Conformance, Make, Trial, common_checks, is_oracle, pickled

_NOW = 1000.0
_MOST_STARTS = 500
"""Number of starts within which each share of the most urgent tier must have ranked first once."""


@dataclass(frozen=True)
class RankedRequest:
    """A waiting request of the story. No request ends."""

    request: dict[str, Any]
    ended: None = None


def draw_requests(seed: int, num: int = 24) -> list[RankedRequest]:
    rng = Random(seed)
    return [RankedRequest(draw_request(rng, id, _NOW)) for id in range(num)]


class OrderingTrial(Trial[Ordering, RankedRequest]):
    draw_story = staticmethod(draw_requests)
    num_steps = 24

    def decide(self, step: RankedRequest, call: PolicyCall) -> tuple[Any, ...]:
        request = request_view(step.request, call)
        decisions = [self.policy.rank(request, _NOW)]
        if isinstance(self.policy, MovingOrdering):
            decisions.append(self.policy.next_change(request, _NOW))
        if isinstance(self.policy, SteppedOrdering):
            decisions.append(self.policy.next_change_tokens(request))
        return tuple(decisions)


def states_how_it_preempts(make: Make, seed: int) -> None:
    """`quantum` is a number of tokens or None, `preemptive` is True or False."""
    ordering = make()
    quantum, preemptive = getattr(ordering, "quantum", ""), getattr(ordering, "preemptive", "")
    if quantum is not None and (type(quantum) is not int or quantum < 1):
        raise BrokenPolicyError(f"quantum is {quantum!r}; it must be a number of tokens, or None")
    if type(preemptive) is not bool:
        raise BrokenPolicyError(f"preemptive is {preemptive!r}; it must be True or False")


def ranks_compare(make: Make, seed: int) -> None:
    """All ranks have the same shape, and exactly one of <, ==, > holds between any two."""
    ordering = make()
    ranks = [_rank(ordering, values, _NOW) for values in _requests(seed)]
    shapes = {(type(rank), len(rank) if isinstance(rank, tuple) else 0) for rank in ranks}
    if len(shapes) > 1:
        raise BrokenPolicyError(f"ranks are of several shapes: {sorted(map(str, shapes))}")
    for one, other in [*combinations(ranks, 2), *((rank, rank) for rank in ranks)]:
        try:
            relations = (one < other) + (one == other) + (one > other)
        except TypeError as error:
            raise BrokenPolicyError(f"ranks {one!r} and {other!r} cannot be compared: {error}") from None
        if relations != 1:
            raise BrokenPolicyError(f"ranks {one!r} and {other!r} have no order; is there a NaN among them?")


def ranks_repeat(make: Make, seed: int) -> None:
    """A fresh, a used and a pickled instance give the same ranks."""
    used, fresh = make(), make()
    requests = _requests(seed)
    ranks = [_rank(used, values, _NOW) for values in requests]
    for which, other in (("a fresh instance", fresh), ("a pickled copy", pickled(used)), ("it", used)):
        if [_rank(other, values, _NOW) for values in requests] != ranks:
            raise BrokenPolicyError(f"{which} ranked the same requests differently")


def announces_changes_with_time(make: Make, seed: int) -> None:
    """While nothing happens to a request, its rank stays the same until the time that `next_change` returns."""
    ordering = make()
    for values in _requests(seed):
        rank = _rank(ordering, values, _NOW)
        until = _next_change(ordering, values, _NOW)
        horizon = min(until, _NOW + 1e6)
        for share in (0.1, 0.5, 0.999):
            now = _NOW + share * (horizon - _NOW)
            if now < until and _rank(ordering, values, now) != rank:
                raise BrokenPolicyError(f"the rank moved between {_NOW} s and {now} s; next_change returned {until} s")


def announces_changes_with_tokens(make: Make, seed: int) -> None:
    """While a request gains tokens, its rank does not get worse before the number that `next_change_tokens` returns."""
    ordering = make()
    for values in _requests(seed):
        left = values["output_tokens"] - values["generated_tokens"]
        steps = min(left, 50)
        if isinstance(ordering, SteppedOrdering):
            announced = ordering.next_change_tokens(request_view(values, PolicyCall(is_oracle(ordering))))
            if announced is not None and announced < 1:
                raise BrokenPolicyError(f"next_change_tokens returned {announced}; it must be at least 1")
            steps = steps if announced is None else min(steps, announced - 1)
        rank, phase = _rank(ordering, values, _NOW), values["phase"]
        for gained in range(1, steps + 1):
            grown = {**values, **progress(values["generated_tokens"] + gained, values["reasoning_tokens"])}
            before, rank = rank, _rank(ordering, grown, _NOW)
            may_change = isinstance(ordering, QueuedOrdering) and grown["phase"] != phase
            phase = grown["phase"]
            if rank > before and not may_change:
                raise BrokenPolicyError(
                    f"the rank got worse after {gained} tokens, which next_change_tokens did not announce"
                )


def ranks_by_its_queues(make: Make, seed: int) -> None:
    """An ordering with several queues assigns each request to one of its queues, and ranks begin with the queue."""
    ordering: Ordering = make()
    if not isinstance(ordering, QueuedOrdering):
        return
    for values in _requests(seed):
        rank = _rank(ordering, values, _NOW)
        queue = ordering.queue(request_view(values, PolicyCall(is_oracle(ordering))))
        if type(queue) is not int or not 0 <= queue < ordering.num_queues:
            raise BrokenPolicyError(f"queue {queue!r} of a request is not between 0 and {ordering.num_queues - 1}")
        if not isinstance(rank, tuple) or not rank or rank[0] != queue:
            raise BrokenPolicyError(f"rank {rank!r} of a request in queue {queue} does not begin with its queue")


def shares_service(make: Make, seed: int) -> None:
    """Ranks within one share differ only by arrival. When a request starts, its share ranks no better than before. A
    waiting share soon ranks first, even if many requests of other shares start."""
    ordering: Ordering = make()
    if not isinstance(ordering, SharingOrdering):
        return
    requests = _requests(seed)
    first_of = {_share(ordering, values): values for values in reversed(requests)}
    for values in requests:
        first = first_of[_share(ordering, values)]
        at_once = {name: first[name] for name in ("arrival_s", "tier_since_s")}
        if _rank(ordering, {**values, **at_once}, _NOW) != _rank(ordering, first, _NOW):
            raise BrokenPolicyError("requests of one share rank differently at the same arrival")
    never = set(first_of)
    for started in range(_MOST_STARTS):
        share = min(first_of, key=lambda share: _rank(ordering, first_of[share], _NOW))
        values = {**first_of[share], "id": len(requests) + started}
        before = _rank(ordering, values, _NOW)
        ordering.started(request_view(values, PolicyCall(is_oracle(ordering))), _NOW)
        if _rank(ordering, values, _NOW) < before:
            raise BrokenPolicyError(f"the share {share!r} ranks better after a request of it has started")
        never.discard(share)
    tier = min(values["tier"] for values in requests)
    if starved := [share for share in never if first_of[share]["tier"] == tier]:
        raise BrokenPolicyError(f"the share {starved[0]!r} waited while {_MOST_STARTS} requests of others started")


ORDERINGS = Conformance(
    OrderingTrial,
    (
        states_how_it_preempts,
        ranks_compare,
        ranks_repeat,
        announces_changes_with_time,
        announces_changes_with_tokens,
        ranks_by_its_queues,
        shares_service,
        *common_checks(OrderingTrial),
    ),
)


def _requests(seed: int) -> list[dict[str, Any]]:
    return [step.request for step in draw_requests(seed)]


def _rank(ordering: Ordering, values: dict[str, Any], now: float) -> Any:
    return ordering.rank(request_view(values, PolicyCall(is_oracle(ordering))), now)


def _share(ordering: SharingOrdering, values: dict[str, Any]) -> Hashable:
    return ordering.share(request_view(values, PolicyCall()))


def _next_change(ordering: Ordering, values: dict[str, Any], now: float) -> float:
    if not isinstance(ordering, MovingOrdering):
        return float("inf")
    change = ordering.next_change(request_view(values, PolicyCall(is_oracle(ordering))), now)
    if change is not None and not change > now:
        raise BrokenPolicyError(f"next_change returned {change} s at {now} s; it must be later, or None")
    return float("inf") if change is None else change
