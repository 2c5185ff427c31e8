"""Predicted over observed latencies: of a simulated engine as the model says, and of one half as fast."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from headway import catalog
from headway.catalog.coefficients import Coefficients
from headway.control.live import Live
from headway.control.policies import Policies
from headway.core.fleet import Fleet, Pool
from headway.gateway.telemetry.drift import LEAST_COMPARED, PredictionDrift, PredictionRatio
from headway.perf.step import StepModel
from headway.policies.resolve import ordering, router
from headway.sim.cluster import simulate
from headway.sim.timeline import Line
from headway.workload.sources import TraceSource
from headway.workload.table import Workload

POOL = Pool("pool", catalog.model("llama-3.1-8b"), catalog.gpu("h100"), catalog.engine("vllm-v1"), replicas=1)
TIMES = catalog.coefficients(POOL.gpu.name, POOL.engine.name)


def slowed(factor: float) -> Callable[[Pool], Line]:
    """Step times of an engine that takes `factor` times as long."""

    def line_of(pool: Pool) -> Line:
        model = StepModel(pool.model, pool.gpu, pool.engine, pool.parallel, TIMES)

        def line(*args: object, **more: object) -> tuple[float, float, int | None]:
            a_s, b_s, iterations = model.line(*args, **more)  # type: ignore[arg-type]
            return a_s * factor, b_s * factor, iterations

        return line

    return line_of


def served(pool: str) -> tuple[Pool | None, Coefficients | None]:
    return POOL, TIMES


def observed(factor: float, rate: float, drift: PredictionDrift, prompt_tokens: int = 800) -> None:
    """Requests at a replica that takes `factor` times as long as the model says, noted as they end."""
    rng, num = np.random.default_rng(1), 150
    workload = Workload({
        "arrival_s": np.cumsum(rng.exponential(1 / rate, num)), "prompt_tokens": rng.integers(50, prompt_tokens, num),
        "output_tokens": rng.integers(20, 120, num),
    })  # fmt: skip
    policies = Policies(router("least-loaded"), ordering("fcfs"))
    requests = simulate(Fleet((POOL,)), TraceSource(workload), policies, seed=1, line=slowed(factor)).requests
    for i in range(num):
        row = int(requests["request"][i])
        live = Live(
            row, float(workload.arrival_s[row]), int(workload.prompt_tokens[row]), int(workload.output_tokens[row])
        )
        live.placed_s = live.enqueued_s = float(requests["placed_s"][i])
        live.first_token_s = float(requests["first_token_s"][i])
        live.generated_tokens = int(requests["generated_tokens"][i])
        end_s = float(requests["end_s"][i])
        drift.add(0, "pool", live, end_s)
        if not i % 20:
            drift.compare({}, end_s)
    drift.compare({}, end_s)


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
