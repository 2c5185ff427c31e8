"""A lower bound on the GPU-hours of any plan for a fleet that serves a trace in time.

A plan serves a trace in time if

- of each tier's requests with an SLO on the first token, all but `ALLOWED` (SageServe's SLA is a 95th percentile) meet
  it, of those that arrive after the warm-up and whose limit expires before the run ends;
- of the same requests, all but `ALLOWED` finish by their SLO on the end, else by the end of the run;
- requests with a deadline in the run finish by then; if the run lasts until everything is done, all requests finish.

Requests that no replica can hold, or whose clients may give up, are left out.

The bound is a fluid relaxation, a linear program. Work can be divided at will, done by any replica of its model, all at
once and in any order; every token costs what it costs in the best batch; replicas start at once and come in fractions;
and the future is known. Of the fleet, `gpu_limits` and the pools' least numbers of replicas hold.

Sets and parameters
    s           slots of time, h_s seconds long; p pools, k the kinds of replica (model and peak rates)
    c           classes of requests: of one model, that arrive in one slot and are due by the end of one other; a
                request is in one class for its prompt, due with its first token, and in one for its other tokens
    e           resources of a replica: seconds of computing, KV cache, seats
    R_cke       what the whole of c takes of e on k: tokens at the least time that any iteration needs for one, and
                contexts read; KV tokens times seconds, and seats times seconds, as each token takes one iteration, and
                no iteration is shorter than the shortest
    C_ke        what a replica of k has of e in a second: 1, its KV tokens, its seats
    m_cbe       the most that one request of bucket b of c takes of e, as a share of R_ce; n_cb requests in the bucket
    V_g         requests of a group (a tier's first tokens, or its ends) that may miss
    g_p, L_rj   GPUs of a replica; GPUs of type j in region r
Variables       x_ps replicas, at least the pool's least number; y_cske the share of c done in s on k;
                d_cb requests that miss
Minimise        sum of g_p h_s x_ps over slots after the warm-up
Subject to      sum over c of R_cke y_cske <= C_ke h_s sum over p of kind k of x_ps          for every k, s, e
                sum over s, k of y_cske + sum over b of m_cbe d_cb >= 1                      for every c, e
                d_cb <= n_cb;  sum over g of d_cb <= V_g;  sum over r, j of g_p x_ps <= L_rj
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from headway.core.errors import HeadwayError
from headway.core.fleet import Fleet, Pool
from headway.core.record import Outcome, Records
from headway.metrics.latency import DefaultSlo
from headway.perf.speculation import AnyStepModel
from headway.planning.solver import Floats, dot, minimise, new_model, reals
from headway.sim.replica_resources import kv_blocks

ALLOWED = 0.05
"""Share of requests that may miss their SLO."""
MOST_TOKENS = 2**15
"""Largest iteration, in tokens, for which step times are evaluated. For an engine with larger iterations, each further
doubling is evaluated once."""
SLACK = 0.9
"""Factor on the least time of a token, because iterations between two doublings are not evaluated."""
BUCKETS = 6
"""Number of size classes of the requests: only large requests are worth leaving late."""
SAFE = 1.0 - 1e-6
"""Factor on the solver's result, so that its tolerance cannot raise the bound."""
TIME_LIMIT_S = 60.0
RESOURCES = 3
Mask = npt.NDArray[np.bool_]
Group = tuple[str, int]
"""("first" or "done", tier)."""


class PeakRates(Struct, frozen=True):
    """The least cost of work on one replica."""

    token_s: float
    """Seconds of one token, prompt or output, in the best batch."""
    context_s: float
    """Seconds of each KV token that a decoding request reads."""
    tick_s: float
    """The shortest iteration."""
    kv_tokens: float
    """KV capacity; inf means unbounded, because requests share prefixes."""
    seats: float


class FluidPool(Struct, frozen=True):
    model: str
    region: str
    gpu: str
    gpus: int
    least: float
    peak: PeakRates


