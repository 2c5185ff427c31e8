"""The factor on step times with which recorded days come out, on latencies that are a known function of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.planning.advise.correct import CLOSE, E2E, LEAST_ERROR, MOST_ROUNDS, correct, own_factor, slower

BAND = 1.3


class Engine:
    """Latencies grow with a power of the factor on step times: 1 where nothing waits, more where queues follow."""

    def __init__(self, powers: Mapping[str, float], num_parts: int = 1) -> None:
        self.powers, self.num_parts, self.factors = powers, num_parts, list[float]()

    def __call__(self, factor: float) -> list[dict[str, float]]:
        self.factors.append(factor)
        return [{key: (i + 1) * factor**power for key, power in self.powers.items()} for i in range(self.num_parts)]


@given(true=st.floats(1 / BAND, BAND), power=st.floats(1.0, 12.0))
def test_the_factor_of_the_engines_is_found(true: float, power: float) -> None:
    engine = Engine({E2E: power, "tpot_s": 1.0, "ttft_s": power}, 3)
    ran = engine(true)
    found = correct(ran, engine, BAND)
    assert found is not None and found.mean == pytest.approx(true, rel=CLOSE)
    assert found.low <= found.mean / (1 + LEAST_ERROR) * (1 + 1e-9) and found.high >= found.mean * (1 + LEAST_ERROR) * (
        1 - 1e-9
    )
    assert found.low <= true <= found.high
    assert len(engine.factors) <= 1 + MOST_ROUNDS


@given(memory=st.floats(0.8, 1.25), compute=st.floats(0.8, 1.25))
def test_latencies_that_disagree_widen_the_interval(memory: float, compute: float) -> None:
    """Decoding is off by one factor and prompts by another: both are in the interval."""
    model = Engine({E2E: 1.0, "tpot_s": 1.0, "ttft_s": 1.0})
    ran = [{E2E: (memory * compute) ** 0.5, "tpot_s": memory, "ttft_s": compute}]
    found = correct(ran, model, BAND)
    assert found is not None and found.by["tpot_s"] == pytest.approx(memory, rel=1e-6)
    assert found.low <= min(memory, compute) * (1 + 1e-9) and found.high >= max(memory, compute) * (1 - 1e-9)


def test_days_that_disagree_widen_the_interval_and_a_pool_that_is_off_does() -> None:
    model = Engine({E2E: 1.0, "tpot_s": 1.0, "ttft_s": 1.0, "tpot_s of old": 1.0}, 2)
    alike = [{key: (i + 1) * 1.1 for key in model.powers} for i in range(2)]
    one = correct(alike, model, BAND)
    other_days = correct(
        [
            {key: value * factor for key, value in each.items()}
            for each, factor in zip(alike, (0.96, 1.04), strict=True)
        ],
        model,
        BAND,
    )
    other_pool = correct([{**each, "tpot_s of old": each["tpot_s of old"] * 1.1} for each in alike], model, BAND)
    assert one is not None and other_days is not None and other_pool is not None
    assert one.high == pytest.approx(1.1 * (1 + LEAST_ERROR)) and one.by["tpot_s of old"] == pytest.approx(1.1)
    assert other_days.low < one.low and other_days.high > one.high
    assert other_pool.by["tpot_s of old"] == pytest.approx(1.21) and other_pool.high == pytest.approx(1.21)


@pytest.mark.parametrize("true", [0.5, 2.0])
def test_no_factor_is_further_than_the_band(true: float) -> None:
    engine = Engine({E2E: 1.0, "tpot_s": 1.0, "ttft_s": 1.0})
    found = correct(engine(true), engine, BAND)
    assert found is not None and abs(log(found.mean)) == pytest.approx(log(BAND))
    assert all(
        each * (1 + 1e-9) >= 1 / BAND / (1 + LEAST_ERROR) and each <= BAND * (1 + LEAST_ERROR) * (1 + 1e-9)
        for each in (found.low, found.high)
    )


@pytest.mark.parametrize("most_rounds", [1, 2])
def test_few_rehearsals_leave_a_factor_that_is_nearer_than_none(most_rounds: int) -> None:
    engine = Engine({E2E: 2.0, "tpot_s": 1.0, "ttft_s": 2.0})
    found = correct(engine(1.05), engine, BAND, most_rounds)
    assert found is not None and abs(log(found.mean / 1.05)) <= log(1.05) + 1e-9


def test_without_e2e_latencies_there_is_no_factor() -> None:
    def nothing(factor: float) -> Sequence[Mapping[str, float]]:
        return [{"ttft_s": factor}]

    assert correct([{"ttft_s": 1.0}], nothing, BAND) is None


def test_a_documents_own_factor_is_kept() -> None:
    document = {"simulation": {"step_time_factor": 1.2, "warmup_s": 3}}
    made = slower(document, 1.1)
    assert made["simulation"] == {"step_time_factor": pytest.approx(1.32), "warmup_s": 3}
    assert own_factor(made) == pytest.approx(1.32) and own_factor({}) == own_factor({"simulation": None}) == 1.0
    assert slower({}, 1.0) == {} and exp(0) == own_factor(slower({}, 1.0))
