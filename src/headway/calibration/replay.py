"""Simulates a measured experiment with its fleet and load, and returns the simulated latencies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from headway import catalog
from headway.calibration.serving import TOKEN_ID_S, ServingExperiment
from headway.catalog.coefficients import Coefficients
from headway.control.policies import Policies
from headway.core.fleet import Engine, Fleet, Parallel, Pool
from headway.core.record import Outcome
from headway.metrics.usage import fullest, usage
from headway.perf.speculation import step_model
from headway.policies.resolve import ordering, router
from headway.sim.cluster import simulate
from headway.sim.replica_resources import Line
from headway.workload.random_streams import stream
from headway.workload.sources import ClosedLoop, RequestSource, TraceSource
from headway.workload.table import Prefix, Workload

Floats = npt.NDArray[np.float64]
BLOCK_TOKENS = 16
"""Block size of engines whose file gives none."""
FIRST = 100
"""Number of requests that count as the start of a run. Their prompts are not cached yet."""


class SimulatedLatencies(Struct, frozen=True):
    """Simulated latencies, one value per request, in milliseconds."""

    e2e_ms: Floats
    ttft_ms: Floats
    tpot_ms: Floats
    """Time per token after the first; NaN for outputs of one token."""
    gaps: Floats | None = None
    """Output tokens after the first; None if all requests have equally many."""

    @property
    def itl_mean_ms(self) -> float:
        """Mean time between tokens, over tokens; NaN without any."""
        if self.gaps is None:
            return float(self.tpot_ms.mean())
        total = float(self.gaps.sum())
        return float((self.e2e_ms - self.ttft_ms).sum()) / total if total else math.nan


class ReplayResult(Struct, frozen=True):
    overall: SimulatedLatencies
    stages: tuple[SimulatedLatencies, ...]
    num_unfinished: int
    warm: SimulatedLatencies | None = None
    """Latencies without the first `FIRST` requests, whose prompts are not cached yet; None if there are no others."""
    fullness: float = 0.0
    """Fullness of the fullest replica, mean over seeds (`metrics.usage.fullest`)."""
    waiting_share: float = 0.0
    """Share of the requests' time before they are admitted to a batch."""


def fleet(experiment: ServingExperiment, profile: Engine | None = None) -> Fleet:
    """One pool of `dp` replicas, with the catalog's engine unless another profile is given."""
    pool = Pool(
        name="measured",
        model=experiment.model,
        gpu=experiment.gpu,
        engine=engine(experiment, profile),
        parallel=Parallel(experiment.tp, experiment.pp, experiment.ep),
        replicas=experiment.dp,
        kv_capacity_tokens=experiment.kv_capacity_tokens,
    )
    return Fleet((pool,))


def engine(experiment: ServingExperiment, profile: Engine | None = None) -> Engine:
    if profile is None and experiment.profile is not None:
        return experiment.profile
    profile = profile or catalog.engine(experiment.engine, experiment.engine_version)
    utilization = experiment.gpu_memory_utilization
    return replace(
        profile,
        version=experiment.engine_version or profile.version,
        max_num_seqs=experiment.max_num_seqs,
        max_num_batched_tokens=experiment.max_num_batched_tokens,
        block_size_tokens=BLOCK_TOKENS if experiment.profile is None else experiment.profile.block_size_tokens,
        gpu_memory_utilization=profile.gpu_memory_utilization if utilization is None else utilization,
        prefix_caching=experiment.prefix_caching,
        kv_offload_bytes=experiment.kv_offload_bytes if experiment.prefix_caching else 0.0,
    )


