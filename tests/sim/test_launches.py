"""An engine that schedules ahead: when it launches iterations with prompts, and when it reports their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headway import catalog, scenario
from headway.calibration.steps.fit import span_s
from headway.config.strict_yaml import Places
from headway.control.policies import Policies
from headway.core.fleet import Engine, Fleet, Parallel, Pool
from headway.policies.resolve import ordering, router
from headway.sim.cluster import simulate
from headway.workload.sources import TraceSource
from headway.workload.table import Workload

ENGINE = Engine("made-up", "chunked", max_num_seqs=256, max_num_batched_tokens=100_000, schedule_lag=1)
GRAPH_TOKENS = 512
REQUESTS = st.lists(
    st.tuples(st.integers(0, 30_000), st.sampled_from([20, 100, 400, 600]), st.integers(1, 6)), min_size=1, max_size=12
).map(lambda each: [(ticks * 1e-5 + i * 3.3e-7, *lengths) for i, (ticks, *lengths) in enumerate(each)])
"""(arrival in seconds, tokens of the prompt, tokens of the answer). None arrives just as an iteration is launched or
ends. No sum of prompts is so near `GRAPH_TOKENS` that the decoding sequences decide: those that end now still count in
the simulator."""


def gpu_s(num_decode: int, prompt_tokens: int) -> float:
    return 0.005 + 1e-4 * num_decode + 1e-5 * prompt_tokens


def launch_s(num_tokens: int) -> float:
    return 0.027 if num_tokens > GRAPH_TOKENS else 0.008


def line(
    num_decode: int, context: int, chunks: Sequence[tuple[int, int]] = (), *_: int
) -> tuple[float, float, int | None]:
    tokens = sum(new for new, _ in chunks)
    if not chunks:
        return gpu_s(num_decode, 0), 0.0, None
    return gpu_s(num_decode, tokens), launch_s(num_decode + tokens), 1


def simulated(
    requests: Sequence[tuple[float, int, int]], engine: Engine = ENGINE, step: str = "stretch", tp: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """When clients have the first and the last token of each request."""
    columns = zip(*sorted(requests), strict=True)
    table = Workload(dict(zip(("arrival_s", "prompt_tokens", "output_tokens"), map(np.array, columns), strict=True)))
    pool = Pool("p", catalog.model("llama-3.1-8b"), catalog.gpu("h100"), engine, Parallel(tp=tp))
    policies = Policies(router("least-loaded"), ordering("fcfs"))
    found = simulate(Fleet((pool,)), TraceSource(table), policies, seed=0, step=step, line=lambda _: line).requests
    order = np.argsort(found["request"])
    return found["first_token_s"][order], found["end_s"][order]


def host_loop(requests: Sequence[tuple[float, int, int]]) -> tuple[list[float], list[float]]:
    """vLLM's loop for one GPU: launch an iteration while fewer than two are under way, else wait for the older one and
    report its outputs."""
    requests = sorted(requests)
    num, made, reported = len(requests), [0] * len(requests), [0] * len(requests)
    first, last = [0.0] * num, [0.0] * num
    now, gpu_free_s = 0.0, 0.0
    under_way: list[tuple[float, list[int]]] = []
    while any(reported[i] < requests[i][2] for i in range(num)):
        decodes = [i for i in range(num) if 0 < made[i] < requests[i][2]]
        prompts = [i for i in range(num) if not made[i] and requests[i][0] <= now]
        if len(under_way) < 2 and (decodes or prompts):
            tokens = sum(requests[i][1] for i in prompts)
            begins_s = max(gpu_free_s, now)
            if prompts:
                now += launch_s(len(decodes) + tokens)
            gpu_free_s = max(begins_s + gpu_s(len(decodes), tokens), now)
            under_way.append((gpu_free_s, decodes + prompts))
            for i in under_way[-1][1]:
                made[i] += 1
        elif under_way:
            ended_s, batch = under_way.pop(0)
            now = max(now, ended_s)
            for i in batch:
                reported[i] += 1
                if reported[i] == 1:
                    first[i] = now
                last[i] = now
        else:
            now = max(now, min(requests[i][0] for i in range(num) if not made[i]))
    return first, last


@given(REQUESTS)
def test_tokens_come_when_a_loop_of_the_host_reports_them(requests: list[tuple[float, int, int]]) -> None:
    for found, expected in zip(simulated(requests), host_loop(requests), strict=True):
        assert found == pytest.approx(np.array(expected), abs=1e-9)


@given(REQUESTS, st.floats(0, 0.006))
def test_stretches_and_exact_steps_report_alike(requests: list[tuple[float, int, int]], overhead_s: float) -> None:
    engine = replace(ENGINE, launch_overhead_s=overhead_s)
    for stretched, exact in zip(simulated(requests, engine), simulated(requests, engine, "exact"), strict=True):
        assert stretched == pytest.approx(exact, abs=1e-9)


LONG = [(0.0, 100, 40), (0.1, 600, 2), (0.12, 600, 2)]
"""One sequence decodes; the third prompt comes while the second is launched."""


def test_a_first_token_waits_for_the_next_launch_on_one_gpu() -> None:
    """Engines on several GPUs launch in other processes than the one that reports."""
    alone, pair = simulated(LONG[:2])[0], simulated(LONG)[0]
    assert pair[1] > alone[1] + 0.01
    assert simulated(LONG, tp=2)[0][1] == pytest.approx(simulated(LONG[:2], tp=2)[0][1], abs=1e-9)


def test_without_scheduling_ahead_nothing_is_launched_while_another_runs() -> None:
    engine = replace(ENGINE, schedule_lag=0)
    first = simulated(LONG, engine)[0]
    decode_s = gpu_s(1, 0)
    begins_s = 0.008 + decode_s * np.ceil((0.1 - 0.008) / decode_s)
    assert first[1] == pytest.approx(begins_s + launch_s(601), abs=1e-9)


def test_a_graph_is_launched_after_prompts_that_the_host_kept_waiting() -> None:
    """The next iteration begins later by its launch, and so does the report of the prompt's."""
    first, last = (simulated(LONG[:2], replace(ENGINE, launch_overhead_s=s)) for s in (0.0, 0.004))
    assert last[0][1] - first[0][1] == pytest.approx(0.004, abs=1e-9)
    assert last[1][1] - first[1][1] == pytest.approx(0.004, abs=1e-9)


