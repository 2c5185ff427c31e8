"""Melange: the cheapest mix of GPUs that serve prompts and answers together (Griggs et al. 2024), a baseline.

Requests fall into buckets of prompt and output sizes; each bucket's rate is cut into slices; a slice goes to one type
of instance, of which it takes the share that its rate is of the most that such an instance serves of that bucket.

Sets and parameters
    s in S, b in B_s    services and their buckets, with rates D_b in requests per second, in A slices each
    k in K_s            types of instance, with a price P_k in $/h and r_kt GPUs of type t
    T_bk                most requests per second of bucket b that one instance of k serves within the SLO
Variables               n_bk slices of b on k; y_k instances of k; whole numbers
Minimise                sum of P_k y_k
Subject to              sum over k of n_bk = A                          for every b
                        sum over b of (D_b / A) / T_bk n_bk <= y_k      for every k
                        sum over k of r_kt y_k <= G_t                   for every t with a limit

Melange has one 0-1 variable for each slice; counting the slices of a bucket, which are alike, gives the same optimum.
It has no fallback either; here, where not all can be served, the plan leaves out the smallest rate, at the least price.
What stands for a bucket is the mean size of its requests, and edges beyond 250 tokens are our choice.
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
from headway.planning.combos.candidates import Profiler, Service
from headway.planning.combos.combos import Counts, GpuCombo, Offer, combos
from headway.planning.combos.cost_efficiency import HOUR_S
from headway.planning.combos.problem import TOLERANCE, Chosen, Plan, Served
from headway.planning.combos.speeds import Pattern
from headway.planning.solver import Floats, Solution, minimise

PROMPT_EDGES = (0, 25, 100, 250, 500, 1000, 2000, 4000, 8000)
OUTPUT_EDGES = (0, 25, 100, 250, 500, 1000, 2000)
SLICES = 4
"""Of each bucket; more change little, say its authors."""


class Bucket(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests of like size."""

    prompt_tokens: float
    """Mean, as of `output_tokens`."""
    output_tokens: float
    rps: float


class Instance(Struct, frozen=True, forbid_unknown_fields=True):
    """A type of instance for a service."""

    combo: GpuCombo
    """Aggregated."""
    most_rps: tuple[float, ...]
    """Of each bucket, within the SLO; 0: it cannot."""


class Sized(Struct, frozen=True, forbid_unknown_fields=True):
    """A service by the sizes of its requests."""

    service: str
    buckets: tuple[Bucket, ...]
    instances: tuple[Instance, ...]

    def __post_init__(self) -> None:
        if any(len(each.most_rps) != len(self.buckets) for each in self.instances):
            raise ValueError(f"{self.service}: most_rps has not one value for each bucket")
        if any(each.combo.aggregated is None for each in self.instances):
            raise ValueError(f"{self.service}: Melange serves with aggregated instances only")


class Problem(Struct, frozen=True, forbid_unknown_fields=True):
    """What is asked."""

    services: tuple[Sized, ...]
    limits: dict[str, int] = {}
    """GPUs by type; a type that is absent has no limit."""
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
) -> tuple[Bucket, ...]:
    """The buckets that a sample of requests fills, coming at `rps`; the last edges are followed by all larger ones."""
    prompts, outputs = np.asarray(prompt_tokens, dtype=float), np.asarray(output_tokens, dtype=float)
    if not len(prompts) or len(prompts) != len(outputs):
        raise HeadwayError(f"{len(prompts)} prompts, {len(outputs)} outputs; expected as many of each, and some")
    found = []
    for low_in, high_in in pairwise((*prompt_edges, inf)):
        in_row = (prompts > low_in) & (prompts <= high_in)
        for low_out, high_out in pairwise((*output_edges, inf)):
            here = in_row & (outputs > low_out) & (outputs <= high_out)
            if here.any():
                share = float(here.mean())
                found.append(Bucket(float(prompts[here].mean()), float(outputs[here].mean()), rps * share))
    return tuple(found)