def workload(experiment: ServingExperiment, seed: int) -> Workload:
    """The requests of the experiment's file, if it has them; the seed then does not matter.

    Otherwise Poisson arrivals, stage after stage, that cycle through the prompts in shuffled order, or have a new
    prompt each. Prompts form groups that share a system prompt. Lengths are constant.
    """
    if experiment.load is not None:
        return experiment.load.workload
    rng = stream(seed, f"replay/{experiment.id}")
    parts, start_s = [], 0.0
    for stage in experiment.stages:
        count = max(1, round(stage.rate_rps * stage.duration_s))
        parts.append(start_s + np.sort(rng.uniform(0.0, stage.duration_s, count)))
        start_s += stage.duration_s
    arrival_s = np.concatenate(parts)
    num = len(arrival_s)
    columns = {
        "arrival_s": arrival_s,
        "prompt_tokens": np.full(num, experiment.sys_prompt_tokens + experiment.question_tokens),
        "output_tokens": np.full(num, experiment.output_tokens),
    }
    groups, each = experiment.prompt_groups, experiment.prompts_per_group or -(-num // experiment.prompt_groups)
    prompts = rng.permutation(groups * each)[np.arange(num) % (groups * each)]
    return Workload(columns, prefix=_prefix(experiment, prompts, prompts // each))


def _prefix(experiment: ServingExperiment, prompt: npt.NDArray[np.int64], group: npt.NDArray[np.int64]) -> Prefix:
    lengths = [experiment.sys_prompt_tokens, experiment.question_tokens]
    ids = np.stack([group, experiment.prompt_groups + prompt], axis=1)
    present = [i for i, length in enumerate(lengths) if length]
    offsets = np.arange(len(prompt) + 1, dtype="i8") * len(present)
    tokens = np.tile(np.array([lengths[i] for i in present], "i4"), len(prompt))
    return Prefix(offsets, ids[:, present].ravel().astype("i8"), tokens)


def replay(
    experiment: ServingExperiment,
    seeds: Sequence[int],
    profile: Engine | None = None,
    coefficients: Coefficients | None = None,
) -> ReplayResult:
    """Simulate the experiment once for each seed.

    `profile` and `coefficients` replace the catalog's engine and step times.
    """
    pool = fleet(experiment, profile).pools[0]
    ran = pool.engine if coefficients is None else coefficients.overhead.on(pool.engine)
    if experiment.sends_token_ids:
        ran = replace(ran, tokenize_s_per_token=min(ran.tokenize_s_per_token, TOKEN_ID_S))
    pools = Fleet((replace(pool, engine=ran),))
    bounds = np.cumsum([0.0] + [stage.duration_s for stage in experiment.stages])
    bounds[-1] = math.inf
    seeds = seeds if experiment.load is None else seeds[:1]
    line: Callable[[Pool], Line] | None = None
    if coefficients is not None:
        line = lambda pool: step_model(pool.model, pool.gpu, pool.engine, pool.parallel, coefficients).line  # noqa: E731
    parts: list[tuple[Floats, Floats, Floats, Floats, Floats, Floats]] = []
    unfinished, full = 0, []
    for seed in seeds:
        table = workload(experiment, seed)
        policies = Policies(router("least-loaded"), ordering("fcfs"))
        source = _source(experiment, table)
        records = simulate(pools, source, policies, seed=seed, line=line)
        full.append(fullest(usage(records, 0.0), records.replicas))
        requests, table = records.requests, source.table()
        done = requests["outcome"] == Outcome.FINISHED
        unfinished += int(np.count_nonzero(~done))
        numbers = requests["request"][done].astype("i8")
        arrival_s = table.arrival_s[numbers]
        ttft_s, e2e_s = (requests[name][done] - arrival_s for name in ("first_token_s", "end_s"))
        gaps = table.output_tokens[numbers] - 1.0
        ttft_ms, e2e_ms = np.asarray(ttft_s, "f8") * 1e3, np.asarray(e2e_s, "f8") * 1e3
        waited_ms = np.asarray(requests["admitted_s"][done] - arrival_s, "f8") * 1e3
        parts.append((arrival_s, ttft_ms, e2e_ms, gaps, numbers.astype("f8"), waited_ms))
    arrival_s, ttft_ms, e2e_ms, gaps, number, waited_ms = map(np.concatenate, zip(*parts, strict=True))
    overall = _latencies(experiment, ttft_ms, e2e_ms, gaps)
    masks = [(arrival_s >= low) & (arrival_s < high) for low, high in pairwise(bounds)]
    stages = tuple(_latencies(experiment, ttft_ms[m], e2e_ms[m], gaps[m]) for m in masks)
    late = number >= FIRST
    waiting = float(waited_ms.sum() / e2e_ms.sum()) if len(e2e_ms) else 0.0
    warm = _latencies(experiment, ttft_ms[late], e2e_ms[late], gaps[late]) if late.any() else None
    return ReplayResult(overall, stages, unfinished, warm, sum(full) / len(full), waiting)


def _source(experiment: ServingExperiment, table: Workload) -> RequestSource:
    if experiment.load is None or experiment.load.concurrency is None:
        return TraceSource(table)
    return ClosedLoop(table, experiment.load.concurrency)


def _latencies(experiment: ServingExperiment, ttft_ms: Floats, e2e_ms: Floats, gaps: Floats) -> SimulatedLatencies:
    tpot_ms = np.where(gaps > 0, (e2e_ms - ttft_ms) / np.maximum(gaps, 1), np.nan)
    return SimulatedLatencies(e2e_ms, ttft_ms, tpot_ms, None if experiment.load is None else gaps)
