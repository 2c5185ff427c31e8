"""The cheapest fleet of equal replicas that meets its targets, by search over rehearsals.

Sets and parameters
    c in C      candidates (GPU, parallelism, routing)
    u_c         price of one replica of c, $/h
    l_c         fewest replicas that can do the work, from `Floor`; infinite where no number will do
    N           most replicas tried
    ok(c, n)    whether n replicas of c meet every target, asked of the evaluator
Variables       c in C, n in l_c..N
Minimise        u_c n   subject to ok(c, n)
Assumed         ok(c, n) implies ok(c, n + 1); looked at around the answer, and said in the plan.

Best first: the candidate with the least u_c l_c is settled by doubling and bisection. Any other is asked once with
the most replicas that would still be cheaper; if that does not do, nothing cheaper of it does, and its bound rises
to the incumbent's cost. When no bound is below the incumbent's cost, it is the cheapest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, inf

from headway.core.errors import HeadwayError
from headway.planning.capacity.problem import (
    SLOS,
    Candidate,
    Evaluator,
    Floor,
    Measured,
    Option,
    Plan,
    Point,
    Problem,
    Reach,
    Situation,
    Targets,
    WhatIf,
    misses,
)

Tell = Callable[[int, int], None]
"""Told (rehearsals done, rehearsals to be expected in all)."""
AS_ASKED = Situation()
WORDS = {"ttft_p99_s": "TTFT p99", "tpot_p99_s": "TPOT p99", "e2e_p99_s": "E2E p99", "attainment": "attainment"}
GAIN = 0.05
"""Doubling the replicas gains something where a missed target comes nearer by this share."""


@dataclass
class _Candidate:
    """What is known so far: fewer than `low` will not do, `high` will."""

    is_: Candidate
    floor: Floor
    low: int
    most: int
    high: int | None = None
    points: dict[int, Point] = field(default_factory=dict)

    @property
    def usd(self) -> float:
        """Per replica and hour."""
        return self.is_.usd_per_replica_hour

    @property
    def bound_usd(self) -> float:
        """It costs at least this."""
        return self.low * self.usd if self.low <= self.most else inf

    @property
    def settled_usd(self) -> float:
        """Its cost, once its smallest number is known."""
        return self.high * self.usd if self.high is not None and self.high == self.low else inf


class _Search:
    def __init__(self, problem: Problem, evaluate: Evaluator, tell: Tell | None) -> None:
        self.problem, self.evaluate, self.tell = problem, evaluate, tell
        self.asked: dict[tuple[Candidate, int, Situation], Measured] = {}
        self.expected = 0

    def measured(self, each: _Candidate, replicas: int, situation: Situation = AS_ASKED) -> Measured:
        key = (each.is_, replicas, situation)
        if key not in self.asked:
            if self.tell is not None:
                self.tell(len(self.asked), max(self.expected, len(self.asked) + 1))
            self.asked[key] = self.evaluate(*key)
        return self.asked[key]

    def will_do(self, each: _Candidate, replicas: int) -> bool:
        """Asks, and narrows what is known of the candidate."""
        found = self.measured(each, replicas)
        missed = misses(found, self.problem.targets)
        each.points[replicas] = Point(replicas, found, missed)
        if missed:
            each.low = max(each.low, replicas + 1)
        else:
            each.high = replicas if each.high is None else min(each.high, replicas)
        return not missed

    def settle(self, each: _Candidate, most: int) -> None:
        """Find its smallest number up to `most`: doubling, then bisection. Doubling that gains nothing ends early."""
        before, n = None, each.low
        while each.high is None and not self.will_do(each, n) and n < most:
            gains = before is None or _gains(each.points[before], each.points[n])
            before, n = n, min(2 * n, most) if gains else most
        while each.high is not None and each.low < each.high:
            self.will_do(each, (each.low + each.high) // 2)

    def cheapest(self, among: Sequence[_Candidate]) -> _Candidate | None:
        """The one with the least cost, proved so by the others' bounds."""
        best: _Candidate | None = None
        for each in among:
            if each.settled_usd < (best.settled_usd if best else inf):
                best = each
        while True:
            limit = best.settled_usd if best else inf
            rest = [each for each in among if each is not best and each.bound_usd < _below(limit)]
            if not rest:
                return best
            each = min(rest, key=lambda one: one.bound_usd)
            self.expected = len(self.asked) + 2 * len(rest) + 4 + 3 * len(self.problem.situations)
            most = each.most if best is None else _most_below(limit, each)
            if best is None or each.high is not None or self.will_do(each, most):
                self.settle(each, most if each.high is None else each.high)
            if each.settled_usd < _below(limit):
                best = each


