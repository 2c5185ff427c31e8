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
"""Whether candidates use the scenario's speculative decoding. "both": each candidate is tried with it and without."""
SLOS = tuple(SLO_NAMES)
LATENCY_SLOS = SLOS[:3]


class Targets(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits that a plan must meet. None: no such target. At least one must be set."""

    ttft_p99_s: float | None = None
    """99th percentile of the time to the first token, over all requests."""
    tpot_p99_s: float | None = None
    """99th percentile of the mean time per output token after the first."""
    e2e_p99_s: float | None = None
    """99th percentile of the time from arrival to the last token."""
    attainment: float | None = None
    """Minimum share of requests that meet all of their SLOs."""


class CapacityCandidate(Struct, frozen=True, forbid_unknown_fields=True):
    """A kind of replica, with a routing and an ordering policy."""

    gpu: str
    parallel: Parallel
    routing: str
    usd_per_replica_hour: float
    ordering: str = "fcfs"
    speculates: bool | UnsetType = UNSET
    """Whether the scenario's speculative decoding is used; absent if the scenario has none."""

    @property
    def policy(self) -> str:
        """A label such as "least-loaded", "least-loaded + edf" or "least-loaded + speculative"."""
        parts = [self.routing, *([self.ordering] if self.ordering != "fcfs" else [])]
        return " + ".join([*parts, "speculative"] if self.speculates else parts)

    @property
    def label(self) -> str:
        """A label such as "h100-80gb-sxm tp 2, least-loaded"."""
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
        """A label such as "load x3, 1 replica lost"."""
        parts = [f"load x{self.load:g}"] if self.load != 1 else []
        for number, noun in ((self.lost_replicas, "replica"), (self.lost_regions, "region")):
            parts += [f"{number} {noun}{'s' if number > 1 else ''} lost"] if number else []
        return ", ".join(parts) or "as asked"


class RehearsalMetrics(Struct, frozen=True, forbid_unknown_fields=True):
    """Metrics of one rehearsal. A latency is None if more than 1% of the requests did not finish."""

    ttft_p99_s: float | None
    tpot_p99_s: float | None
    e2e_p99_s: float | None
    attainment: float | None
    """Share of requests that met their SLOs; None if no request has an SLO."""
    goodput_rps: float | None
    """Requests per second that met their SLOs; finished requests if none has an SLO."""
    busy_share: float | None
    num_requests: int
    num_completed: int
    calibrated: bool
    wait_growth: float | None = None
    """Mean TTFT of the last third of the requests over the mean of the middle third; None if no request of a third
    finished."""
    load: Load | None = None
    """Load of the fullest replica, as in `catalog.errors.load_of`; None: unknown."""
    kwh_per_day: float | None = None
    """Energy of the GPUs at their mean power in the rehearsal; None: unknown."""
    longest: dict[str, float] = {}
    """Maps each kind of SLO to the factor on predicted latencies that 90% of measured runs stay below; empty:
    unknown."""
    attainment_if_longest: float | None = None
    """`attainment` if all latencies were longer by the factors in `longest`; None: unknown."""

    @property
    def is_stopped(self) -> bool:
        """Whether the rehearsal ended as soon as it was certain to miss a target."""
        return self == stopped(self.num_requests)


def stopped(num_requests: int) -> RehearsalMetrics:
    """In place of the metrics of a rehearsal that ended after so many arrivals, because it was certain to miss a
    target."""
    nothing = (None,) * 6
    return RehearsalMetrics(*nothing, num_requests=num_requests, num_completed=0, calibrated=False)


class CapacityEvaluator(Protocol):
    """Rehearses `replicas` replicas of a candidate. The same arguments give the same metrics."""

    def __call__(self, candidate: CapacityCandidate, replicas: int, situation: Situation) -> RehearsalMetrics: ...


class CandidateBounds(Struct, frozen=True, forbid_unknown_fields=True):
    """Lower bounds for a candidate, known without a rehearsal."""

    least_replicas: int = 1
    """Minimum number of replicas: fewer cannot finish the work in time."""
    reason: str | None = None
    """Why no number of replicas meets the targets; None: some number may."""
    uncalibrated: tuple[str, ...] = ()
    """Step times that were not measured on its GPU and engine."""
    ttft_p99_s: float | None = None
    """Latency of an unloaded replica, as for the next two fields; None: unknown."""
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
    """`feasible`: `replicas` is the smallest number. `open`: more expensive than the plan, so it was not decided.
    `pruned`: ruled out without a rehearsal. `infeasible`: ruled out even with `max_replicas`."""
    least_replicas: int
    """Minimum number of replicas: fewer do not meet the targets."""
    replicas: int | None
    usd_per_hour: float | None
    bound_usd_per_hour: float | None
    """Lower bound of the cost; None if infeasible."""
    reason: str
    points: tuple[RehearsedSize, ...]
    calibrated: bool = True
    """Whether its step times were measured on its GPU and engine."""
    uncalibrated: tuple[str, ...] = ()
    """Step times that were not measured."""


class PolicyResult(Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a routing and an ordering on the plan's replicas."""

    policy: str
    measured: RehearsalMetrics
    misses: tuple[str, ...]
    ties: bool
    """Whether all targets are met by a margin that differs from the plan's by less than `TIE`."""


class WhatIf(Struct, frozen=True, forbid_unknown_fields=True):
    """The plan in another situation, and the replicas that it needs there."""

    situation: Situation
    measured: RehearsalMetrics
    misses: tuple[str, ...]
    replicas_needed: int | None
    """Replicas of the plan's candidate; None: more than were tried."""
    usd_per_hour_needed: float | None


class LongerRun(Struct, frozen=True, forbid_unknown_fields=True):
    """The plan, rehearsed again with more requests of the same kind."""

    measured: RehearsalMetrics
    misses: tuple[str, ...]


class BestReached(Struct, frozen=True, forbid_unknown_fields=True):
    """The best value of any candidate for one target."""

    slo: str
    target: float
    best: float | None
    where: str


class LikelyTarget(Struct, frozen=True, forbid_unknown_fields=True):
    """The probability of a plan's target, from the errors of predictions for measured runs."""

    slo: str
    target_s: float
    predicted_s: float
    band: Band
    chance: float
    """Lower bound of the probability that a measured run meets the target."""


class CapacityPlan(Struct, frozen=True, forbid_unknown_fields=True):
    status: Literal["optimal", "infeasible"]
    """`optimal`: the cheapest candidate, if more replicas are never worse (see `num_assumed`)."""
    targets: Targets
    objective_usd_per_hour: float | None = None
    bound_usd_per_hour: float | None = None
    """No candidate costs less: each cheaper fleet missed a target in a rehearsal, or cannot do the work."""
    num_assumed: int = 0
    """Cheaper fleets that were not rehearsed, because a larger fleet of the same candidate misses a target."""
    choice: CandidateResult | None = None
    measured: RehearsalMetrics | None = None
    binds: tuple[str, ...] = ()
    """The targets that one replica less misses."""
    one_less: RehearsalMetrics | None = None
    runners_up: tuple[CandidateResult, ...] = ()
    """The cheapest candidate of each other GPU, cheapest first; then GPUs without a feasible candidate."""
    policies: tuple[PolicyResult, ...] = ()
    """The plan's policies and the others on the same number of replicas, best first; empty if there are no others."""
    what_ifs: tuple[WhatIf, ...] = ()
    options: tuple[CandidateResult, ...] = ()
    reach: tuple[BestReached, ...] = ()
    monotone: bool | None = None
    """Whether no rehearsed number of replicas does worse than a smaller one; None without a plan. If False, every
    number that costs less than the plan was rehearsed."""
    num_rehearsals: int = 0
    longer: LongerRun | None = None
    """The plan in a longer run; None if the workload has no more requests, like a trace."""
    likely: tuple[LikelyTarget, ...] = ()
    """The probabilities that measured runs meet the plan's latency targets; empty without a plan."""
    notes: tuple[str, ...] = ()


TIE = 0.02
"""Policies tie if their distances from the targets differ by less than this share, because another seed changes a
distance by more."""


def distance(measured: RehearsalMetrics, targets: Targets) -> float:
    """How near the worst metric is to its target: 1 is at the target, less is better, and infinity means never."""
    shares = []
    for name in SLOS:
        value, target = getattr(measured, name), getattr(targets, name)
        if target is None:
            continue
        if value is None:
            return inf
        if name == "attainment":  # ratio of the shares that miss
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