def sized(
    service: Service, found: Sequence[Bucket], offers: Sequence[Offer], profiler: Profiler, counts: Counts | None = None
) -> Sized:
    """Profiles every aggregated combo of one instance for every bucket."""
    made, _ = combos(service.model, service.engine, offers, counts)
    instances = []
    for combo in made:
        if combo.aggregated is not None and combo.aggregated.instances == 1:
            patterns = [Pattern(None, each.prompt_tokens, each.output_tokens) for each in found]
            most = tuple(profiler.goodput_rps(combo, pattern, service.slo) for pattern in patterns)
            instances.append(Instance(combo, most))
    return Sized(service.name, tuple(found), tuple(instances))


def plan(problem: Problem, time_limit_s: float = 10.0) -> Plan:
    """The cheapest mix. Its `services` are what the instances in use serve of the mix that they are given."""
    program = _Program(problem, time_limit_s)
    found = program.solve(leave_out=None)
    if found.status in ("optimal", "feasible"):
        return program.plan(found)
    least = program.solve(leave_out=inf)
    if least.status not in ("optimal", "feasible"):
        raise HeadwayError("the time was over before a plan was found; raise the time limit")
    return program.plan(program.solve(leave_out=program.left_out(least)), short=True)


class _Program:
    """Variables: for each service its n_bk, bucket by bucket, then its y_k, then slices of b left out."""

    def __init__(self, problem: Problem, time_limit_s: float) -> None:
        self.problem, self.time_limit_s = problem, time_limit_s
        self.sizes = [len(s.instances) * (len(s.buckets) + 1) + len(s.buckets) for s in problem.services]
        self.starts = np.concatenate([[0], np.cumsum(self.sizes)]).astype(int)
        self.rows: list[Floats] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self.price, self.rate = np.zeros(self.starts[-1]), np.zeros(self.starts[-1])
        self.upper = np.full(self.starts[-1], inf)
        for service, start in zip(problem.services, self.starts, strict=False):
            self._add(service, int(start))
        for gpu, limit in sorted(problem.limits.items()):
            row = np.zeros(self.starts[-1])
            for service, start in zip(problem.services, self.starts, strict=False):
                for k, each in enumerate(service.instances):
                    row[self._y(service, int(start), k)] = each.combo.gpus.get(gpu, 0)
            self._row(row, -inf, limit)

    def _y(self, service: Sized, start: int, k: int) -> int:
        return start + len(service.buckets) * len(service.instances) + k

    def _out(self, service: Sized, start: int, b: int) -> int:
        return start + (len(service.buckets) + 1) * len(service.instances) + b

    def _row(self, row: Floats, low: float, high: float) -> None:
        self.rows.append(row)
        self.low.append(low)
        self.high.append(high)

    def _add(self, service: Sized, start: int) -> None:
        num, slices = len(service.instances), self.problem.slices
        loads = np.zeros((num, self.starts[-1]))
        for b, bucket in enumerate(service.buckets):
            row = np.zeros(self.starts[-1])
            for k, each in enumerate(service.instances):
                at = start + b * num + k
                row[at] = 1.0
                self.upper[at] = slices if each.most_rps[b] > 0 else 0
                loads[k, at] = bucket.rps / slices / each.most_rps[b] if each.most_rps[b] > 0 else 0.0
            out = self._out(service, start, b)
            row[out], self.upper[out], self.rate[out] = 1.0, slices, bucket.rps / slices
            self._row(row, slices, slices)
        for k, each in enumerate(service.instances):
            at = self._y(service, start, k)
            loads[k, at] = -1.0
            self.price[at] = each.combo.usd_per_hour
            self._row(loads[k], -inf, 0.0)

    def solve(self, leave_out: float | None) -> Solution:
        """The least price with so much left out; infinite: what is left out at its least; None: nothing is."""
        rows, low, high, upper = list(self.rows), list(self.low), list(self.high), self.upper.copy()
        if leave_out is None:
            upper[self.rate > 0] = 0
        elif leave_out < inf:
            rows, low, high = [*rows, self.rate], [*low, -inf], [*high, leave_out * (1 + TOLERANCE)]
        cost = self.rate if leave_out == inf else self.price
        return minimise(cost, np.array(rows), np.array(low), np.array(high), upper, time_limit_s=self.time_limit_s)

    def left_out(self, found: Solution) -> float:
        """Requests per second."""
        return float(self.rate @ np.array(found.values))

    def plan(self, found: Solution, short: bool = False) -> Plan:
        """The values."""
        x = found.values
        usd = float(self.price @ np.array(x))
        rate: list[float] = self.rate.tolist()
        chosen: list[Chosen] = []
        served, tokens_s = [], 0.0
        for service, start in zip(self.problem.services, self.starts, strict=False):
            some = self._chosen(service, int(start), x)
            chosen += some
            demand = sum(bucket.rps for bucket in service.buckets)
            missing = sum(rate[at] * x[at] for at in self._outs(service, int(start)))
            for b, bucket in enumerate(service.buckets):
                got = bucket.rps - rate[(at := self._out(service, int(start), b))] * x[at]
                tokens_s += got * (bucket.prompt_tokens + bucket.output_tokens)
            goodput = sum(each.count * each.goodput_rps for each in some)
            served.append(Served(service.service, demand, goodput, missing))
        status: Literal["optimal", "feasible", "short"] = "short" if short else (
            "optimal" if found.status == "optimal" else "feasible"
        )  # fmt: skip
        bound = None if found.bound is None else min(found.bound, usd)
        gap = None if bound is None else (usd - bound) / usd if usd else 0.0
        return Plan(
            status=status,
            planner="melange",
            objective=usd,
            bound=bound,
            gap=gap,
            combos=tuple(chosen),
            gpus=_gpus(chosen),
            usd_per_hour=usd,
            tokens_per_usd=HOUR_S * tokens_s / usd if usd else None,
            services=tuple(served),
            binding=(),
            why=self._why(served) if short else "",
        )

    def _outs(self, service: Sized, start: int) -> range:
        first = self._out(service, start, 0)
        return range(first, first + len(service.buckets))

    def _chosen(self, service: Sized, start: int, x: Sequence[float]) -> list[Chosen]:
        """Goodput and tokens per dollar are of an instance that is full of the mix it is given."""
        num, found = len(service.instances), []
        for k, each in enumerate(service.instances):
            count = round(x[self._y(service, start, k)])
            rates = [
                bucket.rps / self.problem.slices * x[start + b * num + k] for b, bucket in enumerate(service.buckets)
            ]
            load = sum(rate / most for rate, most in zip(rates, each.most_rps, strict=True) if rate > 0)
            if not count or not load:
                continue
            tokens = [bucket.prompt_tokens + bucket.output_tokens for bucket in service.buckets]
            tokens_s = sum(rate * size for rate, size in zip(rates, tokens, strict=True)) / load
            usd = each.combo.usd_per_hour
            per_usd = HOUR_S * tokens_s / usd if usd else None
            found.append(Chosen(service.service, each.combo, count, sum(rates) / load, usd, per_usd))
        return found

    def _why(self, served: Sequence[Served]) -> str:
        reasons = []
        for service, got in zip(self.problem.services, served, strict=True):
            never = sum(
                bucket.rps
                for b, bucket in enumerate(service.buckets)
                if not any(each.most_rps[b] > 0 for each in service.instances)
            )
            if got.shortfall_rps > 0:
                reasons.append(
                    f"{got.service}: {got.shortfall_rps:.4g} of {got.demand_rps:.4g} req/s are left out; "
                    f"{never:.4g} are of sizes that no instance serves within the SLO"
                )
        return "; ".join(reasons)


def _gpus(chosen: Sequence[Chosen]) -> dict[str, int]:
    used: dict[str, int] = {}
    for each in chosen:
        for gpu, num in each.combo.gpus.items():
            used[gpu] = used.get(gpu, 0) + num * each.count
    return dict(sorted(used.items()))
