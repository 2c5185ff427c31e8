"""The load error on curves by hand, and on an overloaded replica."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from headway import catalog
from headway.calibration.load_error import MOST, crossing, load_factor, scaled
from headway.calibration.replay import replay
from headway.calibration.serving import LoadStage, MeasuredLatencies, ServingExperiment


def queue_ms(factor: float) -> float:
    """TTFT of a queue that is 80% full at factor 1."""
    return 10 / (1 - 0.2 * factor)


@pytest.mark.parametrize("factor", [0.55, 0.83, 1.0, 1.3, 1.9])
def test_the_factor_is_found(factor: float) -> None:
    assert crossing(queue_ms, queue_ms(factor)) == pytest.approx(factor, rel=0.02)


@pytest.mark.parametrize("wanted_ms", [1.0, 1e6])
def test_there_may_be_no_factor(wanted_ms: float) -> None:
    assert queue_ms(1 / MOST) > 1.0 and queue_ms(MOST) < 1e6
    assert crossing(queue_ms, wanted_ms) is None


def measured(ttft_ms: float) -> MeasuredLatencies:
    return MeasuredLatencies(2 * ttft_ms, 2 * ttft_ms, 2 * ttft_ms, ttft_ms, ttft_ms, ttft_ms, 10.0)


def experiment(rate_rps: float, ttft_ms: float = 100.0) -> ServingExperiment:
    """Prompts that are never cached, of an eight-billion model on one H100, for 60 s."""
    return ServingExperiment(
        id="1", workload="", model=catalog.model("llama-3.1-8b"), gpu=catalog.gpu("h100"), tp=1, dp=1,
        engine="vllm-0.15", engine_version="", max_num_batched_tokens=2048, gpu_memory_utilization=None,
        kv_offload_bytes=0.0, sys_prompt_tokens=0, question_tokens=2000, output_tokens=50,
        stages=(LoadStage(rate_rps, 60.0, measured(ttft_ms)),), measured=measured(ttft_ms), prompts_per_group=0,
    )  # fmt: skip


def test_a_rate_that_is_scaled_keeps_its_number_of_requests() -> None:
    stage = scaled(experiment(10.0), 2.0).stages[0]
    assert (stage.rate_rps, stage.duration_s) == (20.0, 30.0)


def test_an_overload_that_was_not_measured_is_an_error_of_the_load_not_of_ttft() -> None:
    # What is predicted at 18 requests/s was measured at 22, where the prediction is overloaded.
    real_ms = float(replay(experiment(18.0), (0,)).overall.ttft_ms.mean())
    late = experiment(22.0, real_ms)
    predicted_ms = float(replay(late, (0,)).overall.ttft_ms.mean())
    factor = load_factor(late)
    assert factor is not None
    assert factor == pytest.approx(18 / 22, abs=0.06)
    assert predicted_ms / real_ms - 1 > 5 * (1 - factor)


def test_far_from_saturation_ttft_says_nothing_about_the_load() -> None:
    calm = experiment(0.5)
    real_ms = float(replay(calm, (0,)).overall.ttft_ms.mean())
    same = replace(calm, measured=measured(1.02 * real_ms))
    assert load_factor(same) is None