@given(st.lists(st.tuples(st.floats(1e-3, 0.1), st.one_of(st.just(0.0), st.floats(1e-3, 0.1))), min_size=1, max_size=8))
def test_a_span_is_no_shorter_than_its_work_and_no_longer_than_in_turn(steps: list[tuple[float, float]]) -> None:
    pool = Pool("p", catalog.model("llama-3.1-8b"), catalog.gpu("h100"), replace(ENGINE, launch_overhead_s=0.0))
    in_turn = replace(pool, engine=replace(pool.engine, schedule_lag=0))
    found_s = span_s(steps, pool)
    assert max(sum(a for a, _ in steps), sum(b for _, b in steps)) - 1e-9 <= found_s <= span_s(steps, in_turn) + 1e-9


@pytest.mark.parametrize("engine", ["vllm-0.25", "sglang"])
@pytest.mark.parametrize("rate", [6.0, 12.0])
def test_prompts_with_cached_prefixes_where_memory_is_short(engine: str, rate: float) -> None:
    """The next iteration is looked up in the prefix cache while requests that end now are still in it."""
    pool = {"model": "qwen3-30b-a3b", "gpu": "h100", "engine": engine, "replicas": 1, "kv_capacity_tokens": 60_000}
    document = {
        "workload": {"builtin": "shared-prefix", "num_requests": 80, "arrivals": rate},
        "fleet": [pool],
        "policies": {"routing": "headway", "ordering": "fcfs"},
    }
    stretch, exact = (
        scenario.run(scenario.assemble({**document, "simulation": {"step": step}}, Places(), Path())).records
        for step in ("stretch", "exact")
    )
    assert len(stretch.requests["end_s"]) == 80
    for name, column in stretch.requests.items():
        assert np.allclose(column, exact.requests[name], rtol=0, atol=1e-9, equal_nan=True), name