@dataclass(frozen=True)
class DueWork:
    """One model's requests, one element each. A time of `inf` means nothing is due."""

    arrival_s: Floats
    first_by_s: Floats
    """Time at which the first token is due, at most `done_by_s`."""
    done_by_s: Floats
    prompt_tokens: Floats
    output_tokens: Floats
    first_group: npt.NDArray[np.int64]
    """Tier of the first token, if some first tokens of that tier may be late; -1 if the request's own first token must
    be in time."""
    done_group: npt.NDArray[np.int64]
    """Tier of the request's end, if some ends of that tier may be late; -1 if the request's own end must be in time."""

    @property
    def dues(self) -> tuple[tuple[str, Floats, npt.NDArray[np.int64]], ...]:
        """Returns, for each due event, its name, time and group."""
        return ("first", self.first_by_s, self.first_group), ("done", self.done_by_s, self.done_group)


class PaidSpan(Struct, frozen=True):
    """The paid time, and the number of slots."""

    from_s: float
    to_s: float
    num_slots: int = 48


def gpu_hours_bound(
    fleet: Fleet,
    records: Records,
    steps: Callable[[Pool], AnyStepModel],
    *,
    warmup_s: float = 0.0,
    slo: DefaultSlo | None = None,
    to_the_end: bool = True,
) -> float | None:
    """A lower bound on the GPU-hours from `warmup_s` to the end of a run, for all plans of the same fleet and trace.

    Only the trace and the end of the run are read from the records: the bound holds for every run that ends then and
    serves the trace in time, as defined above. `to_the_end`: the run lasts until everything is done, because no
    `until_s` stops it. Takes seconds. None for combos, whose work is divided. Raises HeadwayError if no plan serves the
    trace in time, or without highspy.
    """
    if fleet.combos or not fleet.pools:
        return None
    trace = _Trace(records, slo or DefaultSlo(), warmup_s, to_the_end)
    models = dict.fromkeys(pool.model.name for pool in fleet.pools)
    works = {model: trace.work(trace.servable(fleet, model)) for model in models}
    limits: dict[tuple[str, str], float] = {}
    for region, gpu, count in fleet.gpu_limits:
        here = [pool for pool in fleet.pools if (pool.region, pool.gpu.name) == (region, gpu)]
        limits[region, gpu] = float(max(count, sum(pool.replicas * pool.parallel.num_gpus for pool in here)))
    pools = _fluid_pools(fleet.pools, steps, records)
    return least_gpu_hours(works, pools, limits, PaidSpan(warmup_s, records.end_s), ALLOWED)


def serves(
    fleet: Fleet,
    records: Records,
    *,
    warmup_s: float = 0.0,
    slo: DefaultSlo | None = None,
    to_the_end: bool = True,
) -> bool:
    """Whether a run serves its trace in time, as defined above."""
    trace = _Trace(records, slo or DefaultSlo(), warmup_s, to_the_end)
    first_s, done_s = (np.full(len(trace.arrival_s), inf) for _ in range(2))
    ended = records.requests
    finished = ended["outcome"] == Outcome.FINISHED
    first_s[ended["request"]] = np.where(np.isnan(ended["first_token_s"]), inf, ended["first_token_s"])
    done_s[ended["request"][finished]] = ended["end_s"][finished]
    held = np.zeros(len(first_s), dtype=np.bool_)
    for model in {pool.model.name for pool in fleet.pools}:
        held |= trace.servable(fleet, model)
    for tier in np.unique(trace.group[held]):
        for at_s, by_s in ((first_s, trace.first_by_s), (done_s, trace.done_by_s)):
            due = held & (trace.group == tier) & np.isfinite(by_s)
            if (at_s[due] > by_s[due]).sum() > (0.0 if tier < 0 else ALLOWED * due.sum()):
                return False
    return True


def _fluid_pools(pools: Sequence[Pool], steps: Callable[[Pool], AnyStepModel], records: Records) -> list[FluidPool]:
    longest = int(records.workload["prompt_tokens"].max(initial=1))
    peaks: dict[str, PeakRates] = {}
    fluid = []
    for pool in pools:
        key = repr(structs.replace(pool, name="", region="", replicas=1, min_replicas=1, max_replicas=None))
        if key not in peaks:
            shares_prefixes = pool.engine.prefix_caching and records.prefixes is not None
            peaks[key] = _peak_rates(pool, steps(pool), longest, shares_prefixes)
        least = float(min(pool.min_replicas, pool.replicas))
        fluid.append(FluidPool(pool.model.name, pool.region, pool.gpu.name, pool.parallel.num_gpus, least, peaks[key]))
    return fluid


