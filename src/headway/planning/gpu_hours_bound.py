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

from headway.core.fleet import Fleet, Pool
from headway.core.record import Outcome, Records
from headway.metrics.latency import DefaultSlo
from headway.perf.step import StepModel
from headway.planning.fluid_bound import Best, Place, Span, Work, least_gpu_hours
from headway.sim.replica_resources import kv_blocks

ALLOWED = 0.05
"""Share of requests that may miss their promise."""
MOST_TOKENS = 2**15
"""In one iteration. Where an engine has more, every further doubling is looked at once."""
SLACK = 0.9
"""For what lies between doublings."""
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def gpu_hours_bound(
    fleet: Fleet,
    records: Records,
    steps: Callable[[Pool], StepModel],
    *,
    warmup_s: float = 0.0,
    slo: DefaultSlo | None = None,
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
    pools = list(fleet.pools)
    table = _Table(records, slo or DefaultSlo(), warmup_s, to_the_end)
    works = {model: table.work(table.asked(fleet, model)) for model in dict.fromkeys(p.model.name for p in pools)}
    places = _places(pools, steps, records)
    limits: dict[tuple[str, str], float] = {}
    for region, gpu, count in fleet.gpu_limits:
        here = [pool for pool in pools if (pool.region, pool.gpu.name) == (region, gpu)]
        limits[region, gpu] = float(max(count, sum(pool.replicas * pool.parallel.num_gpus for pool in here)))
    return least_gpu_hours(works, places, limits, Span(warmup_s, records.end_s), allowed)


def serves(
    fleet: Fleet,
    records: Records,
    *,
    warmup_s: float = 0.0,
    slo: DefaultSlo | None = None,
    to_the_end: bool = True,
    allowed: float = ALLOWED,
) -> bool:
    """Whether a run serves its trace in time, as this module says."""
    table = _Table(records, slo or DefaultSlo(), warmup_s, to_the_end)
    first_s, done_s = (np.full(len(table.arrival_s), inf) for _ in range(2))
    ended = records.requests
    finished = ended["outcome"] == Outcome.FINISHED
    first_s[ended["request"]] = np.where(np.isnan(ended["first_token_s"]), inf, ended["first_token_s"])
    done_s[ended["request"][finished]] = ended["end_s"][finished]
    held = np.zeros(len(first_s), dtype=np.bool_)
    for model in {pool.model.name for pool in fleet.pools}:
        held |= table.asked(fleet, model)
    for tier in np.unique(table.group[held]):
        for at_s, by_s in ((first_s, table.first_by_s), (done_s, table.done_by_s)):
            due = held & (table.group == tier) & np.isfinite(by_s)
            if (at_s[due] > by_s[due]).sum() > (0.0 if tier < 0 else allowed * due.sum()):
                return False
    return True


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
    """A trace, what is due when, and with whom it may be late: -1, with nobody."""

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

    def _column(self, name: str, otherwise: float | None) -> Floats:
        """NaN, and what is absent, is `otherwise`; nothing is `inf`."""
        said = self.records.workload.get(name)
        values = np.full(len(self.arrival_s), np.nan) if said is None else np.asarray(said, "f8")
        return np.asarray(np.where(np.isnan(values), inf if otherwise is None else otherwise, values))

    def asked(self, fleet: Fleet, model: str) -> Mask:
        """Requests for a model, by any of its names, that a replica can hold and nobody gives up."""
        pools = [pool for pool in fleet.pools if pool.model.name == model]
        held = self.prompt + self.output <= max(_longest_tokens(pool) for pool in pools)
        code = self.records.workload.get("model")
        if code is None or len(pools) == len(fleet.pools):
            return np.asarray(held & self._stays)
        ours = [i for i, name in enumerate(self.records.models) if name in pools[0].model.names]
        return np.asarray(np.isin(code, ours) & held & self._stays)

    def work(self, rows: Mask) -> Work:
        """Some of the requests. Of shared prefixes, nobody knows who computes them: a prompt is one token then."""
        tokens = self.prompt if self.records.prefixes is None else np.ones_like(self.prompt)
        return Work(
            self.arrival_s[rows], self.first_by_s[rows], self.done_by_s[rows], tokens[rows], self.output[rows],
            self.group[rows], self.group[rows],
        )  # fmt: skip


def _longest_tokens(pool: Pool) -> int:
    """Of a request that a replica can hold."""
    blocks = kv_blocks(pool)
    held = (blocks - int(pool.engine.watermark * blocks)) * pool.engine.block_size_tokens + 1
    return min(held, pool.model.max_context_tokens)
