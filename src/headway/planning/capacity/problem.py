"""A capacity problem and its plan: candidates, targets and the metrics of rehearsals. Values only, fit for JSON."""

from __future__ import annotations

from math import inf
from typing import Literal, Protocol

from msgspec import UNSET, Struct, UnsetType

from headway.catalog.errors import Band, Load
from headway.core.fleet import Parallel

SLO_NAMES = {"ttft_p99_s": "TTFT p99", "tpot_p99_s": "TPOT p99", "e2e_p99_s": "E2E p99", "attainment": "attainment"}
"""The fields of `Targets`, as in messages."""
Speculative = Literal["on", "off", "both"]
"""Whether the scenario's speculative decoding is used, or both are compared."""
SLOS = tuple(SLO_NAMES)
LATENCY_SLOS = SLOS[:3]


class Targets(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits that a plan must meet. None: no such target; at least one is set."""

    ttft_p99_s: float | None = None
    """99th percentile of the time to the first token, over all requests."""
    tpot_p99_s: float | None = None
    """99th percentile of the mean time per output token after the first."""
    e2e_p99_s: float | None = None
    """99th percentile of the time from arrival to the last token."""
    attainment: float | None = None
    """Least share of requests that meet all of their SLOs."""


class CapacityCandidate(Struct, frozen=True, forbid_unknown_fields=True):
    """A kind of replica, with a routing and an ordering policy."""

    gpu: str
    parallel: Parallel
    routing: str
    usd_per_replica_hour: float
    ordering: str = "fcfs"
    speculates: bool | UnsetType = UNSET
    """With the scenario's speculative decoding, or without; absent: the scenario has none."""

    @property
    def policy(self) -> str:
        """As in "least-loaded", "least-loaded + edf" or "least-loaded + speculative"."""
        parts = [self.routing, *([self.ordering] if self.ordering != "fcfs" else [])]
        return " + ".join([*parts, "speculative"] if self.speculates else parts)

    @property
    def label(self) -> str:
        """As in "h100-80gb-sxm tp 2, least-loaded"."""
        return f"{self.gpu} tp {self.parallel.tp}, {self.policy}"


class Situation(Struct, frozen=True, forbid_unknown_fields=True):
    """Conditions of a rehearsal that differ from the scenario's."""

    load: float = 1.0
    """Multiple of the scenario's requests per second."""
    lost_replicas: int = 0
    """Replicas that crash halfway through and do not come back."""
    lost_regions: int = 0
    """Regions whose replicas crash halfway through and do not come back."""

    @property
    def label(self) -> str:
        """As in "load x3, 1 replica lost"."""
        parts = [f"load x{self.load:g}"] if self.load != 1 else []
        for number, noun in ((self.lost_replicas, "replica"), (self.lost_regions, "region")):
            parts += [f"{number} {noun}{'s' if number > 1 else ''} lost"] if number else []
        return ", ".join(parts) or "as asked"


class RehearsalMetrics(Struct, frozen=True, forbid_unknown_fields=True):
    """Metrics of one rehearsal. A latency of None: more than 1% of the requests did not finish."""

    ttft_p99_s: float | None
    tpot_p99_s: float | None
    e2e_p99_s: float | None
    attainment: float | None
    """None: no request has an SLO."""
    goodput_rps: float | None
    """Requests per second that met their SLOs; finished requests where none has an SLO."""
    busy_share: float | None
    num_requests: int
    num_completed: int
    calibrated: bool
    wait_growth: float | None = None
    """Mean TTFT of the last third of the requests over that of the middle third; None: a third has none finished."""
    load: Load | None = None
    """Of the fullest replica, as in `catalog.errors.load_of`; None: not known."""
    kwh_per_day: float | None = None
    """Of the GPUs, at their mean power in the rehearsal; None: not known."""
    longest: dict[str, float] = {}
    """By kind of SLO, the factor on predicted latencies that 9 of 10 measured runs stay below; empty: not known."""
    attainment_if_longest: float | None = None
    """`attainment`, if all latencies were longer by these factors; None: not known."""


class CapacityEvaluator(Protocol):
    """Rehearses `replicas` replicas of a candidate. The same arguments give the same metrics."""

    def __call__(self, candidate: CapacityCandidate, replicas: int, situation: Situation) -> RehearsalMetrics: ...


class CandidateBounds(Struct, frozen=True, forbid_unknown_fields=True):
    """Lower bounds for a candidate, known without a rehearsal."""

    least_replicas: int = 1
    """Fewer cannot finish the work in time."""
    reason: str | None = None
    """Why no number of replicas meets the targets; None: some number may."""
    uncalibrated: tuple[str, ...] = ()
    """What of its step times was not measured on its GPU and engine."""
    ttft_p99_s: float | None = None
    """Of an unloaded replica, as the next two; None: unknown."""
    tpot_p99_s: float | None = None
    e2e_p99_s: float | None = None


class CapacityProblem(Struct, frozen=True, forbid_unknown_fields=True):
    candidates: tuple[CapacityCandidate, ...]
    targets: Targets
    least_replicas: int = 1
    max_replicas: int = 64
    situations: tuple[Situation, ...] = ()


class RehearsedSize(Struct, frozen=True, forbid_unknown_fields=True):
    replicas: int
    measured: RehearsalMetrics
    misses: tuple[str, ...]


class CandidateResult(Struct, frozen=True, forbid_unknown_fields=True):
    candidate: CapacityCandidate
    status: Literal["feasible", "open", "infeasible", "pruned"]
    """`feasible`: `replicas` is its smallest number. `open`: more expensive than the plan, so not settled. `pruned`:
    ruled out without a rehearsal. `infeasible`: ruled out even with `max_replicas`."""
    least_replicas: int
    """Fewer do not meet the targets."""
    replicas: int | None
    usd_per_hour: float | None
    bound_usd_per_hour: float | None
    """Its least cost; None: infeasible."""
    reason: str
    points: tuple[RehearsedSize, ...]
    calibrated: bool = True
    """Whether its step times were measured on its GPU and engine."""
    uncalibrated: tuple[str, ...] = ()
    """What of them was not."""


class PolicyResult(Struct, frozen=True, forbid_unknown_fields=True):
    """A routing and an ordering on the plan's replicas."""

    policy: str
    measured: RehearsalMetrics
    misses: tuple[str, ...]
    ties: bool
    """It meets all targets, and by a margin that differs from the plan's by less than `TIE`."""


class WhatIf(Struct, frozen=True, forbid_unknown_fields=True):
    """The plan in another situation, and the replicas that it would need there."""

    situation: Situation
    measured: RehearsalMetrics
    misses: tuple[str, ...]
    replicas_needed: int | None
    """Of the plan's candidate; None: more than were tried."""
    usd_per_hour_needed: float | None


class LongerRun(Struct, frozen=True, forbid_unknown_fields=True):
    """The plan, rehearsed once more with more requests of the same kind."""

    measured: RehearsalMetrics
    misses: tuple[str, ...]


class BestReached(Struct, frozen=True, forbid_unknown_fields=True):
    """The best value of any candidate for one target."""

    slo: str
    target: float
    best: float | None
    where: str


class LikelyTarget(Struct, frozen=True, forbid_unknown_fields=True):
    """A target of the plan, by the errors of predictions for measured runs."""

    slo: str
    target_s: float
    predicted_s: float
    band: Band
    chance: float
    """Least chance that a measured run meets the target."""


class CapacityPlan(Struct, frozen=True, forbid_unknown_fields=True):
    status: Literal["optimal", "infeasible"]
    """`optimal`: the cheapest of the candidates, provided that more replicas are never worse (see `num_assumed`)."""
    targets: Targets
    objective_usd_per_hour: float | None = None
    bound_usd_per_hour: float | None = None
    """No candidate costs less: each cheaper fleet missed a target in a rehearsal, or cannot do the work."""
    num_assumed: int = 0
    """Fleets cheaper than the plan that were not rehearsed, since one with more replicas misses a target."""
    choice: CandidateResult | None = None
    measured: RehearsalMetrics | None = None
    binds: tuple[str, ...] = ()
    """The targets missed with one replica less."""
    one_less: RehearsalMetrics | None = None
    runners_up: tuple[CandidateResult, ...] = ()
    """The cheapest of each other GPU, cheapest first; then GPUs without a feasible candidate."""
    policies: tuple[PolicyResult, ...] = ()
    """The plan's policies and the others on as many of its replicas, the best first; empty if there are no others."""
    what_ifs: tuple[WhatIf, ...] = ()
    options: tuple[CandidateResult, ...] = ()
    reach: tuple[BestReached, ...] = ()
    monotone: bool | None = None
    """Whether of the numbers of replicas that were rehearsed none does worse than a smaller one; None: there is one.
    If not, every number that costs less than the plan was rehearsed."""
    num_rehearsals: int = 0
    longer: LongerRun | None = None
    """None: the workload has no more requests, as a trace."""
    likely: tuple[LikelyTarget, ...] = ()
    """The plan's targets of latencies; empty without a plan."""
    notes: tuple[str, ...] = ()


TIE = 0.02
"""Policies tie if their distances from the targets differ by a smaller share: another seed would change more."""


def distance(measured: RehearsalMetrics, targets: Targets) -> float:
    """How near the worst metric comes to its target: 1 is at the target, less is better, infinite is never."""
    shares = []
    for name in SLOS:
        value, target = getattr(measured, name), getattr(targets, name)
        if target is None:
            continue
        if value is None:
            return inf
        if name == "attainment":  # of shares that may miss
            value, target = 1 - value, max(1 - target, 1e-9)
        shares.append(value / target)
    return float(max(shares))


def misses(measured: RehearsalMetrics, targets: Targets) -> tuple[str, ...]:
    """Missed targets, in the order of `SLOS`."""
    return tuple(name for name in SLOS if _missed(getattr(measured, name), getattr(targets, name), name))


def _missed(value: float | None, target: float | None, name: str) -> bool:
    if target is None:
        return False
    if value is None:
        return True
    return value < target if name == "attainment" else value > target
