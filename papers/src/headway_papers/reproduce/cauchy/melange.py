"""Melange: the cheapest mix of GPUs that serve prompts and answers together (Griggs et al. 2024), a baseline.

Requests are sorted into buckets by prompt and output size, and each bucket's rate is cut into slices. A slice goes to
one type of instance, and occupies the share of an instance that equals its rate over the instance's highest rate for
that bucket.

Sets and parameters
    s in S, b in B_s    services and their buckets, with rates D_b in requests per second, in A slices each
    k in K_s            types of instance, with a price P_k in $/h and r_kt GPUs of type t
    T_bk                most requests per second of bucket b that one instance of k serves within the SLO
Variables               n_bk slices of b on k; y_k instances of k; whole numbers
Minimise                sum of P_k y_k
Subject to              sum over k of n_bk = A                          for every b
                        sum over b of (D_b / A) / T_bk n_bk <= y_k      for every k
                        sum over k of r_kt y_k <= G_t                   for every t with a limit

Melange has one 0-1 variable for each slice. Counting the equal slices of a bucket gives the same optimum. Melange has
no fallback; here, if not all requests can be served, the plan leaves out the smallest possible rate at the lowest
price. A bucket is represented by the mean size of its requests, and edges beyond 250 tokens are our choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.planning.combos.candidates import enumerate_combos
from headway.planning.combos.cost_efficiency import HOUR_S
from headway.planning.combos.problem import (
    TOLERANCE,
    ComboPlan,
    ComboService,
    Counts,
    GpuCombo,
    Offer,
    PlannedCombo,
    Profiler,
    ServiceGoodput,
    WorkloadPattern,
    add_gpus,
)
from headway.planning.solver import Floats, Status, dot, integers, minimise, new_model

PROMPT_EDGES = (0, 25, 100, 250, 500, 1000, 2000, 4000, 8000)
OUTPUT_EDGES = (0, 25, 100, 250, 500, 1000, 2000)
SLICES = 4
"""Slices of each bucket. The authors report that more change little."""


class SizeBucket(Struct, frozen=True, forbid_unknown_fields=True):
    prompt_tokens: float
    """Mean tokens, as for `output_tokens`."""
    output_tokens: float
    rps: float


class Instance(Struct, frozen=True, forbid_unknown_fields=True):
    """A type of instance for a service."""

    combo: GpuCombo
    """An aggregated combo."""
    most_rps: tuple[float, ...]
    """Rate of each bucket within the SLO; 0 if it cannot serve the bucket."""


class Sized(Struct, frozen=True, forbid_unknown_fields=True):
    """A service divided by the sizes of its requests."""

    service: str
    buckets: tuple[SizeBucket, ...]
    instances: tuple[Instance, ...]

    def __post_init__(self) -> None:
        if any(len(each.most_rps) != len(self.buckets) for each in self.instances):
            raise ValueError(f"{self.service}: most_rps has not one value for each bucket")
        if any(each.combo.aggregated is None for each in self.instances):
            raise ValueError(f"{self.service}: Melange serves with aggregated instances only")


class MelangeProblem(Struct, frozen=True, forbid_unknown_fields=True):
    services: tuple[Sized, ...]
    limits: dict[str, int] = {}
    """GPUs by type; a missing type has no limit."""
    slices: int = SLICES

    def __post_init__(self) -> None:
        if self.slices < 1:
            raise ValueError(f"slices: {self.slices}; expected 1 or more")


def buckets(
    prompt_tokens: npt.ArrayLike,
    output_tokens: npt.ArrayLike,
    rps: float,
    prompt_edges: Sequence[float] = PROMPT_EDGES,
    output_edges: Sequence[float] = OUTPUT_EDGES,
) -> tuple[SizeBucket, ...]:
    """The buckets filled by a sample of requests, arriving at `rps`. A last bucket collects all larger sizes."""
    prompts, outputs = np.asarray(prompt_tokens, dtype=float), np.asarray(output_tokens, dtype=float)
    if not len(prompts) or len(prompts) != len(outputs):
        raise HeadwayError(f"{len(prompts)} prompts, {len(outputs)} outputs; expected as many of each, and some")
    filled = []
    for low_in, high_in in pairwise((*prompt_edges, inf)):
        in_row = (prompts > low_in) & (prompts <= high_in)
        for low_out, high_out in pairwise((*output_edges, inf)):
            in_cell = in_row & (outputs > low_out) & (outputs <= high_out)
            if in_cell.any():
                share = float(in_cell.mean())
                filled.append(SizeBucket(float(prompts[in_cell].mean()), float(outputs[in_cell].mean()), rps * share))
    return tuple(filled)


def sized(
    service: ComboService,
    size_buckets: Sequence[SizeBucket],
    offers: Sequence[Offer],
    profiler: Profiler,
    counts: Counts | None = None,
) -> Sized:
    """Profiles of every aggregated combo of one instance for every bucket."""
    combos, _ = enumerate_combos(service.model, service.engine, offers, counts)
    instances = []
    for combo in combos:
        if combo.aggregated is not None and combo.aggregated.instances == 1:
            patterns = [WorkloadPattern(None, each.prompt_tokens, each.output_tokens) for each in size_buckets]
            most = tuple(profiler.goodput_rps(combo, pattern, service.slo) for pattern in patterns)
            instances.append(Instance(combo, most))
    return Sized(service.name, tuple(size_buckets), tuple(instances))


def plan(problem: MelangeProblem, time_limit_s: float = 10.0) -> ComboPlan:
    """The cheapest mix. Its `services` are the rates that the used instances serve of their assigned mix."""
    program = _MelangeProgram(problem, time_limit_s)
    solution = program.solve(leave_out=None)
    if solution.status in ("optimal", "feasible"):
        return program.plan(solution)
    least = program.solve(leave_out=inf)
    if least.status not in ("optimal", "feasible"):
        raise HeadwayError("the time was over before a plan was found; raise the time limit")
    return program.plan(program.solve(leave_out=program.left_out(least)), short=True)


class _MelangeSolution(Struct, frozen=True):
    """Values by service: n_bk (buckets by instances), y_k, and the omitted slices of each bucket."""

    status: Status
    bound: float | None = None
    n: tuple[Floats, ...] = ()
    y: tuple[Floats, ...] = ()
    out: tuple[Floats, ...] = ()


class _MelangeProgram:
    def __init__(self, problem: MelangeProblem, time_limit_s: float) -> None:
        self.problem, self.time_limit_s = problem, time_limit_s
        self.prices = [[each.combo.usd_per_hour for each in service.instances] for service in problem.services]
        self.rates = [[bucket.rps / problem.slices for bucket in service.buckets] for service in problem.services]
        """Requests per second of a slice of each bucket."""

    def solve(self, leave_out: float | None) -> _MelangeSolution:
        """The lowest price with this rate left out; infinite: minimise the omitted rate; None: leave none out."""
        model, slices = new_model(), self.problem.slices
        variables = []
        for service, rates in zip(self.problem.services, self.rates, strict=True):
            num = len(service.instances)
            upper = [slices if each.most_rps[b] > 0 else 0 for b in range(len(rates)) for each in service.instances]
            n = integers(model, np.array(upper, float)).reshape(len(rates), num)
            y = integers(model, np.full(num, inf))
            out = integers(model, np.array([0 if leave_out is None and rate > 0 else slices for rate in rates], float))
            variables.append((n, y, out))
        for service, rates, (n, y, out) in zip(self.problem.services, self.rates, variables, strict=True):
            for b in range(len(rates)):
                model.addConstr(dot([1.0] * (len(y) + 1), [*n[b], out[b]]) == slices)
            for k, each in enumerate(service.instances):
                loads = [rate / most if most > 0 else 0.0 for rate, most in zip(rates, each.most_rps, strict=True)]
                model.addConstr(dot(loads, n[:, k]) - y[k] <= 0.0)
        every_y = [each for _, y, _ in variables for each in y]
        every_out = [each for _, _, out in variables for each in out]
        for gpu, limit in sorted(self.problem.limits.items()):
            use = [each.combo.gpus.get(gpu, 0) for service in self.problem.services for each in service.instances]
            model.addConstr(dot(use, every_y) <= limit)
        left_out = dot([rate for rates in self.rates for rate in rates], every_out)
        if leave_out is not None and leave_out < inf:
            model.addConstr(left_out <= leave_out * (1 + TOLERANCE))
        price = dot([usd for prices in self.prices for usd in prices], every_y)
        solution = minimise(model, left_out if leave_out == inf else price, self.time_limit_s)
        if not solution.values:
            return _MelangeSolution(solution.status)
        n, y, out = (tuple(solution.of(each[i]) for each in variables) for i in range(3))
        return _MelangeSolution(solution.status, solution.bound, n, y, out)

    def left_out(self, solution: _MelangeSolution) -> float:
        return sum(float(np.array(rates) @ out) for rates, out in zip(self.rates, solution.out, strict=True))

    def plan(self, solution: _MelangeSolution, short: bool = False) -> ComboPlan:
        usd = sum(float(np.array(prices) @ y) for prices, y in zip(self.prices, solution.y, strict=True))
        chosen: list[PlannedCombo] = []
        served, tokens_s = [], 0.0
        for service, rates, n, y, out in zip(
            self.problem.services, self.rates, solution.n, solution.y, solution.out, strict=True
        ):
            some = self._chosen(service, rates, n, y)
            chosen += some
            demand = sum(bucket.rps for bucket in service.buckets)
            missing = sum(rate * num_left_out for rate, num_left_out in zip(rates, out.tolist(), strict=True))
            for bucket, rate, num_left_out in zip(service.buckets, rates, out.tolist(), strict=True):
                tokens_s += (bucket.rps - rate * num_left_out) * (bucket.prompt_tokens + bucket.output_tokens)
            goodput = sum(each.count * each.goodput_rps for each in some)
            served.append(ServiceGoodput(service.service, demand, goodput, missing))
        status: Literal["optimal", "feasible", "short"] = (
            "short" if short else ("optimal" if solution.status == "optimal" else "feasible")
        )
        bound = None if solution.bound is None else min(solution.bound, usd)
        gap = None if bound is None else (usd - bound) / usd if usd else 0.0
        used = ((gpu, num * each.count) for each in chosen for gpu, num in each.combo.gpus.items())
        return ComboPlan(
            status=status,
            planner="melange",
            objective=usd,
            bound=bound,
            gap=gap,
            combos=tuple(chosen),
            gpus=dict(sorted(add_gpus(used).items())),
            usd_per_hour=usd,
            tokens_per_usd=HOUR_S * tokens_s / usd if usd else None,
            services=tuple(served),
            binding=(),
            why=self._explanation(served) if short else "",
        )

    def _chosen(self, service: Sized, rates: Sequence[float], n: Floats, y: Floats) -> list[PlannedCombo]:
        """The planned combos, with goodput and tokens per dollar of an instance filled with its assigned mix."""
        planned = []
        for k, each in enumerate(service.instances):
            count = round(y[k])
            rates_served = [rate * slices for rate, slices in zip(rates, n[:, k].tolist(), strict=True)]
            load = sum(rate / most for rate, most in zip(rates_served, each.most_rps, strict=True) if rate > 0)
            if not count or not load:
                continue
            tokens = [bucket.prompt_tokens + bucket.output_tokens for bucket in service.buckets]
            tokens_s = sum(rate * size for rate, size in zip(rates_served, tokens, strict=True)) / load
            usd = each.combo.usd_per_hour
            per_usd = HOUR_S * tokens_s / usd if usd else None
            planned.append(PlannedCombo(service.service, each.combo, count, sum(rates_served) / load, usd, per_usd))
        return planned

    def _explanation(self, served: Sequence[ServiceGoodput]) -> str:
        reasons = []
        for service, got in zip(self.problem.services, served, strict=True):
            unservable_rps = sum(
                bucket.rps
                for b, bucket in enumerate(service.buckets)
                if not any(each.most_rps[b] > 0 for each in service.instances)
            )
            if got.shortfall_rps > 0:
                reasons.append(
                    f"{got.service}: {got.shortfall_rps:.4g} of {got.demand_rps:.4g} req/s are left out; "
                    f"{unservable_rps:.4g} are of sizes that no instance serves within the SLO"
                )
        return "; ".join(reasons)
