"""Proposes changes of a fleet: the twin check, the search, and the verdict of the judged days."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from headway.config.scenario import Scenario, only_variant
from headway.config.yaml_edit import edited, unified_diff
from headway.core.errors import HeadwayError, unknown
from headway.metrics.columns import floats
from headway.planning.advise import days as days_of
from headway.planning.advise.candidates import KINDS, NEVER_TRIED, Assemble, candidates
from headway.planning.advise.changes import Candidate, Change, LeftOut
from headway.planning.advise.choose import MOST_JUDGED, Chosen, choose
from headway.planning.advise.correct import (
    MOST_ROUNDS,
    StepTimeFactor,
    correct,
    means_rehearsal,
    measured,
    own_factor,
    slower,
)
from headway.planning.advise.days import Day, Part, Split
from headway.planning.advise.judge import Proposal, Undecided, Verdict, compare, judge, rehearsals_for
from headway.planning.advise.trials import Outcome, Trials
from headway.planning.advise.twin import TwinCheck, as_it_ran, check, day_rehearsal, whole
from headway.planning.rehearsals import Rehearsals, Resources
from headway.workload.spec import TraceSpec

ATTAINMENT = 0.99
MOST_REHEARSALS = 600
MOST_REQUESTS = 20_000
MOST_MENDED = 3.0
"""Largest factor on step times, or their divisor, that is named where the days do not come out."""


class AdviceOptions(Struct, frozen=True):
    attainment: float = ATTAINMENT
    """Target share of requests that meet their SLOs."""
    kinds: tuple[str, ...] = KINDS
    max_rehearsals: int = MOST_REHEARSALS
    max_requests: int = MOST_REQUESTS
    """Maximum number of requests of one rehearsal of a part of a day."""


@dataclass(frozen=True)
class FleetFile:
    """The current fleet."""

    document: Mapping[str, Any]
    text: str
    name: str
    assemble: Assemble
    """The scenario of a document with requests. Raises HeadwayError if it cannot be run."""
    why_not_served: Callable[[Mapping[str, Any]], str] | None = None
    """Returns the reason for which `headway serve` would reject a document; "" if there is none. None if the current
    file cannot be served either."""


class Tried(Struct, frozen=True):
    """Numbers of changes, of combined changes, and of their rehearsals."""

    num_changes: int
    num_pairs: int
    num_rehearsals: int
    num_simulated: int
    chosen_on: tuple[str, ...]
    judged_on: tuple[str, ...]
    undecided: tuple[Undecided, ...]
    """Changes with a positive mean gain on the judged days that is not certain, best first."""
    rejected: tuple[str, ...]
    """Changes that gained on the parts for choosing but lost on the judged parts."""


class Advice(Struct, frozen=True):
    """The answer of `headway advise`, as `--json` prints it."""

    name: str
    target: float
    days: tuple[str, ...]
    num_requests: int
    twin: TwinCheck
    step_times: StepTimeFactor | None
    """The measured factor on the model's step times; None: advice is withheld."""
    is_withheld: bool
    today: Outcome | None
    """Mean over the judged parts."""
    proposals: tuple[Proposal, ...]
    tried: Tried
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]
    compared: Proposal | None = None
    """The comparison of the requested candidate, in place of proposals."""
    mended_by: float | None = None
    """If advice is withheld: the factor on step times (`simulation: step_time_factor`) with which the days come out.
    None: there is none."""


def advise(
    fleet: FleetFile,
    folders: Sequence[Path],
    options: AdviceOptions,
    resources: Resources,
    candidate: Candidate | None = None,
) -> Advice:
    """Changes to a fleet, by its recorded days. `candidate`: compare this one with today's, and try no other.

    Rehearsals are cached one by one, so that an interrupted answer resumes. Raises HeadwayError if the records or the
    fleet cannot be used, or no request has an SLO.
    """
    for kind in options.kinds:
        if kind not in KINDS:
            raise unknown("kind", kind, KINDS, "--kinds")
    days = days_of.read(folders)
    today = only_variant(fleet.assemble(whole(days[0]).document(fleet.document)))
    if isinstance(trace := today.spec.workload.trace, TraceSpec):
        days = [day.without_models(trace.without_models) for day in days]
    if today.spec.cascade is not None:
        raise HeadwayError("cascade: a cascade's models are planned by headway plan cascade")
    split = days_of.split(days, options.max_requests, today.spec.policies.scaling is not None)
    rehearsals = Rehearsals(resources, options.max_rehearsals)
    ran, notes = _as_they_ran(fleet, days)
    as_ran = [day_rehearsal(fleet.assemble(whole(day).document(ran[day.name]))) for day in days]
    checked = check(days, rehearsals.all(as_ran), today.spec.slo)
    found = _Found(fleet, days, split, options, checked, notes)
    parts = _whole_where_short(days, split.chosen_on, options.max_requests)
    if not checked.is_met or checked.step_time_factor is None:
        mended_by = _mended_by(fleet, days, ran, parts, rehearsals, today.spec.slo) if checked.off else None
        return replace(found.withheld(rehearsals), mended_by=mended_by)
    step_times = _step_times(fleet, days, ran, parts, checked.step_time_factor, rehearsals)
    trials = Trials(
        fleet.document, fleet.assemble, rehearsals, options.max_rehearsals, rehearsals.num_done, step_times.mean
    )
    if candidate is not None:
        return found.comparison(trials, candidate, step_times)
    return found.advice(trials, today, step_times)


