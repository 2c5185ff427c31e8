"""Turns a measured run on a pool into an experiment that can be replayed."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from headway.calibration.runs.run import MeasuredRun, RequestRows
from headway.calibration.serving import GivenLoad, LoadStage, MeasuredLatencies, MeasuredRequests, ServingExperiment
from headway.core.errors import HeadwayError
from headway.core.fleet import GREEDY, Pool
from headway.perf.memory import check_shape
from headway.workload.random_streams import stream
from headway.workload.table import Prefix, Workload

ROUNDING_TOKENS = 16
"""Cached lengths are rounded to blocks, so that there are few distinct ones."""
MOST_SYNTHETIC = 2_000
"""Requests that are generated for a run whose file has none."""


def measured_pool(run: MeasuredRun, pool: Pool) -> Pool:
    """One replica of the pool, with the settings that the run's file gives. Raises HeadwayError if the model does not
    fit."""
    engine, given = pool.engine, run.settings
    engine = replace(
        engine,
        max_num_seqs=given.get("max_num_seqs", engine.max_num_seqs),
        max_num_batched_tokens=max(
            given.get("max_num_batched_tokens", engine.max_num_batched_tokens),
            given.get("max_num_seqs", engine.max_num_seqs),
        ),
        prefix_caching=engine.prefix_caching or run.cached_tokens > 0,
    )
    parallel = replace(pool.parallel, tp=given.get("tp", pool.parallel.tp), pp=given.get("pp", pool.parallel.pp))
    model = replace(pool.model, sampling=GREEDY) if run.is_greedy else pool.model
    try:
        check_shape(model, parallel)
    except HeadwayError as error:
        raise HeadwayError(f"{run.where}: {error}") from None
    return replace(pool, engine=engine, parallel=parallel, model=model, replicas=1)


def experiment(run: MeasuredRun, pool: Pool) -> ServingExperiment:
    """The experiment that reproduces the run on one replica of the pool."""
    one = measured_pool(run, pool)
    latencies = {key: 1e3 * seconds for key, seconds in run.latencies_s.items()}
    measured = MeasuredLatencies(
        **{f"{key}_ms": latencies[key] for key in ("e2e_mean", "e2e_p90", "e2e_p99", "ttft_mean", "ttft_p90")},
        ttft_p99_ms=latencies["ttft_p99"],
        itl_mean_ms=latencies["itl_mean"],
        tpot_mean_ms=latencies["tpot_mean"],
    )
    is_closed = run.concurrency is not None and run.requested_rps is None
    load = GivenLoad(_workload(run), run.concurrency if is_closed else None)
    engine = one.engine
    return ServingExperiment(
        id=run.where, workload="", model=one.model, gpu=one.gpu, tp=one.parallel.tp, dp=1, engine=engine.name,
        engine_version=engine.version, max_num_batched_tokens=engine.max_num_batched_tokens,
        gpu_memory_utilization=engine.gpu_memory_utilization, kv_offload_bytes=engine.kv_offload_bytes,
        sys_prompt_tokens=0, question_tokens=max(1, round(run.prompt_tokens)),
        output_tokens=max(1, round(run.output_tokens)),
        stages=(LoadStage(run.rate_rps, len(load.workload) / run.rate_rps, measured),), measured=measured,
        pp=one.parallel.pp, ep=one.parallel.ep, max_num_seqs=engine.max_num_seqs,
        prefix_caching=engine.prefix_caching, profile=engine, load=load, kv_capacity_tokens=one.kv_capacity_tokens,
        requests=None if run.rows is None else _requests(run.rows),
    )  # fmt: skip


def _requests(rows: RequestRows) -> MeasuredRequests:
    gaps = np.where(rows.output_tokens > 1, rows.output_tokens - 1, np.nan)
    return MeasuredRequests(1e3 * rows.ttft_s, 1e3 * (rows.e2e_s - rows.ttft_s) / gaps, 1e3 * rows.e2e_s)


def _workload(run: MeasuredRun) -> Workload:
    rows = run.rows
    if rows is None:
        num = min(max(run.num_requests, 1) if run.num_requests else MOST_SYNTHETIC, MOST_SYNTHETIC)
        prompts = np.full(num, max(1, round(run.prompt_tokens)))
        outputs = np.full(num, max(1, round(run.output_tokens)))
        return Workload(
            {"arrival_s": _arrivals(run, num), "prompt_tokens": prompts, "output_tokens": outputs},
            prefix=_prefix(run, prompts, None),
        )
    prompts, outputs = np.maximum(rows.prompt_tokens.round(), 1), np.maximum(rows.output_tokens.round(), 1)
    known = not np.isnan(rows.start_s).any()
    arrival_s = rows.start_s - rows.start_s[0] if known else _arrivals(run, len(rows))
    columns = {"arrival_s": arrival_s, "prompt_tokens": prompts.astype("i4"), "output_tokens": outputs.astype("i4")}
    return Workload(columns, prefix=_prefix(run, columns["prompt_tokens"], rows))


def _arrivals(run: MeasuredRun, num: int) -> npt.NDArray[np.float64]:
    """Arrival times with the run's rate and burstiness; all at once without a rate."""
    if run.requested_rps is None:
        return np.zeros(num)
    gap_s = 1 / run.requested_rps
    if math.isinf(run.burstiness):
        return np.arange(num, dtype=np.float64) * gap_s
    gaps_s = stream(0, "runs/arrivals").gamma(run.burstiness, gap_s / run.burstiness, num)
    return np.asarray(np.cumsum(gaps_s * (gap_s / gaps_s.mean())), dtype=np.float64)


def _prefix(run: MeasuredRun, prompts: npt.NDArray[np.generic], rows: RequestRows | None) -> Prefix | None:
    """The shared part of prompts: a stated prefix in turn, otherwise a prefix as long as the cached tokens that the
    engine reported."""
    prefix_tokens = run.settings.get("prefix_tokens", 0)
    num = len(prompts)
    if prefix_tokens:
        groups = max(run.settings.get("num_prefixes", 1), 1)
        offsets = np.arange(num + 1, dtype="i8")
        return Prefix(offsets, offsets[:-1] % groups, np.minimum(prompts, prefix_tokens).astype("i4"))
    cached = np.full(num, run.cached_tokens) if rows is None else np.nan_to_num(rows.cached_tokens)
    cached = np.minimum((cached // ROUNDING_TOKENS).astype("i4") * ROUNDING_TOKENS, prompts.astype("i4"))
    steps = np.unique(cached[cached > 0])
    if not len(steps):
        return None
    reach = cached.copy()
    reach[0] = min(int(steps[-1]), int(prompts[0]))  # the first request computes the prefix that later ones find
    counts = np.searchsorted(steps, reach, "right")
    offsets = np.concatenate(([0], np.cumsum(counts))).astype("i8")
    ids = np.concatenate([np.arange(count) for count in counts]).astype("i8")
    return Prefix(offsets, ids, np.diff(steps, prepend=0).astype("i4")[ids])