def _gains(before: Point, after: Point) -> bool:
    """Whether a target that is still missed came nearer."""
    for name in after.misses:
        old, new = getattr(before.measured, name), getattr(after.measured, name)
        if new is not None and (old is None or abs(new - old) > GAIN * abs(old)):
            return True
    return False


def _below(limit: float) -> float:
    """Costs within rounding of each other are equal."""
    return limit * (1 - 1e-9)


def _most_below(limit: float, each: _Candidate) -> int:
    """The most replicas that cost less than the limit."""
    if each.usd <= 0:
        return each.most
    return min(each.most, max(ceil(_below(limit) / each.usd) - 1, each.low))


def plan(problem: Problem, floors: Sequence[Floor], evaluate: Evaluator, tell: Tell | None = None) -> Plan:
    """The cheapest candidate and number of replicas; `floors[i]` belongs to `problem.candidates[i]`.

    HeadwayError where nothing is asked: no candidate, or no target.
    """
    _check(problem)
    search = _Search(problem, evaluate, tell)
    found = [_start(problem, *pair) for pair in zip(problem.candidates, floors, strict=True)]
    best = search.cheapest(found)
    if best is None:
        return _infeasible(problem, search, found)
    monotone = _look_around(search, best)
    if best.high != best.low:  # fewer did, against what was assumed
        best.low = best.high = min(n for n, point in best.points.items() if not point.misses)
    assert best.high is not None
    replicas = best.high
    one_less = best.points.get(replicas - 1)
    return Plan(
        status="optimal",
        targets=problem.targets,
        objective_usd_per_hour=replicas * best.usd,
        bound_usd_per_hour=min(each.bound_usd for each in found),
        choice=_option(best),
        measured=best.points[replicas].measured,
        binds=one_less.misses if one_less else (),
        one_less=one_less.measured if one_less else None,
        runners_up=_runners_up(search, found, best),
        what_ifs=tuple(_what_if(search, best, replicas, each) for each in problem.situations),
        options=tuple(map(_option, found)),
        reach=(),
        monotone=monotone,
        num_rehearsals=len(search.asked),
    )


def _check(problem: Problem) -> None:
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


def _start(problem: Problem, candidate: Candidate, floor: Floor) -> _Candidate:
    low = max(floor.least_replicas, problem.least_replicas)
    most = problem.max_replicas
    return _Candidate(candidate, floor, low if floor.reason is None else most + 1, most)


def _look_around(search: _Search, best: _Candidate) -> bool | None:
    """Whether one more does too, and one and two less do not; what is found narrows `best`."""
    assert best.high is not None
    least, n = search.problem.least_replicas, best.high
    as_assumed = []
    if n < best.most:
        as_assumed.append(search.will_do(best, n + 1))
        best.low = min(best.low, n)
    as_assumed += [not search.will_do(best, fewer) for fewer in (n - 1, n - 2) if fewer >= least]
    return all(as_assumed) if as_assumed else None