def _peak_rates(pool: Pool, step: AnyStepModel, longest_tokens: int, shares_prefixes: bool) -> PeakRates:
    engine, ranks = pool.engine, pool.parallel.dp
    most = max(engine.max_num_batched_tokens, longest_tokens, engine.max_num_seqs) + engine.max_num_seqs
    least_s = np.array([step.least_s(num) for num in range(1, min(most, MOST_TOKENS) + 1)])
    token_s = float((least_s / np.arange(1, len(least_s) + 1)).min())
    size = 2 * MOST_TOKENS
    while size < 2 * most:
        token_s = min(token_s, SLACK * step.least_s(size) / size)
        size *= 2
    num = max(engine.max_num_seqs, ranks * pool.parallel.pp)
    context_s = (step.line(num, 1000 * num)[0] - step.line(num, 0)[0]) / (1000 * num)
    if engine.drafts is not None:
        context_s /= engine.drafts.most_tokens
    kv_tokens = inf if shares_prefixes else float(kv_blocks(pool) * engine.block_size_tokens)
    return PeakRates(token_s / ranks, max(context_s, 0.0), float(least_s.min()), kv_tokens, float(engine.max_num_seqs))


class _Trace:
    """A trace: the due times of its requests, and the group of each request that may miss its SLO: its tier, or -1."""

    def __init__(self, records: Records, slo: DefaultSlo, warmup_s: float, to_the_end: bool) -> None:
        self.records = records
        table, end_s = records.workload, records.end_s
        self.arrival_s = np.asarray(table["arrival_s"], "f8")
        self.prompt, self.output = (np.asarray(table[name], "f8") for name in ("prompt_tokens", "output_tokens"))
        first_by_s = self.arrival_s + self._column("slo_ttft_s", slo.ttft_s)
        end_by_s = self.arrival_s + self._column("slo_e2e_s", slo.e2e_s)
        deadline_s = self._column("deadline_s", None)
        in_run = first_by_s <= end_s
        done_by_s = np.minimum(np.where(in_run & (end_by_s == inf), end_s, end_by_s), deadline_s)
        done_by_s[done_by_s > end_s] = end_s if to_the_end else inf
        counted = in_run & (self.arrival_s >= warmup_s)
        self.done_by_s = done_by_s
        self.first_by_s = np.minimum(np.where(counted, first_by_s, inf), done_by_s)
        tier = np.asarray(table["tier"], "i8") if "tier" in table else np.zeros(len(self.arrival_s), "i8")
        self.group = np.where(np.isfinite(first_by_s) & (deadline_s == inf), tier, -1)
        self._stays = self._column("timeout_s", None) == inf

    def _column(self, name: str, default: float | None) -> Floats:
        """A column of the workload. NaN and missing values become `default`, or inf without one."""
        column = self.records.workload.get(name)
        values = np.full(len(self.arrival_s), np.nan) if column is None else np.asarray(column, "f8")
        return np.asarray(np.where(np.isnan(values), inf if default is None else default, values))

    def servable(self, fleet: Fleet, model: str) -> Mask:
        """Requests for a model, by any of its names, that fit into a replica and that no client cancels."""
        pools = [pool for pool in fleet.pools if pool.model.name == model]
        held = self.prompt + self.output <= max(_longest_tokens(pool) for pool in pools)
        code = self.records.workload.get("model")
        if code is None or len(pools) == len(fleet.pools):
            return np.asarray(held & self._stays)
        ours = [i for i, name in enumerate(self.records.models) if name in pools[0].model.names]
        return np.asarray(np.isin(code, ours) & held & self._stays)

    def work(self, rows: Mask) -> DueWork:
        """Some of the requests. With shared prefixes, a prompt counts as one token, because any request may compute
        it."""
        tokens = self.prompt if self.records.prefixes is None else np.ones_like(self.prompt)
        return DueWork(
            self.arrival_s[rows],
            self.first_by_s[rows],
            self.done_by_s[rows],
            tokens[rows],
            self.output[rows],
            self.group[rows],
            self.group[rows],
        )


def _longest_tokens(pool: Pool) -> int:
    blocks = kv_blocks(pool)
    held = (blocks - int(pool.engine.watermark * blocks)) * pool.engine.block_size_tokens + 1
    return min(held, pool.model.max_context_tokens)