def _as_they_ran(fleet: FleetFile, days: Sequence[Day]) -> tuple[dict[str, Mapping[str, Any]], list[str]]:
    """Maps each day to the document of the fleet that ran, and the assumptions about it."""
    ran, notes = dict[str, Mapping[str, Any]](), []
    for day in days:
        document, note = as_it_ran(day, fleet.document)
        try:
            only_variant(fleet.assemble(whole(day).document(document)))
        except HeadwayError as error:
            document, note = dict(fleet.document), f"{day.name}: today's fleet was taken for what ran ({error})"
        ran[day.name] = document
        notes += [note] if note else []
    return ran, notes


def _whole_where_short(days: Sequence[Day], parts: Sequence[Part], most_requests: int) -> list[Part]:
    """The parts, with whole days in place of parts of days that are no longer than a part may be."""
    short = {day.name: whole(day) for day in days if day.num_requests <= most_requests}
    return list(dict.fromkeys(short.get(part.day, part) for part in parts))


def _step_times(
    fleet: FleetFile,
    days: Sequence[Day],
    ran: Mapping[str, Mapping[str, Any]],
    parts: Sequence[Part],
    band: float,
    rehearsals: Rehearsals,
) -> StepTimeFactor:
    """The factor between the engines' and the model's step times, on the parts for choosing; at most `band` from 1,
    times or divided."""
    by_name = {day.name: day for day in days}

    def rehearse(factor: float) -> list[dict[str, float]]:
        scenarios = [fleet.assemble(slower(part.document(ran[part.day]), factor)) for part in parts]
        tasks = [means_rehearsal(each, part.until_s) for each, part in zip(scenarios, parts, strict=True)]
        return [each.means_s for each in rehearsals.all(tasks)]

    most_rounds = max(min(MOST_ROUNDS, rehearsals.expected // 10 // len(parts)), 1)
    found = correct([measured(by_name[part.day], part) for part in parts], rehearse, band, most_rounds)
    return found or StepTimeFactor(1.0, 1 / band, band, {})


def _mended_by(
    fleet: FleetFile,
    days: Sequence[Day],
    ran: Mapping[str, Mapping[str, Any]],
    parts: Sequence[Part],
    rehearsals: Rehearsals,
    slo: Any,
) -> float | None:
    """The `step_time_factor` of the fleet file with which all latencies of the days come out; None if there is none, or
    the allowed rehearsals do not suffice to find it."""
    if rehearsals.num_done + MOST_ROUNDS * len(parts) + len(days) > rehearsals.expected:
        return None
    found, own = _step_times(fleet, days, ran, parts, MOST_MENDED, rehearsals).mean, own_factor(fleet.document)
    named = round(found * own, 3)
    scenarios = [fleet.assemble(slower(whole(day).document(ran[day.name]), named / own)) for day in days]
    return named if check(days, rehearsals.all(list(map(day_rehearsal, scenarios))), slo).is_met else None


@dataclass(frozen=True)
class _Found:
    """The facts that are known before any change is tried."""

    fleet: FleetFile
    days: Sequence[Day]
    split: Split
    options: AdviceOptions
    twin: TwinCheck
    notes: Sequence[str]

    def withheld(self, rehearsals: Rehearsals) -> Advice:
        return self._answer(Tried(0, 0, rehearsals.num_done, rehearsals.num_simulated, (), (), (), ()), None, (), ())

    def advice(self, trials: Trials, today: Scenario, step_times: StepTimeFactor) -> Advice:
        wanted, left_out = self._candidates(today)
        chosen_on, judged_on, target = self.split.chosen_on, self.split.judged_on, self.options.attainment
        before = trials.outcomes([None], judged_on)[None]
        num_judged = len(judged_on)
        later = max(min(rehearsals_for(MOST_JUDGED, num_judged), trials.left // 2), rehearsals_for(1, num_judged))
        chosen = choose(wanted, chosen_on, trials, target, later) if wanted else Chosen()
        verdict, best = Verdict((), (), ()), dict(chosen.gains)
        if (num := trials.left // rehearsals_for(0, num_judged) - 1) < len(best):
            chosen.notes.append(f"{max(num, 0)} of {len(best)} changes were judged: --max-rehearsals")
            best = dict(list(best.items())[: max(num, 0)])
        if best:
            factors = (step_times.high / step_times.mean, step_times.low / step_times.mean)
            verdict = judge(best, judged_on, trials, target, factors)
        left_out += [LeftOut(each.kinds[0], each.name, why) for each, why in trials.refused.items()]
        tried = Tried(
            len(wanted),
            chosen.num_pairs,
            trials.rehearsals.num_done,
            trials.rehearsals.num_simulated,
            tuple(part.name for part in chosen_on),
            tuple(part.name for part in judged_on),
            verdict.undecided,
            verdict.rejected,
        )
        proposals = tuple(replace(each, diff=self._diff(each)) for each in verdict.proposals)
        return self._answer(tried, _mean(before), proposals, left_out, chosen.notes, step_times)

    def comparison(self, trials: Trials, candidate: Candidate, step_times: StepTimeFactor) -> Advice:
        """A comparison of a candidate and today's fleet, on all parts, because none was used to choose it."""
        parts = (*self.split.chosen_on, *self.split.judged_on)
        before = trials.outcomes([None], parts)[None]
        factors = (step_times.high / step_times.mean, step_times.low / step_times.mean)
        compared = compare(candidate, parts, trials, self.options.attainment, factors)
        names = tuple(part.name for part in parts)
        tried = Tried(1, 0, trials.rehearsals.num_done, trials.rehearsals.num_simulated, (), names, (), ())
        return replace(self._answer(tried, _mean(before), (), (), (), step_times), compared=compared)

    def _candidates(self, today: Scenario) -> tuple[list[Candidate], list[LeftOut]]:
        """The changes that the simulator accepts and, if the file can be served, the gateway, too."""
        part, rows = self.split.chosen_on[0], self.days[0].records.workload
        mean_tokens = float(floats(rows, "prompt_tokens").mean() + floats(rows, "output_tokens").mean())
        suits = all(each.suits_scaling for each in (*self.split.chosen_on, *self.split.judged_on))
        wanted, left_out = candidates(
            today,
            self.fleet.document,
            mean_tokens,
            lambda document: self.fleet.assemble(part.document(document)),
            self.options.kinds,
            "" if suits else "parts of days of less than an hour say nothing about scalers",
        )
        served = self.fleet.why_not_served
        if served is None:
            return wanted, left_out
        kept = []
        for each in wanted:
            if why := served(each.document(self.fleet.document)):
                left_out.append(LeftOut(each.kinds[0], each.name, f"headway serve refuses it: {why}"))
            else:
                kept.append(each)
        return kept, left_out

    def _diff(self, proposal: Proposal) -> str:
        changes = {each.key: each.value for each in proposal.changes}
        return unified_diff(self.fleet.text, edited(self.fleet.text, changes, self.fleet.name), self.fleet.name)

    def _answer(
        self,
        tried: Tried,
        today: Outcome | None,
        proposals: Sequence[Proposal],
        left_out: Sequence[LeftOut],
        notes: Sequence[str] = (),
        step_times: StepTimeFactor | None = None,
    ) -> Advice:
        return Advice(
            name=str(self.fleet.document.get("name") or self.fleet.name),
            target=self.options.attainment,
            days=tuple(day.name for day in self.days),
            num_requests=sum(day.num_requests for day in self.days),
            twin=self.twin,
            step_times=step_times,
            is_withheld=not self.twin.is_met,
            today=today,
            proposals=tuple(proposals),
            tried=tried,
            left_out=(*left_out, *NEVER_TRIED),
            notes=(*self.notes, *self.twin.notes, *self.split.notes, *notes),
        )


def _mean(outcomes: Sequence[Outcome]) -> Outcome:
    num = len(outcomes)
    return Outcome(
        sum(each.usd_per_hour for each in outcomes) / num,
        sum(each.attainment for each in outcomes) / num,
        sum(each.num_requests for each in outcomes),
    )


def policies_of(document: Mapping[str, Any], name: str) -> Candidate:
    """The policies of another fleet file as a change."""
    return Candidate(("candidate",), name, (Change(("policies",), document.get("policies") or {}),))


def fleet_yaml(answer: Advice, text: str) -> str:
    """The fleet file with the changes of the best proposal. There must be one."""
    return edited(text, {each.key: each.value for each in answer.proposals[0].changes})
