"""A deployment asked for, and the answer. Values only, fit for JSON; planners in `deployment` and `melange`."""

from __future__ import annotations

from math import inf
from typing import Literal

from msgspec import Struct

from headway.core.errors import HeadwayError, unknown
from headway.planning.combos.candidates import Candidate
from headway.planning.combos.combos import GpuCombo

Objective = Literal["co", "mc", "mce"]
Efficiency = Literal["served", "closed-form", "shape", "step"]
EFFICIENCIES: dict[Efficiency, str] = {
    "served": "tokens_per_usd",
    "closed-form": "closed_form_tokens_per_usd",
    "shape": "shape_tokens_per_usd",
    "step": "step_tokens_per_usd",
}
TOLERANCE = 1e-6
"""Of a demand, by which a plan may miss it: the solver's."""


class Demand(Struct, frozen=True, forbid_unknown_fields=True):
    """What a service must be able to serve within its SLO."""

    service: str
    rps: float
    tokens_per_request: float | None = None
    """Prompt and output, for the plan's tokens per dollar; None: not told."""

    def __post_init__(self) -> None:
        if not 0 <= self.rps < inf:
            raise ValueError(f"rps: {self.rps}; expected 0 or more")


class Problem(Struct, frozen=True, forbid_unknown_fields=True):
    """What is asked."""

    demands: tuple[Demand, ...]
    candidates: tuple[Candidate, ...]
    limits: dict[str, int] = {}
    """GPUs by type; a type that is absent has no limit."""
    objective: Objective = "co"
    efficiency: Efficiency = "served"
    """Which cost-efficiency stands for C."""


class Chosen(Struct, frozen=True, forbid_unknown_fields=True):
    """A combo of the plan, `count` times."""

    service: str
    combo: GpuCombo
    count: int
    goodput_rps: float
    """Of one."""
    usd_per_hour: float
    """Of one."""
    tokens_per_usd: float | None


class Served(Struct, frozen=True, forbid_unknown_fields=True):
    """A service under the plan."""

    service: str
    demand_rps: float
    goodput_rps: float
    shortfall_rps: float


class Binding(Struct, frozen=True, forbid_unknown_fields=True):
    """A limit or demand without which the plan would be better."""

    kind: Literal["gpus", "demand"]
    name: str
    used: float
    limit: float
    objective_without: float | None
    """Of the same problem without it. None under `mce`, which takes all there is: what binds is used up."""


class Plan(Struct, frozen=True, forbid_unknown_fields=True):
    """The answer. Frozen values, fit for JSON."""

    status: Literal["optimal", "feasible", "short"]
    """`feasible`: demands are met, but the time was over before the optimum was proved. `short`: they cannot be
    met, or no way was found in the time; the plan serves what it can, and `why` says what is missing."""
    planner: str
    objective: float | None
    """In the terms of `planner`; of a short plan: the sum of the shares of demand that it serves."""
    bound: float | None
    """No plan is better."""
    gap: float | None
    """Between the two, relative to the objective."""
    combos: tuple[Chosen, ...]
    gpus: dict[str, int]
    """In use, by type."""
    usd_per_hour: float
    tokens_per_usd: float | None
    """Tokens of the demands, as far as they are served, per dollar; None: unknown, or the plan costs nothing."""
    services: tuple[Served, ...]
    binding: tuple[Binding, ...]
    why: str = ""
    notes: tuple[str, ...] = ()


def check(problem: Problem) -> None:
    """HeadwayError where the problem does not hold together."""
    names = [demand.service for demand in problem.demands]
    if len(set(names)) < len(names):
        raise HeadwayError("demands: a service stands there twice")
    if not names:
        raise HeadwayError("demands: expected at least one service")
    for each in problem.candidates:
        if each.service not in names:
            raise unknown("service", each.service, names, f"candidate {each.combo.label}")
        if not 0 <= each.goodput_rps < inf:
            raise HeadwayError(f"candidate {each.combo.label}: goodput_rps {each.goodput_rps}; expected 0 or more")
    for gpu, limit in problem.limits.items():
        if limit < 0:
            raise HeadwayError(f"limits: {gpu}: {limit}; expected 0 or more")
    if problem.objective == "mce":
        _check_weighable(problem)


def _check_weighable(problem: Problem) -> None:
    for each in problem.candidates:
        if each.combo.usd_per_hour == 0:
            raise HeadwayError(
                f"{each.combo.label} costs nothing, so its cost-efficiency is infinite and mce cannot weigh it; "
                "use co or mc"
            )
        if not any(gpu in problem.limits for gpu in each.combo.gpus):
            raise HeadwayError(
                f"mce adds combos for as long as there are GPUs, and {each.combo.label} has no limit; give one"
            )


def tokens_per_usd(demands: tuple[Demand, ...], served: tuple[Served, ...], usd_per_hour: float) -> float | None:
    """Of what is asked for and served; None where lengths are unknown, or it costs nothing."""
    total = 0.0
    for demand, got in zip(demands, served, strict=True):
        if demand.tokens_per_request is None:
            return None
        total += min(demand.rps, got.goodput_rps) * demand.tokens_per_request * 3600
    return total / usd_per_hour if usd_per_hour > 0 else None
