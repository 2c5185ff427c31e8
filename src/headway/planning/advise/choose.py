"""Selects the best changes on the parts for choosing: successive halving with common random numbers.

All changes are rehearsed on one part, the better third on three times as many parts, and so on (Jamieson and Talwalkar,
2016). Changes are compared by their gain over today's fleet on the same requests. Then the best changes of each kind
are tried together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean

from headway.core.errors import HeadwayError
from headway.planning.advise.changes import Candidate, agree, together
from headway.planning.advise.days import Part
from headway.planning.advise.trials import Gain, OnParts, Trials

KEPT = 3
"""Factor by which each round reduces the number of changes and multiplies the number of parts."""
MOST_JUDGED = 10
MOST_OF_A_KIND = 4
MOST_KINDS = 4
"""Number of kinds whose best changes are tried together."""
LEAST_GAIN = 0.01
"""Share of today's cost; a smaller gain does not justify a change."""


@dataclass
class Chosen:
    """Changes to judge, best first, with their gains on the parts for choosing."""

    gains: dict[Candidate, OnParts] = field(default_factory=dict)
    num_pairs: int = 0
    """Number of combinations of changes that were tried."""
    notes: list[str] = field(default_factory=list)


def choose(
    candidates: Sequence[Candidate], parts: Sequence[Part], trials: Trials, target: float, num_later: int
) -> Chosen:
    """At most `MOST_JUDGED` changes with a gain. `num_later` rehearsals are reserved for judging.

    Raises HeadwayError if the allowed rehearsals do not suffice for one part.
    """
    chosen = Chosen()
    allowed = trials.left - num_later
    wanted = _within(candidates, allowed - 1, chosen.notes)
    num_last = 0
    alive, means = list(wanted), dict[Candidate, float]()
    found: dict[Candidate, list[Gain]] = {each: [] for each in alive}
    for num_parts in _rungs(len(parts)):
        new = parts[num_last:num_parts]
        num_last = num_parts
        if found[alive[0]]:
            alive = alive[: max(len(alive) // KEPT, min(len(alive), MOST_JUDGED))]
        affordable = (trials.left - num_later) // max(len(new), 1) - 1
        if affordable < 1:
            chosen.notes.append(f"the choice ended on {len(found[alive[0]])} of {len(parts)} parts: --max-rehearsals")
            break
        if affordable < len(alive):
            chosen.notes.append(f"{len(alive) - affordable} of {len(alive)} changes went no further: --max-rehearsals")
            alive = alive[:affordable]
        for each, gains in trials.gains(alive, new, target).items():
            found[each] += gains
        alive = [each for each in alive if each not in trials.refused]
        if not alive:
            return chosen
        means |= {each: _mean(found[each]) for each in alive}
        alive.sort(key=lambda each: -means[each])
    good = [each for each in alive if means[each] > LEAST_GAIN]
    means = {each: means[each] for each in good}
    pairs = _pairs(good, means, parts[:num_last], trials, target, num_later, chosen)
    means |= {each: _mean(gains) for each, gains in pairs.items()}
    gains_of = {**found, **pairs}
    chosen.gains = {each: OnParts(gains_of[each], parts[: len(gains_of[each])]) for each in _best(means)}
    return chosen


def _mean(gains: Sequence[Gain]) -> float:
    return fmean(each.worth for each in gains)


def _best(means: dict[Candidate, float]) -> list[Candidate]:
    """At most `MOST_JUDGED` candidates, and at most `MOST_OF_A_KIND` with the same kinds of keys, because many routers
    have similar gains."""
    num: dict[tuple[str, ...], int] = {}
    found = []
    for each in sorted(means, key=lambda each: -means[each]):
        num[each.kinds] = num.get(each.kinds, 0) + 1
        if num[each.kinds] <= MOST_OF_A_KIND:
            found.append(each)
    return found[:MOST_JUDGED]


def _rungs(num_parts: int) -> list[int]:
    """Numbers of parts per round: 1, 3, 9 ... and all parts."""
    found = [1]
    while found[-1] * KEPT < num_parts:
        found.append(found[-1] * KEPT)
    return found if found[-1] == num_parts else [*found, num_parts]


def _within(candidates: Sequence[Candidate], most: int, notes: list[str]) -> list[Candidate]:
    """Candidates of all kinds in turn, as many as may be rehearsed."""
    if most < 1:
        raise HeadwayError("--max-rehearsals: too few to choose and to judge a single change; expected more")
    if len(candidates) <= most:
        return list(candidates)
    place: dict[str, int] = {}
    turns = []
    for i, each in enumerate(candidates):
        kind = each.kinds[0]
        turns.append((place.get(kind, 0), i))
        place[kind] = place.get(kind, 0) + 1
    kept = sorted(i for _, i in sorted(turns)[:most])
    names = [each.name for i, each in enumerate(candidates) if i not in kept]
    notes.append(f"not tried for --max-rehearsals: {', '.join(names)}")
    return [candidates[i] for i in kept]


def _pairs(
    good: Sequence[Candidate],
    means: dict[Candidate, float],
    parts: Sequence[Part],
    trials: Trials,
    target: float,
    num_later: int,
    chosen: Chosen,
) -> dict[Candidate, list[Gain]]:
    """Pairs of the best changes of different kinds, if a pair gains more than either of its changes alone."""
    firsts: dict[str, Candidate] = {}
    for each in good:
        firsts.setdefault(each.kinds[0], each)
    best = list(firsts.values())[:MOST_KINDS]
    sets = [list(pair) for pair in combinations(best, 2) if agree(*pair)]
    if len(best) > 2 and all(agree(*pair) for pair in combinations(best, 2)):
        sets.append(best)
    made = {together(each): each for each in sets}
    affordable = (trials.left - num_later) // max(len(parts), 1) - 1
    if made and affordable < len(made):
        chosen.notes.append(f"{len(made) - max(affordable, 0)} pairs of changes were not tried: --max-rehearsals")
        made = dict(list(made.items())[: max(affordable, 0)])
    if not made:
        return {}
    chosen.num_pairs = len(made)
    found = trials.gains(list(made), parts, target)
    return {each: gains for each, gains in found.items() if _mean(gains) > max(means[part] for part in made[each])}
