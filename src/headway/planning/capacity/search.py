"""The cheapest fleet of equal replicas that meets its targets, by search over rehearsals.

Sets and parameters
    c in C      candidates (GPU, parallelism, routing)
    u_c         price of one replica of c, $/h
    l_c         fewest replicas that can do the work, from `CandidateBounds`; infinite if no number is enough
    N           most replicas tried
    ok(c, n)    whether n replicas of c meet every target, by a rehearsal
Variables       c in C, n in l_c..N
Minimise        u_c n   subject to ok(c, n)
Assumed         ok(c, n) implies ok(c, n + 1); tested on all rehearsals.

Best first: the candidate with the least u_c l_c is settled by doubling and bisection. Any other candidate is rehearsed
once with the most replicas that would still be cheaper. If that misses a target, no cheaper number meets all, and its
bound rises to the incumbent's cost. When no bound is below the incumbent's cost, the incumbent is the cheapest.

If the rehearsals of a candidate contradict the assumption, the search rehearses every remaining number of its replicas
that costs less than the plan. The plan's bound is the least cost that is not refuted: of a fleet that neither missed a
target in a rehearsal nor has fewer than l_c replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf

from msgspec.structs import replace

from headway.core.errors import HeadwayError
from headway.planning.capacity.problem import (
    SLO_NAMES,
    SLOS,
    TIE,
    BestReached,
    CandidateBounds,
    CandidateResult,
    CapacityCandidate,
    CapacityEvaluator,
    CapacityPlan,
    CapacityProblem,
    PolicyResult,
    RehearsalMetrics,
    RehearsedSize,
    Situation,
    Targets,
    WhatIf,
    distance,
    misses,
)
from headway.planning.together import Together, in_turn

Progress = Callable[[int, int], None]
Judge = Callable[[CapacityCandidate, int, Situation], bool]
"""Returns whether a rehearsal meets all targets, like `CapacityEvaluator` with `misses`."""
AS_ASKED = Situation()
GAIN = 0.05
"""Doubling replicas counts as a gain if a missed target comes nearer by this share."""


@dataclass
class _CandidateSearch:
    """The search over one candidate's replicas: fewer than `low` miss a target, `high` meet all."""

    candidate: CapacityCandidate
    bounds: CandidateBounds
    low: int
    most: int
    least: int
    """The initial `low`: fewer replicas cannot do the work."""
    high: int | None = None
    sizes: dict[int, RehearsedSize] = field(default_factory=dict)
    leapt: bool = False
    """Whether doubling gained nothing although the largest number of replicas meets all targets."""

    @property
    def usd(self) -> float:
        return self.candidate.usd_per_replica_hour

    @property
    def bound_usd(self) -> float:
        return self.low * self.usd if self.low <= self.most else inf

    @property
    def settled_usd(self) -> float:
        """Cost of the candidate once the smallest number of replicas is known, otherwise infinite."""
        return self.high * self.usd if self.high is not None and self.high == self.low else inf

    def open_sizes(self, limit_usd: float) -> list[int]:
        """Numbers of replicas that cost less than `limit_usd` and are not known to miss a target."""
        if self.bounds.reason is not None:
            return []
        sizes = range(self.least, self.most + 1)
        return [n for n in sizes if n * self.usd < _below(limit_usd) and n not in self.sizes]

    @property
    def is_monotone(self) -> bool:
        """Whether no rehearsed number of replicas does worse than a smaller one."""
        best: RehearsedSize | None = None
        for _, size in sorted(self.sizes.items()):
            if best is not None and size.misses and (not best.misses or _is_worse(best, size)):
                return False
            best = size
        return True


