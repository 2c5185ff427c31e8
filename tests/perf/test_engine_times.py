"""Expected times of a pool's engines: those of its step-time model, or assumed ones."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from headway.catalog import engine, gpu, model
from headway.core.fleet import Hosted, Pool
from headway.perf.engine_times import PoolTimes, pool_times
from headway.perf.speculation import step_model

POOL = Pool("p", model("llama-3.1-8b"), gpu("h100"), engine("vllm-0.15"))


def test_times_are_those_of_the_step_time_model() -> None:
    line = step_model(POOL.model, POOL.gpu, POOL.engine, POOL.parallel).line
    times = pool_times(POOL)
    assert times.is_known
    assert times.step_s(20, 9000) == line(20, 9000)[0]
    assert times.step_s(10**6, 0) == line(POOL.engine.max_num_seqs, 0)[0]
    most = POOL.engine.max_num_batched_tokens
    assert times.prefill_s(most) == pytest.approx(line(0, 0, [(most, 0)])[0])
    assert times.prefill_s(-5) == times.prefill_s(0) > 0


def test_without_a_model_times_are_assumed() -> None:
    times = PoolTimes(POOL, None)
    assert not times.is_known
    assert times.step_s(1, 0) == times.step_s(50, 10**6) > 0
    assert times.prefill_s(2000) > times.prefill_s(1000)


def test_a_hosted_service_takes_as_long_as_it_says() -> None:
    times = pool_times(replace(POOL, hosted=Hosted(ttft_s=0.5, tokens_per_s=50.0)))
    assert times.is_known
    assert (times.prefill_s(9000), times.step_s(30, 9000)) == (0.5, 0.02)
    assert not pool_times(replace(POOL, hosted=Hosted())).is_known
