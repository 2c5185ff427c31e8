"""The fewest units of each kind that serve a model's requests, rehearsed only as far as a plan needs.

Sets and parameters
    k in K      kinds of GPUs for a model: one type of GPU, or separate prefill and decode replicas
    u in U_k    units of a kind, such as the degrees of tensor parallelism on one type; price P_u in $/h
    e_u         estimated number of units, by the step-time model; it decides only what is rehearsed first
    N_u         most units tried
    ok(u, n)    whether n units keep enough requests in time, by a rehearsal
Assumed         ok(u, n) implies ok(u, n + 1), as in `plan capacity`.

A unit is settled when its fewest sufficient number is known: from e_u up until a number suffices, then by bisection. A
kind is exact when one of its units is settled, and no other one is as cheap. Otherwise it has a lower bound for each
unit: fewer than `low` miss. One rehearsal of the most units that cost no more than another kind of the same model tells
that the kind costs more, and the kind stays without its exact number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, inf

from headway.core.errors import HeadwayError
from headway.planning.capacity.problem import SLO_NAMES, RehearsalMetrics
from headway.planning.combos.problem import GpuCombo
from headway.planning.fleet.problem import SizedOption

ROUNDING = 1 + 1e-9
GROWTH = 1.5
"""Factor from a number of units that misses to the next one."""
NEAR = 0.25
"""An estimate is rounded up to whole units if it exceeds them by this much."""
STUCK = 1.05
"""A rehearsal is stuck if it ends after no more arrivals than this factor allows over the one with fewer units."""
NEIGHBOUR = 2
"""So many fewer than the fewest sufficient number, the assumption is tested."""
Evaluate = Callable[[GpuCombo, int], RehearsalMetrics]
"""Rehearses a number of units; a run that misses may end early (`stopped`)."""


@dataclass
class UnitSizes:
    """What is known of the numbers of one unit."""

    unit: GpuCombo
    likely: float
    """Estimated fewest number; infinite: no number, or unknown."""
    most: int
    reason: str = ""
    """Why no number suffices, known without a rehearsal; empty: some number may."""
    uncalibrated: tuple[str, ...] = ()
    low: int = 1
    """Fewer units miss."""
    high: int | None = None
    """So many units suffice."""
    measured: dict[int, RehearsalMetrics] = field(default_factory=dict)

    @property
    def is_possible(self) -> bool:
        return not self.reason and self.low <= self.most

    @property
    def settled_usd(self) -> float:
        """Price of the fewest sufficient units; infinite if it is not known."""
        return self.high * self.unit.usd_per_hour if self.high is not None and self.high == self.low else inf

    @property
    def bound_usd(self) -> float:
        return self.low * self.unit.usd_per_hour if self.is_possible else inf

    @property
    def likely_usd(self) -> float:
        return max(self.likely, self.low) * self.unit.usd_per_hour if self.is_possible else inf

    def most_within(self, limit_usd: float) -> int:
        """The largest number of units for at most this price."""
        if limit_usd == inf or not self.unit.usd_per_hour:
            return self.most
        return min(self.most, floor(limit_usd * ROUNDING / self.unit.usd_per_hour))


@dataclass
class Kind:
    """The units of one kind of GPUs for a model, of which a plan uses the cheapest."""

    units: list[UnitSizes]
    reached: float | None = None
    """The highest attainment of the most units that were tried, if no number suffices; None: unknown."""

    @property
    def is_split(self) -> bool:
        return self.units[0].unit.aggregated is None

    @property
    def best(self) -> UnitSizes | None:
        """The cheapest settled unit, the smallest of equal ones; None if none is settled."""
        settled = [each for each in self.units if each.settled_usd < inf]
        least = min((each.settled_usd for each in settled), default=inf) * ROUNDING
        equal = [each for each in settled if each.settled_usd <= least]
        return min(equal, key=lambda each: each.unit.usd_per_hour, default=None)

    @property
    def usd(self) -> float:
        """Price of the cheapest settled unit; infinite if none is settled."""
        return inf if self.best is None else self.best.settled_usd

    @property
    def open(self) -> list[UnitSizes]:
        """Units that may be as cheap as the best settled one."""
        unsettled = [each for each in self.units if each.is_possible and each.settled_usd == inf]
        return [each for each in unsettled if each.bound_usd <= self.usd * ROUNDING]

    @property
    def likely_usd(self) -> float:
        return min(each.likely_usd for each in self.units)

    def option(self) -> SizedOption:
        """What is known of the kind."""
        best, left = self.best, self.open
        if left:
            return _at_least(min(left, key=lambda each: each.bound_usd))
        if best is not None and best.high is not None:
            attainment = best.measured[best.high].attainment
            return SizedOption(best.unit.model, best.unit, best.high, attainment, "", best.uncalibrated)
        first = self.units[0]
        reason = first.reason or f"misses {SLO_NAMES['attainment']} with {first.most} replicas"
        missing = first.uncalibrated if self.is_split else ()
        return SizedOption(first.unit.model, first.unit, None, self.reached, reason, missing)

    def bounds(self) -> list[SizedOption]:
        """The kind as a plan may use it: its option if it is exact, otherwise every unit that may be the cheapest."""
        left = self.open
        if not left:
            return [self.option()]
        return [_at_least(each) for each in self.units if each in left or each is self.best]


def _at_least(each: UnitSizes) -> SizedOption:
    return SizedOption(each.unit.model, each.unit, None, None, "", each.uncalibrated, each.low)


@dataclass
class Sizes:
    """Sizes one model's kinds of GPUs."""

    kinds: Sequence[Kind]
    evaluate: Evaluate
    attainment: float
    ratio: float = 1.0
    """The fewest number of units over the estimate, for the unit that was settled last."""

    def cheapest(self) -> None:
        """Make the cheapest kind exact; the others are at least known to cost more."""
        for is_split in (False, True):
            for kind in sorted(self._of(is_split), key=lambda each: each.likely_usd):
                self.size(kind, min((each.usd for each in self.kinds), default=inf))

    def _of(self, is_split: bool) -> Iterator[Kind]:
        return (each for each in self.kinds if each.is_split == is_split)

    def size(self, kind: Kind, limit_usd: float = inf) -> None:
        """Make a kind exact, if it costs at most `limit_usd`."""
        try:
            for each in sorted(kind.units, key=lambda each: each.likely_usd):
                if each.is_possible and each.settled_usd == inf:
                    self._settle(each, each.most_within(min(limit_usd, kind.usd)))
            if kind.best is not None:
                self._doubt(kind.best)
        except HeadwayError as error:
            if kind.is_split:
                raise
            kind.units = [UnitSizes(each.unit, inf, each.most, str(error)) for each in kind.units]

    def _settle(self, each: UnitSizes, most: int) -> None:
        """Find the fewest units, if at most `most` suffice."""
        if each.high is None:
            self._raise(each, most)
        least, step = each.low, 1
        while each.high is not None and each.low < each.high:
            number = (each.low + each.high) // 2
            if each.low == least == 1:  # no number has missed: the estimate was not too low, and is near
                number, step = max(number, each.high - step), 2 * step
            self.meets(each, number)
        if each.high is not None and 0 < each.likely < inf:
            self.ratio = each.high / each.likely

    def _raise(self, each: UnitSizes, most: int) -> None:
        """Rehearse more and more units, until a number suffices or `most` do not.

        If a rehearsal ends after hardly more arrivals than the one before, `most` units come next, which may rule all
        out.
        """
        likely = each.likely * self.ratio
        number = each.low if likely == inf and most == each.most else ceil(min(likely - NEAR, most))
        number, before = max(number, each.low), None
        while number <= most and not self.meets(each, number):
            ended = each.measured[number].num_requests
            if before is not None and ended <= STUCK * before and not self.meets(each, most):
                return
            before = ended
            number = max(number + 1, min(most, ceil(GROWTH * number)))

    def _doubt(self, each: UnitSizes) -> None:
        """Test the assumption around the fewest units. If it does not hold, every smaller number is rehearsed."""
        fewest = each.low
        if fewest > NEIGHBOUR:
            self.meets(each, fewest - NEIGHBOUR)
        is_met = [self.meets(each, number) for number in sorted(each.measured)]
        if is_met != sorted(is_met):
            fewest = next(number for number in range(1, fewest + 1) if self.meets(each, number))
        each.low = each.high = fewest

    def meets(self, each: UnitSizes, number: int) -> bool:
        """Rehearse a number of units, and narrow the unit's range."""
        if number not in each.measured:
            each.measured[number] = self.evaluate(each.unit, number)
        is_met = (each.measured[number].attainment or 0.0) >= self.attainment
        if is_met:
            each.high = number if each.high is None else min(each.high, number)
        else:
            each.low = max(each.low, number + 1)
        return is_met