def _runners_up(search: _Search, found: Sequence[_Candidate], best: _Candidate) -> tuple[Option, ...]:
    """The cheapest of each other GPU, settled."""
    gpus = dict.fromkeys(each.is_.gpu for each in found if each.is_.gpu != best.is_.gpu)
    options = []
    for gpu in gpus:
        among = [each for each in found if each.is_.gpu == gpu]
        options.append(_option(search.cheapest(among) or max(among, key=_told)))
    return tuple(sorted(options, key=lambda each: inf if each.usd_per_hour is None else each.usd_per_hour))


def _told(each: _Candidate) -> tuple[bool, bool, int]:
    """Of candidates that will not do, the one that says most: rehearsed, else bounded, else merely the largest."""
    return bool(each.points), each.floor.ttft_p99_s is not None, each.is_.parallel.num_gpus


def _what_if(search: _Search, best: _Candidate, replicas: int, situation: Situation) -> WhatIf:
    """The plan in that situation, and how many replicas of its kind it takes."""
    targets = search.problem.targets
    found = search.measured(best, replicas, situation)
    most = ceil(best.most * max(situation.load, 1.0)) + situation.lost_replicas
    needed = _needed(lambda n: not misses(search.measured(best, n, situation), targets), replicas, most)
    cost = None if needed is None else needed * best.usd
    return WhatIf(situation, found, misses(found, targets), needed, cost)


def _needed(will_do: Callable[[int], bool], start: int, most: int) -> int | None:
    """The smallest number from `start` up that will do."""
    low, high = start, start
    while not will_do(high):
        if high >= most:
            return None
        low, high = high + 1, min(2 * high, most)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if will_do(middle) else (middle + 1, high)
    return high


def _option(each: _Candidate) -> Option:
    points = tuple(each.points[n] for n in sorted(each.points))
    if each.settled_usd < inf:
        status, reason = "feasible", ""
    elif each.floor.reason is not None:
        status, reason = "pruned", each.floor.reason
    elif each.bound_usd == inf:
        status = "infeasible"
        missed = points[-1].misses if points else ()
        how = (
            f"misses {', '.join(WORDS[name] for name in missed)}"
            if missed
            else f"the work takes {each.low} replicas or more"
        )
        reason = f"{how} with {each.most} replicas" if missed else f"{how}; {each.most} are allowed"
    else:
        status, reason = "open", f"needs {each.low} or more, which is no cheaper than what was found"
    bound = each.bound_usd
    return Option(
        candidate=each.is_,
        status=status,  # type: ignore[arg-type]
        least_replicas=each.low,
        replicas=each.high if status == "feasible" else None,
        usd_per_hour=each.settled_usd if status == "feasible" else None,
        bound_usd_per_hour=None if bound == inf else bound,
        reason=reason,
        points=points,
    )


def _infeasible(problem: Problem, search: _Search, found: Sequence[_Candidate]) -> Plan:
    asked = [name for name in SLOS if getattr(problem.targets, name) is not None]
    return Plan(
        status="infeasible",
        targets=problem.targets,
        objective_usd_per_hour=None,
        bound_usd_per_hour=None,
        choice=None,
        measured=None,
        binds=(),
        one_less=None,
        runners_up=(),
        what_ifs=(),
        options=tuple(map(_option, found)),
        reach=tuple(_reach(name, problem.targets, found) for name in asked),
        monotone=None,
        num_rehearsals=len(search.asked),
    )


def _reach(name: str, targets: Targets, found: Sequence[_Candidate]) -> Reach:
    """The best value that was seen; where nothing was rehearsed, the bound of an unloaded replica."""
    sign = -1.0 if name == "attainment" else 1.0
    seen: list[tuple[float, str]] = []
    for each in found:
        values = [(getattr(p.measured, name), f"{p.replicas} x {each.is_.label}") for p in each.points.values()]
        if name != "attainment" and each.floor.reason is not None:
            values.append((getattr(each.floor, name), f"unloaded {each.is_.label}, at best"))
        seen += [(value, where) for value, where in values if value is not None]
    best, where = min(seen, key=lambda pair: sign * pair[0]) if seen else (None, "nothing was rehearsed")
    return Reach(name, getattr(targets, name), best, where)