class _CapacitySearch:
    def __init__(
        self,
        problem: CapacityProblem,
        evaluate: CapacityEvaluator,
        judge: Judge | None,
        together: Together,
        progress: Progress | None,
    ) -> None:
        self.problem, self.evaluate, self.judge, self.together = problem, evaluate, judge, together
        self.progress = progress
        self.rehearsed: dict[tuple[CapacityCandidate, int, Situation], RehearsalMetrics] = {}
        self.judged: dict[tuple[CapacityCandidate, int, Situation], bool] = {}
        """Verdicts for which no metrics were computed."""
        self.expected = 0

    @property
    def num_rehearsals(self) -> int:
        return len(self.rehearsed) + len(self.judged)

    def measured(self, each: _CandidateSearch, replicas: int, situation: Situation = AS_ASKED) -> RehearsalMetrics:
        key = (each.candidate, replicas, situation)
        if key not in self.rehearsed:
            self._report()
            self.rehearsed[key] = self.evaluate(*key)
        return self.rehearsed[key]

    def is_met(self, each: _CandidateSearch, replicas: int, situation: Situation) -> bool:
        """Whether all targets are met, where no metrics are needed."""
        key = (each.candidate, replicas, situation)
        if self.judge is None or key in self.rehearsed:
            return not misses(self.measured(each, replicas, situation), self.problem.targets)
        if key not in self.judged:
            self._report()
            self.judged[key] = self.judge(*key)
        return self.judged[key]

    def _report(self) -> None:
        if self.progress is not None:
            self.progress(self.num_rehearsals, max(self.expected, self.num_rehearsals + 1))

    def meets_targets(self, each: _CandidateSearch, replicas: int) -> bool:
        """Rehearse a number of replicas and narrow the candidate's range."""
        measured = self.measured(each, replicas)
        missed = misses(measured, self.problem.targets)
        each.sizes[replicas] = RehearsedSize(replicas, measured, missed)
        if missed:
            each.low = max(each.low, replicas + 1)
        else:
            each.high = replicas if each.high is None else min(each.high, replicas)
        return not missed

    def settle(self, each: _CandidateSearch, most: int) -> None:
        """Find the smallest number up to `most`: by doubling, which ends if it gains nothing, then by bisection.

        Of rehearsals that end early it is unknown whether doubling gains. If one ends after as many arrivals as the one
        before, `most` replicas are rehearsed next, which may rule all out.
        """
        before, n, leaps, doubles = None, each.low, False, each.high is None
        while doubles and not self.meets_targets(each, n) and n < most:
            gains = before is None or _gains(each.sizes[before], each.sizes[n])
            if before is not None and _is_stuck(each.sizes[before], each.sizes[n]):
                doubles = self.meets_targets(each, most)
            before, n = n, min(2 * n, most) if gains else most
            leaps = not gains
        each.leapt |= leaps and each.high is not None
        while each.high is not None and each.low < each.high:
            self.meets_targets(each, (each.low + each.high) // 2)

    def cheapest(self, among: Sequence[_CandidateSearch]) -> _CandidateSearch | None:
        """The candidate with the lowest cost, proved by the bounds of the others."""
        best: _CandidateSearch | None = None
        for each in among:
            if each.settled_usd < (best.settled_usd if best else inf):
                best = each
        while True:
            limit = best.settled_usd if best else inf
            rest = [each for each in among if each is not best and each.bound_usd < _below(limit)]
            if not rest:
                return best
            each = min(rest, key=lambda one: one.bound_usd)
            self.expected = self.num_rehearsals + 2 * len(rest) + 4 + 3 * len(self.problem.situations)
            most = each.most if best is None else _most_below(limit, each)
            if best is None or each.high is not None or self.meets_targets(each, most):
                self.settle(each, most if each.high is None else each.high)
            if each.settled_usd < _below(limit):
                best = each


def _gains(before: RehearsedSize, after: RehearsedSize) -> bool:
    if after.measured.is_stopped:
        return True  # nothing is known of how much it missed
    for name in after.misses:
        old, new = getattr(before.measured, name), getattr(after.measured, name)
        if new is not None and (old is None or abs(new - old) > GAIN * abs(old)):
            return True
    return False


def _is_stuck(before: RehearsedSize, after: RehearsedSize) -> bool:
    """Whether both rehearsals ended early, the one with more replicas hardly later."""
    is_early = before.measured.is_stopped and after.measured.is_stopped
    return is_early and after.measured.num_requests <= (1 + GAIN) * before.measured.num_requests


def _is_worse(before: RehearsedSize, after: RehearsedSize) -> bool:
    """Whether both numbers of replicas miss some target, and `after` misses it by clearly more than `before`."""
    for name in set(before.misses) & set(after.misses):
        old, new = getattr(before.measured, name), getattr(after.measured, name)
        sign = -1 if name == "attainment" else 1
        if old is not None and (new is None or sign * (new - old) > GAIN * abs(old)):
            return True
    return False


def _below(limit: float) -> float:
    """The limit, slightly reduced, so that rounding alone brings no cost below it."""
    return limit * (1 - 1e-9)


def _most_below(limit: float, each: _CandidateSearch) -> int:
    if each.usd <= 0:
        return each.most
    return min(each.most, max(ceil(_below(limit) / each.usd) - 1, each.low))


def cheapest_fleet(
    problem: CapacityProblem,
    bounds: Sequence[CandidateBounds],
    evaluate: CapacityEvaluator,
    progress: Progress | None = None,
    judge: Judge | None = None,
    together: Together = in_turn,
) -> CapacityPlan:
    """The cheapest candidate and number of replicas; `bounds[i]` belongs to `problem.candidates[i]`.

    `judge` is called where the verdict suffices, in place of `evaluate`. The plan does not depend on the order in which
    `together` makes calls. Raises HeadwayError without a candidate or a target.
    """
    _check(problem)
    search = _CapacitySearch(problem, evaluate, judge, together, progress)
    searches = [_start(problem, *pair) for pair in zip(problem.candidates, bounds, strict=True)]
    best = search.cheapest(searches) or _look_again(search, searches, None)
    if best is None:
        reach = [_reach(name, problem.targets, searches) for name in SLOS if getattr(problem.targets, name) is not None]
        return CapacityPlan(
            status="infeasible",
            targets=problem.targets,
            options=tuple(map(_result, searches)),
            reach=tuple(reach),
            num_rehearsals=search.num_rehearsals,
        )
    return _optimal(search, searches, best)


def _optimal(search: _CapacitySearch, searches: list[_CandidateSearch], best: _CandidateSearch) -> CapacityPlan:
    """The plan with the best policy, compared with what is near it: runners-up, one replica less, what-ifs."""
    problem = search.problem
    cheaper: _CandidateSearch | None = best
    while cheaper is not None:
        best, policies = _best_policy(search, searches, cheaper)
        assert best.high is not None
        replicas = best.high
        _rehearse_neighbours(search, best, replicas)
        cheaper = _look_again(search, searches, (best, replicas))
    best.low = best.high = replicas
    usd = replicas * best.usd
    others = _other_gpus(searches, best)
    what_ifs = [partial(_what_if, search, best, replicas, each) for each in problem.situations]
    found = search.together([*(partial(_runner_up, search, among) for among in others), *what_ifs])
    one_less = best.sizes.get(replicas - 1)
    still_open = [n * each.usd for each in searches for n in each.open_sizes(usd)]
    return CapacityPlan(
        status="optimal",
        targets=problem.targets,
        objective_usd_per_hour=usd,
        bound_usd_per_hour=min(still_open, default=usd),
        num_assumed=len(still_open),
        choice=_result(best),
        measured=best.sizes[replicas].measured,
        binds=one_less.misses if one_less else (),
        one_less=one_less.measured if one_less else None,
        runners_up=tuple(sorted(found[: len(others)], key=_cost)),
        policies=policies,
        what_ifs=tuple(found[len(others) :]),
        options=tuple(map(_result, searches)),
        monotone=best.is_monotone if len(best.sizes) > 1 else None,
        num_rehearsals=search.num_rehearsals,
    )


def _check(problem: CapacityProblem) -> None:
    if not problem.candidates:
        raise HeadwayError("no candidates: expected at least one GPU, one tp and one routing")
    if all(getattr(problem.targets, name) is None for name in SLOS):
        raise HeadwayError("no target: expected at least one of " + ", ".join(SLOS))
    for name in SLOS:
        value = getattr(problem.targets, name)
        if value is not None and not 0 < value <= (1 if name == "attainment" else inf):
            raise HeadwayError(f"{name}: {value}; expected more than 0{', 1 at most' * (name == 'attainment')}")
    if not 1 <= problem.least_replicas <= problem.max_replicas:
        least = problem.least_replicas
        raise HeadwayError(f"max_replicas: {problem.max_replicas}; expected {least} or more")


def _start(problem: CapacityProblem, candidate: CapacityCandidate, bounds: CandidateBounds) -> _CandidateSearch:
    low = max(bounds.least_replicas, problem.least_replicas)
    most = problem.max_replicas
    return _CandidateSearch(candidate, bounds, low if bounds.reason is None else most + 1, most, low)


def _best_policy(
    search: _CapacitySearch, searches: Sequence[_CandidateSearch], best: _CandidateSearch
) -> tuple[_CandidateSearch, tuple[PolicyResult, ...]]:
    """The candidate with the best policies on the plan's replicas, and the results of all policies there.

    The search ends when nothing is cheaper, and does not compare policies of equal cost. The first of a tie is chosen.
    """
    assert best.high is not None
    replicas, targets, replica = best.high, search.problem.targets, _replica(best.candidate)
    peers = [each for each in searches if _replica(each.candidate) == replica and each.bounds.reason is None]
    if len(peers) == 1:
        return best, ()
    search.together([partial(search.measured, each, replicas) for each in peers])
    meeting = [each for each in peers if search.meets_targets(each, replicas)]
    distances = {each.candidate: distance(search.measured(each, replicas), targets) for each in peers}
    least = min(distances[each.candidate] for each in meeting)
    tied = [each for each in meeting if distances[each.candidate] <= least + TIE * abs(least)]
    chosen = tied[0]
    ordered = sorted(peers, key=lambda each: (each is not chosen, each not in tied, distances[each.candidate]))
    return chosen, tuple(
        PolicyResult(
            each.candidate.policy, search.measured(each, replicas), each.sizes[replicas].misses, ties=each in tied
        )
        for each in ordered
    )


def _replica(candidate: CapacityCandidate) -> CapacityCandidate:
    """The candidate without its policies."""
    return replace(candidate, routing="", ordering="")


def _rehearse_neighbours(search: _CapacitySearch, best: _CandidateSearch, replicas: int) -> None:
    """Test the assumption around the answer: one replica more, and one and two fewer."""
    least = search.problem.least_replicas
    near = [n for n in (replicas + 1, replicas - 1, replicas - 2) if least <= n <= best.most]
    search.together([partial(search.measured, best, n) for n in near])
    for n in near:
        search.meets_targets(best, n)


def _look_again(
    search: _CapacitySearch, searches: Sequence[_CandidateSearch], plan: tuple[_CandidateSearch, int] | None
) -> _CandidateSearch | None:
    """The candidate with the cheapest fleet below the plan's cost that meets all targets; None if there is none.

    For candidates that contradict the assumption, all cheaper numbers of replicas are rehearsed, cheapest first.
    """
    limit = inf if plan is None else _below(plan[1] * plan[0].usd)
    found: tuple[_CandidateSearch, int] | None = None
    for each in searches:
        for n, size in each.sizes.items():
            if not size.misses and n * each.usd < limit:
                limit, found = n * each.usd, (each, n)
    doubted = [each for each in searches if each.leapt or not each.is_monotone]
    sizes = [(each, n) for each in doubted for n in each.open_sizes(limit)]
    for each, n in sorted(sizes, key=lambda size: size[0].usd * size[1]):
        if search.meets_targets(each, n):
            found = each, n
            break
    if found is None:
        return None
    found[0].low = found[0].high = found[1]
    return found[0]


def _other_gpus(searches: Sequence[_CandidateSearch], best: _CandidateSearch) -> list[list[_CandidateSearch]]:
    """The candidates of each GPU except the plan's."""
    gpus = dict.fromkeys(each.candidate.gpu for each in searches if each.candidate.gpu != best.candidate.gpu)
    return [[each for each in searches if each.candidate.gpu == gpu] for gpu in gpus]


def _runner_up(search: _CapacitySearch, among: Sequence[_CandidateSearch]) -> CandidateResult:
    """The result of the cheapest candidate of one GPU type. If none is feasible, the one examined most."""
    # for an infeasible GPU: first rehearsed candidates, then bounded ones, then ones that are too large
    telling = max(
        among, key=lambda one: (bool(one.sizes), one.bounds.ttft_p99_s is not None, one.candidate.parallel.num_gpus)
    )
    return _result(search.cheapest(among) or telling)


def _what_if(search: _CapacitySearch, best: _CandidateSearch, replicas: int, situation: Situation) -> WhatIf:
    """The plan in the situation, and how many replicas of its candidate meet the targets there."""
    targets = search.problem.targets
    measured = search.measured(best, replicas, situation)
    most = ceil(best.most * max(situation.load, 1.0)) + situation.lost_replicas
    needed = _needed(lambda n: search.is_met(best, n, situation), replicas, most)
    cost = None if needed is None else needed * best.usd
    return WhatIf(situation, measured, misses(measured, targets), needed, cost)


def _needed(meets_targets: Callable[[int], bool], start: int, most: int) -> int | None:
    """The smallest number from `start` on that meets all targets; None if it exceeds `most`."""
    low, high = start, start
    while not meets_targets(high):
        if high >= most:
            return None
        low, high = high + 1, min(2 * high, most)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if meets_targets(middle) else (middle + 1, high)
    return high


def _result(each: _CandidateSearch) -> CandidateResult:
    sizes = tuple(each.sizes[n] for n in sorted(each.sizes))
    if each.settled_usd < inf:
        status, reason = "feasible", ""
    elif each.bounds.reason is not None:
        status, reason = "pruned", each.bounds.reason
    elif each.bound_usd == inf:
        status = "infeasible"
        missed = sizes[-1].misses if sizes else ()
        if missed:
            reason = f"misses {', '.join(SLO_NAMES[name] for name in missed)} with {each.most} replicas"
        else:
            reason = f"the work takes {each.low} replicas or more; {each.most} are allowed"
    else:
        status, reason = "open", f"needs {each.low} or more, which is no cheaper than what was found"
    bound = each.bound_usd
    return CandidateResult(
        candidate=each.candidate,
        status=status,  # type: ignore[arg-type]
        least_replicas=each.low,
        replicas=each.high if status == "feasible" else None,
        usd_per_hour=each.settled_usd if status == "feasible" else None,
        bound_usd_per_hour=None if bound == inf else bound,
        reason=reason,
        points=sizes,
        calibrated=not each.bounds.uncalibrated,
        uncalibrated=each.bounds.uncalibrated,
    )


def _cost(each: CandidateResult) -> float:
    return inf if each.usd_per_hour is None else each.usd_per_hour


def _reach(name: str, targets: Targets, searches: Sequence[_CandidateSearch]) -> BestReached:
    """The best rehearsed value. For a candidate that was ruled out, the bound of an unloaded replica."""
    sign = -1.0 if name == "attainment" else 1.0
    seen: list[tuple[float, str]] = []
    for each in searches:
        values = [(getattr(p.measured, name), f"{p.replicas} x {each.candidate.label}") for p in each.sizes.values()]
        if name != "attainment" and each.bounds.reason is not None:
            values.append((getattr(each.bounds, name), f"unloaded {each.candidate.label}, at best"))
        seen += [(value, where) for value, where in values if value is not None]
    best, where = min(seen, key=lambda pair: sign * pair[0]) if seen else (None, "nothing was rehearsed")
    return BestReached(name, getattr(targets, name), best, where)
