"""Rehearsals of changes on parts of days: their cost, their SLO attainment, and the limit on their number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from msgspec import Struct

from headway.config.scenario import Scenario
from headway.core.errors import HeadwayError
from headway.core.record import Records
from headway.metrics.latency import slo_masks
from headway.metrics.usage import usage
from headway.planning.advise.changes import Candidate
from headway.planning.advise.correct import slower
from headway.planning.advise.days import Part
from headway.planning.rehearsals import Rehearsal, Rehearsals, counted

SHORTFALL = 20.0
"""Cost of missing the whole target attainment, as a multiple of today's dollars: one point below the target costs
20%."""


class Outcome(Struct, frozen=True):
    """Result of a fleet on a part of a day."""

    usd_per_hour: float
    attainment: float
    """Share of the requests with SLOs that met all of them."""
    num_requests: int
    error: str = ""
    """Why the fleet cannot be simulated; the numbers are then 0."""


class Gain(Struct, frozen=True):
    """A change minus today's fleet, on the same requests."""

    worth: float
    """Saved dollars as a share of today's, plus the gain of attainment; attainment below the target counts `SHORTFALL`
    times."""
    usd_per_hour: float
    """Saving; positive means cheaper."""
    attainment: float


class OnParts(NamedTuple):
    """Gains of a change, by part."""

    gains: Sequence[Gain]
    parts: Sequence[Part]


NOTHING = OnParts((), ())


def gain(change: Outcome, today: Outcome, target: float) -> Gain:
    saved = today.usd_per_hour - change.usd_per_hour
    share = saved / today.usd_per_hour if today.usd_per_hour > 0 else 0.0
    more = change.attainment - today.attainment
    nearer = max(target - today.attainment, 0.0) - max(target - change.attainment, 0.0)
    return Gain(share + more + SHORTFALL * nearer, saved, more)


def _outcome(until_s: float, scenario: Scenario, records: Records) -> Outcome:
    warmup_s = scenario.spec.simulation.warmup_s
    has, good = slo_masks(counted(records, warmup_s, scenario.spec.slo, until_s))["all"]
    if not has.any():
        raise HeadwayError("no request has an SLO; set one, as with --slo ttft=2s")
    hours = max(records.end_s - warmup_s, 1e-9) / 3600
    usd_per_hour = round(float(usage(records, warmup_s).usd.sum()) / hours, 6)
    return Outcome(usd_per_hour, float(good[has].mean()), int(has.sum()))


def _failed(error: HeadwayError) -> Outcome:
    return Outcome(0.0, 0.0, 0, str(error))


@dataclass
class Trials:
    """Makes rehearsals up to the allowed number."""

    document: Mapping[str, Any]
    assemble: Callable[[Mapping[str, Any]], Scenario]
    rehearsals: Rehearsals
    most: int
    num: int = 0
    step_time_factor: float = 1.0
    """Factor on the step times of all rehearsals."""
    refused: dict[Candidate, str] = field(default_factory=dict)
    """Candidates whose rehearsals failed, with the reason."""

    @property
    def left(self) -> int:
        return self.most - self.num

    def outcomes(
        self, wanted: Sequence[Candidate | None], parts: Sequence[Part], factor: float = 1.0
    ) -> dict[Candidate | None, list[Outcome]]:
        """Returns, for each candidate, and for today's fleet (None), the outcome on each part, with step times
        multiplied by `factor`.

        Candidates with a failed rehearsal are left out. Raises HeadwayError if today's fleet cannot be rehearsed.
        """
        order = [(each, part) for part in parts for each in wanted]
        tasks = [
            Rehearsal(
                self._scenario(each, part, factor),
                partial(_outcome, part.until_s),
                Outcome,
                ("advise", part.until_s),
                _failed,
            )
            for each, part in order
        ]
        self.num += len(tasks)
        found: dict[Candidate | None, list[Outcome]] = {each: [] for each in wanted}
        for (each, part), outcome in zip(order, self.rehearsals.all(tasks), strict=True):
            if outcome.error and each is None:
                raise HeadwayError(f"{part.name}: today's fleet cannot be rehearsed: {outcome.error}")
            if outcome.error and each is not None:
                self.refused.setdefault(each, outcome.error)
            found[each].append(outcome)
        return {each: outcomes for each, outcomes in found.items() if each not in self.refused}

    def gains(self, wanted: Sequence[Candidate], parts: Sequence[Part], target: float, factor: float = 1.0) -> Gains:
        """The gain of each candidate on each part."""
        found = self.outcomes([None, *wanted], parts, factor)
        today = found.pop(None)
        return {
            each: [gain(one, before, target) for one, before in zip(outcomes, today, strict=True)]
            for each, outcomes in found.items()
            if each is not None
        }

    def _scenario(self, candidate: Candidate | None, part: Part, factor: float) -> Scenario:
        document = dict(self.document) if candidate is None else candidate.document(self.document)
        return self.assemble(slower(part.document(document), factor * self.step_time_factor))


Gains = dict[Candidate, list[Gain]]