@dataclass(frozen=True)
class _RequestClass:
    """The slots in which a class may be done, R_cke (kinds by resources), and the resource needs of its largest
    requests."""

    model: str
    slots: range
    needs: Floats
    group: Group | None
    counts: Floats
    """n_cb by bucket."""
    most: Floats
    """m_cbe: buckets by resources."""


def least_gpu_hours(
    works: Mapping[str, DueWork],
    pools: Sequence[FluidPool],
    limits: Mapping[tuple[str, str], float],
    span: PaidSpan,
    allowed: float,
) -> float:
    """The optimum of the program: GPU-hours from `span.from_s` to `span.to_s`.

    `allowed`: share of each group that may be late. `limits`: GPUs by region and type. Raises HeadwayError if the
    program is infeasible, or without highspy.
    """
    edges = np.unique(np.concatenate([np.linspace(0.0, span.to_s, span.num_slots + 1), [span.from_s]]))
    kinds = list(dict.fromkeys((pool.model, pool.peak) for pool in pools))
    classes = [each for model, work in works.items() for each in _classes(model, work, edges, kinds)]
    return _solve(edges, pools, kinds, classes, limits, span.from_s, _allowed_misses(works, allowed))


def _allowed_misses(works: Mapping[str, DueWork], allowed: float) -> dict[Group, float]:
    """Requests of each group that may miss their SLO: V_g in the program."""
    misses: dict[Group, float] = {}
    for work in works.values():
        for what, due_s, group in work.dues:
            for tier in np.unique(group[group >= 0]):
                num = float((np.isfinite(due_s) & (group == tier)).sum())
                misses[what, int(tier)] = misses.get((what, int(tier)), 0.0) + allowed * num
    return misses


def _classes(
    model: str, work: DueWork, edges: Floats, kinds: Sequence[tuple[str, PeakRates]]
) -> Iterator[_RequestClass]:
    """Classes of a model's requests: by due event (first token or end), slot of arrival, and slot of the due time."""
    last = len(edges) - 2
    arrived = np.clip(np.searchsorted(edges, work.arrival_s, "right") - 1, 0, last)
    for what, due_s, group in work.dues:
        due = np.clip(np.searchsorted(edges, np.where(np.isfinite(due_s), due_s, 0.0), "left") - 1, arrived, last)
        code = (arrived * (last + 1) + due) * 1024 + group + 1
        code[~np.isfinite(due_s)] = -1
        order = np.argsort(code, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(code[order])) + 1):
            if not len(rows) or code[rows[0]] < 0:
                continue
            sizes = np.stack(
                [
                    _sizes(what, work, rows, peak) if name == model else np.zeros((len(rows), RESOURCES))
                    for name, peak in kinds
                ]
            )
            if not sizes.any():
                continue
            tier = int(group[rows[0]])
            counts, most = _buckets(sizes)
            yield _RequestClass(
                model,
                range(int(arrived[rows[0]]), int(due[rows[0]]) + 1),
                sizes.sum(axis=1),
                None if tier < 0 else (what, tier),
                counts,
                most,
            )


def _sizes(what: str, work: DueWork, rows: npt.NDArray[np.intp], peak: PeakRates) -> Floats:
    """The requests' needs by resource: seconds of computing, KV token-seconds, seat-seconds."""
    prompt = work.prompt_tokens[rows]
    sizes = np.zeros((len(rows), RESOURCES))
    if what == "first":
        sizes[:, 0] = prompt * peak.token_s
        return sizes
    ticks = np.maximum(work.output_tokens[rows] - 1, 0.0)
    contexts = ticks * (prompt + np.maximum(ticks - 1, 0.0) / 2)
    sizes[:, 0] = ticks * peak.token_s + contexts * peak.context_s
    sizes[:, 1] = contexts * peak.tick_s if peak.kv_tokens < inf else 0.0
    sizes[:, 2] = ticks * peak.tick_s
    return sizes


