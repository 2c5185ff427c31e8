"""Predicted over observed latencies: of a simulated engine as the model says, and of one half as fast."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headway import catalog
from headway.catalog.coefficients import Coefficients, corrected
from headway.control.live import Live
from headway.control.policies import Policies
from headway.core.fleet import Fleet, Pool
from headway.gateway.telemetry import drift as telemetry
from headway.gateway.telemetry.drift import LEAST_COMPARED, PredictionDrift, PredictionRatio
from headway.gateway.telemetry.loop_delay import LoopDelay
from headway.perf.engine_times import pool_times
from headway.perf.step import Chunk, StepModel
from headway.policies.resolve import ordering, router
from headway.sim.cluster import simulate
from headway.sim.replica_resources import Line
from headway.workload.sources import TraceSource
from headway.workload.table import Workload

POOL = Pool("pool", catalog.model("llama-3.1-8b"), catalog.gpu("h100"), catalog.engine("vllm-0.15"), replicas=1)
CLOCK: Any = SimpleNamespace(now=400.0)
TIMES = catalog.coefficients(POOL.gpu.name, POOL.engine.name)


def slowed(prefill: float, decode: float) -> Callable[[Pool], Line]:
    """Step times of an engine whose prompts, and their launches, and decoding take so many times as long."""

    def line_of(pool: Pool) -> Line:
        model = StepModel(pool.model, pool.gpu, pool.engine, pool.parallel, TIMES)

        def line(
            num: int, context: int, chunks: Sequence[Chunk] = (), window: int = 0, growing: int = 0
        ) -> tuple[float, float, int | None]:
            a_s, b_s, iterations = model.line(num, context, chunks, window, growing)
            if not chunks:
                return a_s * decode, b_s * decode, iterations
            alone_s = model.line(num, context, (), window)[0] if num else 0.0
            return decode * alone_s + prefill * (a_s - alone_s), prefill * b_s, iterations

        return line

    return line_of


def served(pool: str) -> tuple[Pool | None, Coefficients | None]:
    return POOL, TIMES


def observed(
    factor: float,
    rate: float,
    drift: PredictionDrift,
    prompt_tokens: int = 800,
    *,
    decode: float | None = None,
    replica: int = 0,
    start_s: float = 0.0,
    cached: float = 0.0,
    says_cached: bool = False,
    seen_s: Callable[[float], float] = lambda time_s: time_s,
) -> float:
    """Requests at a replica that takes `factor` times as long as the model says, noted as they end. Returns the end.

    `decode`: the factor of decoding, if it is not that of prompts. Of each prompt a share is `cached`. `seen_s`: when
    the gateway notices what happens at a time.
    """
    rng, num = np.random.default_rng(1), 150
    workload = Workload(
        {
            "arrival_s": np.cumsum(rng.exponential(1 / rate, num)),
            "prompt_tokens": rng.integers(50, prompt_tokens, num),
            "output_tokens": rng.integers(20, 120, num),
        }
    )
    policies = Policies(router("least-loaded"), ordering("fcfs"))
    line = slowed(factor, factor if decode is None else decode)
    requests = simulate(Fleet((POOL,)), TraceSource(workload), policies, seed=1, line=line).requests
    lives: list[tuple[Live, float]] = []
    for i in range(num):
        row = int(requests["request"][i])
        computed = int(workload.prompt_tokens[row])
        live = Live(
            row, float(workload.arrival_s[row]), round(computed / (1 - cached)), int(workload.output_tokens[row])
        )
        live.cached_tokens = live.prompt_tokens - computed if says_cached else 0
        live.placed_s = live.enqueued_s = start_s + float(requests["placed_s"][i])
        live.first_token_s = seen_s(start_s + float(requests["first_token_s"][i]))
        live.generated_tokens = int(requests["generated_tokens"][i])
        lives.append((live, seen_s(start_s + float(requests["end_s"][i]))))
    for i, (live, end_s) in enumerate(sorted(lives, key=lambda each: each[1])):
        drift.add(replica, "pool", live, end_s)
        if not i % 20 or i == num - 1:
            drift.compare({replica: [_as_of(each, end_s) for each, to in lives if each.placed_s < end_s < to]}, end_s)
    return end_s


def _as_of(live: Live, now: float) -> Live:
    """A request in flight, as it is known at a moment."""
    known = Live(live.id, live.arrival_s, live.prompt_tokens, live.generated_tokens)
    known.placed_s = known.enqueued_s = live.placed_s
    known.first_token_s = live.first_token_s if live.first_token_s <= now else math.nan
    return known


def ratio_at(factor: float, rate: float, **more: int) -> PredictionRatio:
    drift = PredictionDrift(served)
    observed(factor, rate, drift, **more)
    found = drift.ratio(0)
    assert found is not None and found.itl is not None and found.ttft is not None
    return found


@pytest.mark.parametrize("rate", [0.5, 4.0, 16.0])
def test_an_engine_as_predicted_has_a_ratio_of_one(rate: float) -> None:
    found = ratio_at(1.0, rate)
    assert found.itl == pytest.approx(1, abs=0.05) and found.ttft == pytest.approx(1, abs=0.1)
    assert found.correction is None


@pytest.mark.parametrize("rate", [0.5, 4.0, 10.0])
def test_an_engine_half_as_fast_is_found(rate: float) -> None:
    found = ratio_at(2.0, rate)
    assert found.itl == pytest.approx(0.5, abs=0.05) and found.ttft == pytest.approx(0.53, abs=0.08)
    assert found.correction is not None and "--pool pool --out pool.json" in found.correction


def test_long_prompts_of_others_are_part_of_the_prediction() -> None:
    found = ratio_at(1.0, 5.0, prompt_tokens=6000)
    assert found.itl == pytest.approx(1, abs=0.1) and found.ttft == pytest.approx(1, abs=0.15)


def test_few_requests_and_unknown_hardware_have_no_ratio() -> None:
    drift = PredictionDrift(served)
    live = Live(0, 0.0, 100, 50)
    live.enqueued_s, live.first_token_s, live.generated_tokens = 0.0, 0.02, 50
    for _ in range(LEAST_COMPARED - 1):
        drift.add(0, "pool", live, 0.4)
    drift.compare({}, 1.0)
    assert drift.ratio(0) is None and list(drift.gauges(0)) == []
    drift.add(0, "pool", live, 0.4)
    drift.compare({}, 1.0)
    assert drift.ratio(0) is not None
    drift.forget(0)
    assert drift.ratio(0) is None
    unknown = PredictionDrift(lambda pool: (POOL, None))
    for _ in range(2 * LEAST_COMPARED):
        unknown.add(0, "pool", live, 0.4)
    unknown.compare({}, 1.0)
    assert unknown.ratio(0) is None


@pytest.mark.parametrize(
    ("rate", "factors", "told"),
    [
        (0.5, (1.09, 1.0), {"prefill": 1.09}),
        (4.0, (1.09, 1.0), {"prefill": 1.09}),
        (12.0, (1.09, 1.0), {"prefill": 1.09}),
        (4.0, (1.0, 1.09), {"decode": 1.09}),
        (0.5, (1.1, 1.1), {"every iteration": 1.1}),
        (12.0, (1.1, 1.1), {"every iteration": 1.1}),
        (4.0, (1.2, 1.1), {"decode": 1.1, "prefill": 1.2}),
        (4.0, (1.0, 0.9), {"decode": 0.9}),
    ],
)
def test_a_term_that_is_off_is_named_with_its_size(
    factors: tuple[float, float], told: dict[str, float], rate: float
) -> None:
    """An engine whose prompts or decoding are slower than its profile, and its neighbour that is as the profile."""
    found: dict[int, tuple[float, float]] = {}
    drift = PredictionDrift(served, lambda replica, prefill, decode: found.update({replica: (prefill, decode)}))
    now = max(
        observed(factors[0], rate, drift, 2000 if rate < 10 else 800, decode=factors[1]),
        observed(1.0, rate, drift, replica=1),
    )
    ratio, neighbour = drift.ratio(0, now), drift.ratio(1, now)
    assert ratio is not None and neighbour is not None
    assert {each.term: each.factor for each in ratio.drift} == pytest.approx(told, abs=0.03)
    assert neighbour.drift == [] and 1 not in found
    assert found.get(0, (1.0, 1.0)) == pytest.approx(factors, abs=0.03)
    for each in ratio.drift:
        size = f"{abs(100 * (each.factor - 1)):.0f}% {'slower' if each.factor > 1 else 'faster'}"
        assert each.text.startswith(f"{each.term} {size} than the profile since ")
    gauges = dict(drift.factor_gauges(0))
    assert (gauges["prefill"], gauges["decode"]) == pytest.approx(factors, abs=0.03)


def test_planners_get_the_medians_of_a_pool() -> None:
    drift = PredictionDrift(served)
    for replica, factor in enumerate((1.2, 1.0, 1.3)):
        observed(factor, 4.0, drift, decode=1.0, replica=replica)
    assert drift.corrections()["pool"] == pytest.approx((1.2, 1.0), abs=0.03)
    healthy = PredictionDrift(served)
    observed(1.0, 4.0, healthy)
    assert healthy.corrections() == {}


def test_the_begin_of_a_drift_is_told_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry.time, "time", lambda: 1e9)
    drift = PredictionDrift(served)
    changed_s = observed(1.0, 4.0, drift)
    now = observed(1.0, 4.0, drift, decode=1.15, start_s=changed_s)
    ratio = drift.ratio(0, now)
    assert ratio is not None and [each.term for each in ratio.drift] == ["decode"]
    assert ratio.drift[0].since - (1e9 - now) == pytest.approx(changed_s, abs=5.0)
    now = observed(1.0, 4.0, drift, start_s=now)
    again = drift.ratio(0, now)
    assert again is not None and again.drift == []


def test_prompts_in_a_cache_that_nobody_reports_are_not_fast_prefill() -> None:
    for says_cached in (True, False):
        drift = PredictionDrift(served)
        now = observed(1.0, 2.0, drift, cached=0.7, says_cached=says_cached)
        ratio = drift.ratio(0, now)
        assert ratio is not None and "prefill" not in [each.term for each in ratio.drift]


def test_a_gateway_that_stands_still_blames_no_engine() -> None:
    """It reads all that has come meanwhile at once, afterwards: first tokens late, or whole answers at one time."""
    every_s, stall_s = 2.0, 1.2

    def seen_s(time_s: float) -> float:
        begin_s = time_s // every_s * every_s
        return max(time_s, begin_s + stall_s)

    told = dict[bool, bool]()
    for knows in (True, False):
        delay = LoopDelay(CLOCK)
        delay.add((i * every_s, stall_s) for i in range(200))
        drift = PredictionDrift(served, late_s=delay.at) if knows else PredictionDrift(served)
        now = observed(1.0, 4.0, drift, seen_s=seen_s)
        ratio = drift.ratio(0, now)
        assert ratio is not None
        told[knows] = ratio.correction is not None or bool(ratio.drift)
    assert told == {True: False, False: True}


@pytest.mark.parametrize("factors", [(1.3, 1.0), (1.0, 0.8), (1.2, 1.4)])
def test_corrected_step_times_are_those_of_the_slower_engine(factors: tuple[float, float]) -> None:
    used = corrected(TIMES, *factors)
    model, expected = StepModel(POOL.model, POOL.gpu, POOL.engine, POOL.parallel, used), slowed(*factors)(POOL)
    for num, context, chunks in [(1, 100, ()), (40, 60_000, ()), (0, 0, [(700, 0)]), (30, 9000, [(300, 64), (20, 0)])]:
        assert model.line(num, context, chunks) == pytest.approx(expected(num, context, chunks, 0, 0))
    assert corrected(used, 1 / factors[0], 1 / factors[1]).overhead.prefill_factor == pytest.approx(1.0)
    plain, times = pool_times(POOL, TIMES), pool_times(POOL, used)
    assert times.step_s(8, 8000) == pytest.approx(factors[1] * plain.step_s(8, 8000))
    assert times.prefill_s(4000) == pytest.approx(factors[0] * plain.prefill_s(4000))
