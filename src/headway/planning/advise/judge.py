"""Which of the chosen changes hold on parts of days that the choice never saw, and by how much.

The interval of a gain has two independent errors, and is the root of the sum of their squares to each side. One is
that of few days: Student's interval of the paired differences. The other is the model's: the furthest mean with all
step times as much longer and shorter as they may be, for today's fleet and for the change alike, so that queues follow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import hypot, sqrt
from statistics import fmean

from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.metrics.interval import deviation, interval, quantile
from headway.metrics.seeds import Estimate
from headway.planning.advise.changes import Candidate, Change
from headway.planning.advise.choose import LEAST_GAIN
from headway.planning.advise.days import Part
from headway.planning.advise.trials import Gain, Gains, Trials

LEVEL = 0.9
"""Of both errors."""
HOURS_PER_MONTH = 730.0
MOST_PROPOSALS = 10
MOST_TIMES = 20
"""Times as many days as were judged, beyond which nobody waits for an answer."""
LEAST_DAYS = 3
"""With fewer judged days, the parts of days are what varies."""


class OnDay(Struct, frozen=True):
    """What a change gains on one day, or part of a day."""

    day: str
    usd_per_hour: float
    attainment: float


class Proposal(Struct, frozen=True):
    """A change that gains something wherever the model's error and other days may lie."""

    name: str
    kinds: tuple[str, ...]
    changes: tuple[Change, ...]
    worth: Estimate
    """As `trials.Gain.worth`: by it proposals are ranked."""
    usd_per_month: Estimate
    """Above 0: cheaper."""
    attainment: Estimate
    """Above 0: a larger share of requests meets its SLOs."""
    by_day: tuple[OnDay, ...]
    worst: OnDay
    """Where it gains least."""
    diff: str = ""
    """Of the fleet file."""


class Undecided(Struct, frozen=True):
    """A change that gains on the mean of the judged days, and not for certain."""

    name: str
    worth: Estimate
    usd_per_month: Estimate
    attainment: Estimate
    times: float | None
    """With so many times as many requests like the judged ones, it would be told. None: the step times are not known
    well enough, or the days differ too much."""


class Verdict(Struct, frozen=True):
    proposals: tuple[Proposal, ...]
    undecided: tuple[Undecided, ...]
    """The best first."""
    rejected: tuple[str, ...]
    """Changes that gained where they were chosen, and not for certain where they were judged."""


def rehearsals_for(num: int, num_parts: int) -> int:
    """The most rehearsals that judging so many changes takes."""
    return 3 * (num + 1) * num_parts


def judge(
    chosen: Sequence[Candidate], parts: Sequence[Part], trials: Trials, target: float, factors: Sequence[float]
) -> Verdict:
    """The changes whose gain is above 0 within both errors.

    `factors`: on the step times of the trials, where they may be as well.
    """
    worlds: list[Gains] = []
    alive, undecided = list(chosen), list[Undecided]()
    for factor in (1.0, *factors):
        if not alive:
            break
        worlds.append(trials.gains(alive, parts, target, factor))
        alive = [each for each in alive if all(each in one for one in worlds)]
        found = {each: _undecided(each, worlds, parts) for each in alive}
        undecided += [each for each in found.values() if each.worth.low <= 0 and each.worth.mean >= LEAST_GAIN]
        alive = [each for each, one in found.items() if one.worth.low > 0]
    undecided.sort(key=lambda each: -each.worth.mean)
    proposals = [_proposal(each, [world[each] for world in worlds], parts) for each in alive]
    proposals = [each for each in proposals if each.worth.mean >= LEAST_GAIN]
    proposals.sort(key=lambda each: -each.worth.mean)
    kept = _without_idle_parts(proposals)[:MOST_PROPOSALS]
    names = {each.name for each in kept}
    rejected = tuple(each.name for each in chosen if each.name not in names)
    return Verdict(tuple(kept), tuple(undecided), rejected)