def _buckets(sizes: Floats) -> tuple[Floats, Floats]:
    """For each bucket, its number of requests, and the largest share of the class that one of its requests takes of
    each resource."""
    total = sizes.sum(axis=1, keepdims=True)
    shares = np.divide(sizes, total, out=np.zeros_like(sizes), where=total > 0).max(axis=0)
    buckets = np.array_split(np.argsort(shares.max(axis=1), kind="stable"), min(BUCKETS, len(shares)))
    return np.array([float(len(rows)) for rows in buckets]), np.array([shares[rows].max(axis=0) for rows in buckets])


def _solve(
    edges: Floats,
    pools: Sequence[FluidPool],
    kinds: Sequence[tuple[str, PeakRates]],
    classes: Sequence[_RequestClass],
    limits: Mapping[tuple[str, str], float],
    paid_from_s: float,
    misses: Mapping[Group, float],
) -> float:
    """The linear program, with the letters of the module docstring."""
    model, h = new_model(), np.diff(edges)
    x = [reals(model, np.full(len(h), inf)) for _ in pools]
    has = [(1.0, peak.kv_tokens, peak.seats) for _, peak in kinds]
    used: dict[tuple[int, int, int], list[tuple[float, Any]]] = {
        (k, s, e): [] for k in range(len(kinds)) for e in range(RESOURCES) for s in range(len(h)) if has[k][e] < inf
    }
    late: dict[Group, list[Any]] = {}
    done: list[list[tuple[float, Any]]] = []
    for each in classes:
        d = [] if each.group is None else list(reals(model, each.counts))
        if each.group is not None:
            late.setdefault(each.group, []).extend(d)
        own = [k for k, (name, _) in enumerate(kinds) if name == each.model]
        for e in range(RESOURCES):
            if not all(each.needs[k, e] > 0 and has[k][e] < inf for k in own):
                continue  # some kind has no cost for this resource
            y = reals(model, np.ones(len(own) * len(each.slots)))
            for (k, s), variable in zip(((k, s) for k in own for s in each.slots), y, strict=True):
                used[k, s, e].append((float(each.needs[k, e]), variable))
            done.append([*((1.0, variable) for variable in y), *zip(each.most[:, e].tolist(), d, strict=False)])
    for (k, s, e), terms in used.items():
        of_kind = [
            (-has[k][e] * float(h[s]), x[p][s]) for p, pool in enumerate(pools) if (pool.model, pool.peak) == kinds[k]
        ]
        model.addConstr(dot(*zip(*of_kind, *terms, strict=True)) <= 0.0)
    for terms in done:
        model.addConstr(dot(*zip(*terms, strict=True)) >= 1.0)
    for group, variables in late.items():
        model.addConstr(dot(np.ones(len(variables)), variables) <= misses[group])
    _limit(model, x, pools, limits)
    paid = (edges[:-1] >= paid_from_s) * h / 3600
    gpu_hours = np.concatenate([pool.gpus * paid for pool in pools])
    return _least(model, gpu_hours, [variable for replicas in x for variable in replicas])


def _limit(
    model: Any, x: Sequence[Sequence[Any]], pools: Sequence[FluidPool], limits: Mapping[tuple[str, str], float]
) -> None:
    """Limit, in each slot, the replicas of each pool from below, and the GPUs of each region and type from above."""
    for s in range(len(x[0])):
        for p, pool in enumerate(pools):
            if pool.least > 0:
                model.addConstr(x[p][s] >= pool.least)
        for (region, gpu), count in limits.items():
            here = [p for p, pool in enumerate(pools) if (pool.region, pool.gpu) == (region, gpu)]
            if here:
                model.addConstr(dot([pools[p].gpus for p in here], [x[p][s] for p in here]) <= count)


def _least(model: Any, gpu_hours: Floats, replicas: Sequence[Any]) -> float:
    """The program's value, a little lower than the solver's. Raises HeadwayError where there is none."""
    solution = minimise(model, dot(gpu_hours, replicas), TIME_LIMIT_S)
    if solution.status == "infeasible":
        raise HeadwayError("no plan serves this trace in time: GPU limits or max_replicas leave too little")
    if solution.status != "optimal":
        raise HeadwayError(f"the bound was not found within {TIME_LIMIT_S:g} s")
    # over all variables, because the order of summation changes the last bit
    gpu_hours = np.pad(gpu_hours, (0, len(solution.values) - len(gpu_hours)))
    return max(float(gpu_hours @ np.array(solution.values)) * SAFE, 0.0)
