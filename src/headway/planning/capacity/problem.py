"""The capacity question and its answer: candidates, targets, what a rehearsal measured, and the plan. Values only."""

from __future__ import annotations

from typing import Literal, Protocol

from msgspec import Struct, field

from headway.core.fleet import Parallel

SLOS = ("ttft_p99_s", "tpot_p99_s", "e2e_p99_s", "attainment")
"""What a target can be set for: the fields of `Targets`."""


class Targets(Struct, frozen=True, forbid_unknown_fields=True):
    """What a plan must reach. None = no such target; at least one is set."""

    ttft_p99_s: float | None = None
    """99th percentile of the time to the first token, over all requests."""
    tpot_p99_s: float | None = None
    """The same of the mean time per output token after the first."""
    e2e_p99_s: float | None = None
    """The same of the time from arrival to the last token."""
    attainment: float | None = None
    """Least share of requests that meet every SLO of theirs."""


class Candidate(Struct, frozen=True, forbid_unknown_fields=True):
    """One way to serve: a kind of replica, who routes, and who goes first."""

    gpu: str
    parallel: Parallel
    routing: str
    usd_per_replica_hour: float
    ordering: str = "fcfs"

    @property
    def policy(self) -> str:
        """As in "least-loaded", or "least-loaded + edf"."""
        return self.routing if self.ordering == "fcfs" else f"{self.routing} + {self.ordering}"

    @property
    def label(self) -> str:
        """As in "h100-80gb-sxm tp 2, least-loaded"."""
        return f"{self.gpu} tp {self.parallel.tp}, {self.policy}"


class Situation(Struct, frozen=True, forbid_unknown_fields=True):
    """A what-if."""

    load: float = 1.0
    """Requests per second, as a multiple."""
    lost_replicas: int = 0
    """Replicas that crash halfway through and do not come back."""
    lost_regions: int = 0
    """Regions whose replicas do."""

    @property
    def label(self) -> str:
        """As in "load x3"."""
        parts = [f"load x{self.load:g}"] if self.load != 1 else []
        parts += [_counted(self.lost_replicas, "replica")] if self.lost_replicas else []
        parts += [_counted(self.lost_regions, "region")] if self.lost_regions else []
        return ", ".join(parts) or "as asked"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''} lost"


class Measured(Struct, frozen=True, forbid_unknown_fields=True):
    """What one rehearsal showed. A latency of None: more than 1% of the requests never got there."""

    ttft_p99_s: float | None
    tpot_p99_s: float | None
    e2e_p99_s: float | None
    attainment: float | None
    """None: no request has an SLO."""
    goodput_rps: float | None
    """Requests per second that met their SLOs; finished ones where there are none."""
    busy_share: float | None
    num_requests: int
    num_completed: int
    calibrated: bool


class Evaluator(Protocol):
    """Rehearses so many replicas of a candidate. The same arguments give the same answer."""

    def __call__(self, candidate: Candidate, replicas: int, situation: Situation) -> Measured: ...


class Floor(Struct, frozen=True, forbid_unknown_fields=True):
    """What holds for a candidate without a rehearsal."""

    least_replicas: int = 1
    """Fewer cannot do the work in the time."""
    reason: str | None = None
    """Why no number of replicas will do; None = one may."""
    ttft_p99_s: float | None = None
    """Unloaded, hence a lower bound; None = not known."""
    tpot_p99_s: float | None = None
    e2e_p99_s: float | None = None


class Problem(Struct, frozen=True, forbid_unknown_fields=True):
    """What is asked."""

    candidates: tuple[Candidate, ...]
    targets: Targets
    least_replicas: int = 1
    max_replicas: int = 64
    situations: tuple[Situation, ...] = ()


class Point(Struct, frozen=True, forbid_unknown_fields=True):
    """One rehearsal."""

    replicas: int
    measured: Measured
    misses: tuple[str, ...]
    """The targets missed."""


class Option(Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of a candidate in the end."""

    candidate: Candidate
    status: Literal["feasible", "open", "infeasible", "pruned"]
    """`feasible`: `replicas` is its smallest number. `open`: dearer than the plan, so not settled. `pruned`:
    no rehearsal was needed. `infeasible`: not with `max_replicas` either."""
    least_replicas: int
    """Fewer will not do."""
    replicas: int | None
    usd_per_hour: float | None
    bound_usd_per_hour: float | None
    """It costs at least this; None: infeasible."""
    reason: str
    points: tuple[Point, ...]


class WhatIf(Struct, frozen=True, forbid_unknown_fields=True):
    """The plan in another situation."""

    situation: Situation
    measured: Measured
    misses: tuple[str, ...]
    replicas_needed: int | None
    """Of the plan's kind; None: not with so many as were tried."""
    usd_per_hour_needed: float | None


class Reach(Struct, frozen=True, forbid_unknown_fields=True):
    """The best that any candidate showed for one target."""

    slo: str
    target: float
    best: float | None
    where: str


class Plan(Struct, frozen=True, forbid_unknown_fields=True):
    """The answer."""

    status: Literal["optimal", "infeasible"]
    """`optimal`: cheapest among the candidates, if more replicas never do worse (see `monotone`)."""
    targets: Targets
    objective_usd_per_hour: float | None
    bound_usd_per_hour: float | None
    """No candidate can cost less; equal to the objective when optimal."""
    choice: Option | None
    measured: Measured | None
    binds: tuple[str, ...]
    """The targets missed with one replica less."""
    one_less: Measured | None
    runners_up: tuple[Option, ...]
    """The cheapest of each other GPU, cheapest first; then those with none that will do."""
    what_ifs: tuple[WhatIf, ...]
    options: tuple[Option, ...]
    reach: tuple[Reach, ...]
    monotone: bool | None
    """Whether neighbours of the answer behaved as assumed; None: nothing to look at."""
    num_rehearsals: int
    notes: tuple[str, ...] = field(default=())


def misses(measured: Measured, targets: Targets) -> tuple[str, ...]:
    """The targets that were not reached, in the order of `SLOS`."""
    return tuple(name for name in SLOS if _missed(getattr(measured, name), getattr(targets, name), name))


def _missed(value: float | None, target: float | None, name: str) -> bool:
    if target is None:
        return False
    if value is None:
        return True
    return value < target if name == "attainment" else value > target
