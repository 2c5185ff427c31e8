"""A measured experiment as a scenario: the fleet, the load and what the simulator says of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from headway import catalog
from headway.calibration.serving import Experiment
from headway.catalog.coefficients import Coefficients
from headway.control.policies import Policies
from headway.core.fleet import Engine, Fleet, Parallel, Pool
from headway.core.record import Outcome
from headway.perf.step import StepModel
from headway.policies.resolve import ordering, router
from headway.sim.cluster import simulate
from headway.sim.timeline import Line
from headway.workload.random_streams import stream
from headway.workload.sources import TraceSource
from headway.workload.table import Prefix, Workload

Floats = npt.NDArray[np.float64]

MAX_NUM_SEQS = 128
NUM_GROUPS = 10
PROMPTS_PER_GROUP = 10


class Latencies(Struct, frozen=True):
    """Simulated, one number a request, in milliseconds."""

    e2e_ms: Floats
    ttft_ms: Floats
    tpot_ms: Floats
    """After the first token; all NaN where outputs are of one token."""


class Replayed(Struct, frozen=True):
    """What one experiment gives in the simulator, all seeds together."""

    whole: Latencies
    stages: tuple[Latencies, ...]
    num_unfinished: int


def fleet(experiment: Experiment, profile: Engine | None = None) -> Fleet:
    """One pool of `dp` replicas, of the catalog's engine unless another profile is given."""
    pool = Pool(
        name="measured",
        model=experiment.model,
        gpu=experiment.gpu,
        engine=engine(experiment, profile),
        parallel=Parallel(tp=experiment.tp),
        replicas=experiment.dp,
    )
    return Fleet((pool,))


def engine(experiment: Experiment, profile: Engine | None = None) -> Engine:
    """The engine with the experiment's settings."""
    profile = profile or catalog.engine(experiment.engine)
    utilization = experiment.gpu_memory_utilization
    return replace(
        profile,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=experiment.max_num_batched_tokens,
        block_size_tokens=16,
        gpu_memory_utilization=profile.gpu_memory_utilization if utilization is None else utilization,
        prefix_caching=True,
        kv_offload_bytes=experiment.kv_offload_bytes,
    )


def workload(experiment: Experiment, seed: int) -> Workload:
    """Poisson arrivals, stage after stage, going round 100 prompts in a shuffled order.

    The prompts are 10 groups of 10 that share a system prompt; lengths are exact.
    """
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
    prompts = rng.permutation(NUM_GROUPS * PROMPTS_PER_GROUP)
    return Workload(columns, prefix=_prefix(experiment, prompts[np.arange(num) % len(prompts)]))


def _prefix(experiment: Experiment, prompt: npt.NDArray[np.int64]) -> Prefix:
    lengths = [experiment.sys_prompt_tokens, experiment.question_tokens]
    ids = np.stack([prompt // PROMPTS_PER_GROUP, NUM_GROUPS + prompt], axis=1)
    kept = [i for i, length in enumerate(lengths) if length]
    offsets = np.arange(len(prompt) + 1, dtype="i8") * len(kept)
    tokens = np.tile(np.array([lengths[i] for i in kept], "i4"), len(prompt))
    return Prefix(offsets, ids[:, kept].ravel().astype("i8"), tokens)


def replay(
    experiment: Experiment,
    seeds: Sequence[int],
    profile: Engine | None = None,
    coefficients: Coefficients | None = None,
) -> Replayed:
    """Simulate the experiment once for each seed.

    `profile` and `coefficients` stand in for the catalog's engine and step times.
    """
    ran = fleet(experiment, profile)
    bounds = np.cumsum([0.0] + [stage.duration_s for stage in experiment.stages])
    bounds[-1] = math.inf
    line = None if coefficients is None else _lines(coefficients)
    parts: list[tuple[Floats, Floats, Floats]] = []
    unfinished = 0
    for seed in seeds:
        table = workload(experiment, seed)
        policies = Policies(router("least-loaded"), ordering("fcfs"))
        found = simulate(ran, TraceSource(table), policies, seed=seed, line=line).requests
        done = found["outcome"] == Outcome.FINISHED
        unfinished += int(np.count_nonzero(~done))
        arrival_s = table.arrival_s[found["request"][done].astype("i8")]
        parts.append((arrival_s, _ms(found["first_token_s"][done] - arrival_s), _ms(found["end_s"][done] - arrival_s)))
    arrival_s, ttft_ms, e2e_ms = (np.concatenate(column) for column in zip(*parts, strict=True))
    whole = _latencies(experiment, ttft_ms, e2e_ms)
    masks = [(arrival_s >= low) & (arrival_s < high) for low, high in pairwise(bounds)]
    return Replayed(whole, tuple(_latencies(experiment, ttft_ms[m], e2e_ms[m]) for m in masks), unfinished)


def _lines(coefficients: Coefficients) -> Callable[[Pool], Line]:
    return lambda pool: StepModel(pool.model, pool.gpu, pool.engine, pool.parallel, coefficients).line


def _latencies(experiment: Experiment, ttft_ms: Floats, e2e_ms: Floats) -> Latencies:
    gaps = experiment.output_tokens - 1
    return Latencies(e2e_ms, ttft_ms, (e2e_ms - ttft_ms) / gaps if gaps else np.full(len(e2e_ms), np.nan))


def _ms(seconds: npt.NDArray[np.generic]) -> Floats:
    return np.asarray(seconds, dtype=np.float64) * 1e3