def compare(
    candidate: Candidate, parts: Sequence[Part], trials: Trials, target: float, factors: Sequence[float]
) -> Proposal:
    """What a change gains, whether or not that is above 0. HeadwayError if it cannot be rehearsed."""
    worlds = [trials.gains([candidate], parts, target, factor) for factor in (1.0, *factors)]
    if candidate in trials.refused:
        raise HeadwayError(f"{candidate.name}: {trials.refused[candidate]}")
    return _proposal(candidate, [world[candidate] for world in worlds], parts)


def _undecided(candidate: Candidate, worlds: Sequence[Gains], parts: Sequence[Part]) -> Undecided:
    gains = [one[candidate] for one in worlds]
    times = times_needed(gains, parts, lambda each: each.worth)
    return Undecided(candidate.name, *_estimates(gains, parts), times)


def _without_idle_parts(proposals: Sequence[Proposal]) -> list[Proposal]:
    """Without changes made together that gain no more than one of them alone."""
    return [
        each
        for each in proposals
        if not any(
            set(other.changes) < set(each.changes) and other.worth.mean >= each.worth.mean - LEAST_GAIN
            for other in proposals
        )
    ]


def _proposal(candidate: Candidate, worlds: Sequence[Sequence[Gain]], parts: Sequence[Part]) -> Proposal:
    nominal = worlds[0]
    days = [
        OnDay(day, fmean(each.usd_per_hour for each in gains), fmean(each.attainment for each in gains))
        for day, gains in _grouped(nominal, parts).items()
    ]
    worth = {day: fmean(each.worth for each in gains) for day, gains in _grouped(nominal, parts).items()}
    return Proposal(
        candidate.name,
        candidate.kinds,
        candidate.changes,
        *_estimates(worlds, parts),
        tuple(days),
        min(days, key=lambda each: worth[each.day]),
    )


def _estimates(worlds: Sequence[Sequence[Gain]], parts: Sequence[Part]) -> tuple[Estimate, Estimate, Estimate]:
    """Of the worth, of dollars a month, and of SLO attainment."""
    return (
        estimate(worlds, parts, lambda each: each.worth),
        estimate(worlds, parts, lambda each: HOURS_PER_MONTH * each.usd_per_hour),
        estimate(worlds, parts, lambda each: each.attainment),
    )


def times_needed(
    worlds: Sequence[Sequence[Gain]], parts: Sequence[Part], value: Callable[[Gain], float]
) -> float | None:
    """How many times as many days, or parts, would have the interval above 0, if they were as different as these. None:
    none of `MOST_TIMES` as many."""
    by_day, means = _by_day(worlds, parts, value)
    num, spread = len(by_day[0]), deviation(by_day[0])

    def is_told(more: int) -> bool:
        return hypot(quantile(more - 1, LEVEL) * spread / sqrt(more), means[0] - min(means)) < means[0]

    most = MOST_TIMES * num
    return (num + bisect_left(range(num, most), True, key=is_told)) / num if is_told(most) else None


def _by_day(
    worlds: Sequence[Sequence[Gain]], parts: Sequence[Part], value: Callable[[Gain], float]
) -> tuple[list[list[float]], list[float]]:
    """By world: the mean of each day, and that over the days."""
    by_day = [[fmean(map(value, each)) for each in _grouped(gains, parts).values()] for gains in worlds]
    return by_day, [fmean(each) for each in by_day]


def estimate(worlds: Sequence[Sequence[Gain]], parts: Sequence[Part], value: Callable[[Gain], float]) -> Estimate:
    """The mean with step times as modelled, the first world, and an interval with the spread over the days and over the
    worlds."""
    by_day, means = _by_day(worlds, parts, value)
    mean = means[0]
    low, high = interval(by_day[0], LEVEL) or (mean, mean)
    return Estimate(mean, mean - hypot(mean - low, mean - min(means)), mean + hypot(high - mean, max(means) - mean))


def _grouped(gains: Sequence[Gain], parts: Sequence[Part]) -> dict[str, list[Gain]]:
    """By day, or by part where there are fewer than `LEAST_DAYS`."""
    by_day = len({part.day for part in parts}) >= LEAST_DAYS
    found: dict[str, list[Gain]] = {}
    for each, part in zip(gains, parts, strict=True):
        found.setdefault(part.day if by_day else part.name, []).append(each)
    return found
