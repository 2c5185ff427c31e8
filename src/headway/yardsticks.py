"""What a scaler's result is measured by: GPU-hours that no plan could go below for the same trace and fleet.

A plan serves a trace in time, here, if

- of each tier's requests that have a promise of a first token, all but `ALLOWED` (SageServe's SLA is a 95th percentile)
  get theirs in time, of those that arrive after the warm-up and whose time is up before the run ends;
- of the same, all but `ALLOWED` are finished in time, where an end is promised, else by the end of the run;
- requests with a deadline that lies in the run are finished by then; where the run goes on until everything is done,
  all requests are finished by its end.

Requests that no replica can hold, or whose clients may give up, are left out. Of an instance the bound assumes the most
that its step-time model could ever give: every token at the cost of the best batch, the shortest iterations, no
waiting, no start-up; of the fleet, `gpu_limits`, and the least that pools are kept at. See `planner.fluid`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np
import numpy.typing as npt
from msgspec import structs

from headway.core.fleet import Fleet, Model, Pool
from headway.core.record import Records
from headway.metrics.latency import Slo
from headway.perf.step import StepModel
from headway.planner.fluid import Best, Place, Span, Work, least_gpu_hours
from headway.sim.makeup import kv_blocks

ALLOWED = 0.05
"""Share of requests that may miss their promise."""
MOST_TOKENS = 2**15
"""In one iteration. Where an engine has more, every further doubling is looked at once."""
SLACK = 0.9
"""For what lies between doublings."""
Mask = npt.NDArray[np.bool_]


def gpu_hours_bound(
    fleet: Fleet,
    records: Records,
    steps: Callable[[Pool], StepModel],
    *,
    warmup_s: float = 0.0,
    slo: Slo | None = None,
    to_the_end: bool = True,
    allowed: float = ALLOWED,
) -> float | None:
    """GPU-hours from `warmup_s` to the end of a run that no plan for the same fleet and trace goes below.

    Of the records only the trace and its end are looked at: the bound holds for every run that ends then and serves the
    trace in time, as this module says. `to_the_end`: the run goes on until everything is done, which is so where no
    `until_s` stops it. Takes seconds. None for combos, whose work is divided. HeadwayError where no plan serves the
    trace in time, or without SciPy.
    """
    if fleet.combos or not fleet.pools:
        return None
    pools = [pool for pool in fleet.pools if pool.replicas or pool.max_replicas is None or pool.max_replicas > 0]
    table = _Table(records, slo or Slo(), warmup_s, to_the_end)
    works = {}
    for model in {pool.model.name: pool.model for pool in pools}.values():
        own = [pool for pool in pools if pool.model.name == model.name]
        works[model.name] = table.work(model, own, alone=len({pool.model.name for pool in pools}) == 1)
    places = _places(pools, steps, records)
    limits: dict[tuple[str, str], float] = {}
    for region, gpu, count in fleet.gpu_limits:
        here = [pool for pool in pools if (pool.region, pool.gpu.name) == (region, gpu)]
        limits[region, gpu] = float(max(count, sum(pool.replicas * pool.parallel.num_gpus for pool in here)))
    return least_gpu_hours(works, places, limits, Span(warmup_s, records.end_s), allowed)


def _places(pools: list[Pool], steps: Callable[[Pool], StepModel], records: Records) -> list[Place]:
    longest = int(records.workload["prompt_tokens"].max(initial=1))
    known: dict[str, Best] = {}
    found = []
    for pool in pools:
        key = repr(structs.replace(pool, name="", region="", replicas=1, min_replicas=1, max_replicas=None))
        if key not in known:
            known[key] = best_of(pool, steps(pool), longest, shares=_shares(pool, records))
        least = float(min(pool.min_replicas, pool.replicas))
        found.append(Place(pool.model.name, pool.region, pool.gpu.name, pool.parallel.num_gpus, least, known[key]))
    return found


def _shares(pool: Pool, records: Records) -> bool:
    """Requests may hold the same KV cache, computed once."""
    return pool.engine.prefix_caching and records.prefixes is not None


def best_of(pool: Pool, step: StepModel, longest_tokens: int, shares: bool) -> Best:
    """What a replica does at its best: every size of a batch is looked at."""
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
    kv_tokens = inf if shares else float(kv_blocks(pool) * engine.block_size_tokens)
    return Best(token_s / ranks, max(context_s, 0.0), float(least_s.min()), kv_tokens, float(engine.max_num_seqs))


class _Table:
    """A trace, and what is promised to whom."""

    def __init__(self, records: Records, slo: Slo, warmup_s: float, to_the_end: bool) -> None:
        self.records, self.warmup_s, self.to_the_end = records, warmup_s, to_the_end
        table, self.end_s = records.workload, records.end_s
        self.arrival_s = np.asarray(table["arrival_s"], "f8")
        self.prompt, self.output = (np.asarray(table[name], "f8") for name in ("prompt_tokens", "output_tokens"))
        self.tier = np.asarray(table["tier"], "i8") if "tier" in table else np.zeros(len(self.arrival_s), "i8")
        self.first_by_s = self.arrival_s + self._column("slo_ttft_s", slo.ttft_s)
        self.end_by_s = self.arrival_s + self._column("slo_e2e_s", slo.e2e_s)
        self.deadline_s = self._column("deadline_s", None)
        self.leaves = self._column("timeout_s", None) < inf

    def _column(self, name: str, otherwise: float | None) -> npt.NDArray[np.float64]:
        """NaN, and what is absent, is `otherwise`; nothing is `inf`."""
        said = self.records.workload.get(name)
        values = np.full(len(self.arrival_s), np.nan) if said is None else np.asarray(said, "f8")
        return np.where(np.isnan(values), inf if otherwise is None else otherwise, values)

    def work(self, model: Model, pools: list[Pool], alone: bool) -> Work:
        """Of one model: everything, if it is the only one."""
        rows = self._asked(model, alone) & ~self.leaves
        rows &= self.prompt + self.output <= max(_longest_tokens(pool) for pool in pools)
        promised = np.isfinite(self.first_by_s)
        in_run = promised & (self.first_by_s <= self.end_s)
        counted = in_run & (self.arrival_s >= self.warmup_s)
        done_by_s = np.where(in_run & (self.end_by_s == inf), self.end_s, self.end_by_s)
        done_by_s = np.minimum(done_by_s, self.deadline_s)
        late = done_by_s > self.end_s
        done_by_s[late] = self.end_s if self.to_the_end else inf
        first_by_s = np.minimum(np.where(counted, self.first_by_s, inf), done_by_s)
        may_miss = promised & (self.deadline_s == inf)
        tokens = np.ones_like(self.prompt) if any(_shares(pool, self.records) for pool in pools) else self.prompt
        return Work(
            self.arrival_s[rows], first_by_s[rows], done_by_s[rows], tokens[rows], self.output[rows],
            np.where(may_miss, self.tier, -1)[rows], np.where(may_miss, self.tier, -1)[rows],
        )  # fmt: skip

    def _asked(self, model: Model, alone: bool) -> Mask:
        """Requests for a model, by any of its names."""
        code = self.records.workload.get("model")
        if alone or code is None:
            return np.ones(len(self.arrival_s), dtype=np.bool_)
        names = (model.name, model.hf_id, *model.aliases)
        return np.isin(code, [i for i, name in enumerate(self.records.models) if name in names])


def _longest_tokens(pool: Pool) -> int:
    """Of a request that a replica can hold."""
    blocks = kv_blocks(pool)
    held = (blocks - int(pool.engine.watermark * blocks)) * pool.engine.block_size_tokens + 1
    return min(held, pool.model.max_context_tokens)
