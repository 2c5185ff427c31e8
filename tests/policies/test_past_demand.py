"""A scaler that is given the demand from before its start forecasts as one that has seen it."""

from __future__ import annotations

from collections.abc import Sequence
from math import pi, sin
from typing import Any

import numpy as np
import pytest

from fakes import FakePool, FakePools, FakeReplica
from headway.core.past_demand import PastDemand
from headway.core.policy import Floats, Scaler
from headway.policies.scaling.demand import past_by_cell
from headway.policies.scaling.headway import HeadwayScaler
from headway.policies.scaling.hourly_plan import Planning
from headway.policies.scaling.long_term import LongTermImmediateScaler

LOOK_S = 600.0
"""Time between two looks, within which demand is constant."""
BEFORE, AFTER = 2 * 144 + 60, 9
"""Looks before and after the restart, which is at a full hour."""
MODELS, REGIONS, TIERS = ("small", "large"), ("eu", "us"), (0, 2)
KEYS = [(model, region, tier) for model in MODELS for region in REGIONS for tier in TIERS]


def rate_tps(key: tuple[str, str, int], look: int) -> int:
    """Days with a wave of their own for each kind of request, in whole tokens."""
    return round(300 * (2 + sin(2 * pi * look / 144 + KEYS.index(key))))


class Told:
    """A forecaster of the last value that keeps what it was asked."""

    cheats = False

    def __init__(self, asked: dict[Any, Floats], cell: tuple[str, str]) -> None:
        self._asked, self._cell = asked, cell

    def forecast(self, history: Floats, steps: int, quantiles: Sequence[float]) -> Floats:
        self._asked[self._cell] = history.copy()
        return np.full((len(quantiles), steps), history[-1])


def follow(scaler: Scaler, first: int, until: int) -> list[dict[str, int]]:
    """What the scaler asks for; nothing is started."""
    pools = [
        FakePool(
            name=f"{model} {region}",
            model=model,
            region=region,
            max_replicas=50,
            replicas=[FakeReplica(i, combo=i) for i in range(2)],
        )
        for model in MODELS
        for region in REGIONS
    ]
    totals, wanted = dict.fromkeys(KEYS, 0), []
    for look in range(first, until):
        for key in KEYS:
            totals[key] += int(LOOK_S) * rate_tps(key, look)
        arrived = {key: (total // 100, total) for key, total in totals.items()}
        wanted.append(dict(scaler.scale(FakePools(pools, LOOK_S * (look - first + 1), arrived))))
    return wanted


def past() -> PastDemand:
    return PastDemand(LOOK_S, {key: np.array([float(rate_tps(key, i)) for i in range(BEFORE)]) for key in KEYS})


def scalers(name: str, asked: dict[Any, Floats] | None) -> Any:
    """A scaler of this kind. `asked`: its forecasters write their histories there; None: it has its own."""
    arguments: dict[str, Any] = {} if asked is None else {"forecaster": lambda *cell: Told(asked, cell)}
    if name == "lt-i":
        return LongTermImmediateScaler(plan=Planning(tps=dict.fromkeys(MODELS, 300.0), step_s=1800.0), **arguments)
    return HeadwayScaler(tps=dict.fromkeys(MODELS, 300.0), batch_tier=2, **arguments)


def expected_tps(scaler: HeadwayScaler, now: float) -> dict[tuple[str, str], float]:
    """The demand expected within ten minutes."""
    return {name: scaler._forecasts.most_tps(name, cell, 600.0, now) for name, cell in sorted(scaler._cells.items())}


@pytest.mark.ci
def test_growth_at_this_time_of_earlier_days_is_known_after_a_restart() -> None:
    on, again, without = (scalers("headway", None) for _ in range(3))
    follow(on, 0, BEFORE + AFTER)
    again.remember(past())
    follow(again, BEFORE, BEFORE + AFTER)
    follow(without, BEFORE, BEFORE + AFTER)
    expected = expected_tps(on, (BEFORE + AFTER) * LOOK_S)
    assert expected_tps(again, AFTER * LOOK_S) == pytest.approx(expected)
    assert expected_tps(without, AFTER * LOOK_S) != pytest.approx(expected)


@pytest.mark.parametrize("name", ["headway", "lt-i"])
def test_a_forecaster_is_given_the_same_history_after_a_restart(name: str) -> None:
    heard: list[dict[Any, Floats]] = [{}, {}]
    on, again = (scalers(name, each) for each in heard)
    follow(on, 0, BEFORE + AFTER)
    again.remember(past())
    follow(again, BEFORE, BEFORE + AFTER)
    assert len(heard[0]) == 4 and heard[0].keys() == heard[1].keys()
    for cell, history in heard[0].items():
        assert heard[1][cell] == pytest.approx(history)


def test_a_plan_after_a_restart_is_that_of_before_and_made_at_once() -> None:
    on, again, without = (scalers("lt-i", None) for _ in range(3))
    again.remember(past())
    assert follow(again, BEFORE, BEFORE + 1)[-1] == follow(on, 0, BEFORE + 1)[-1] != {}
    assert not follow(without, BEFORE, BEFORE + 1)[-1]


def test_a_past_of_other_steps_keeps_its_tokens() -> None:
    pool = FakePool(name="only", model="m", replicas=[])
    past = PastDemand(60.0, {("", "", 0): np.array([9.0, 60.0, 0.0, 30.0]), ("m", "eu", 1): np.ones(4)})
    found = past_by_cell(past, FakePools([pool]), 90.0, lambda tier: tier == 0)
    assert found == {("m", ""): [40.0, 20.0]}  # 60 to 150 s, 150 to 240 s; what is older fills no step
    assert past_by_cell(past, FakePools([pool]), 120.0, lambda tier: True) == {("m", ""): [35.5, 16.0]}
