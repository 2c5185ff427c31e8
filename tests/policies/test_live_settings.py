"""Scalers that a gateway can give other settings while it runs: what they know goes over to the next one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

import headway as hw
from headway.core.policy import ChangesSettings
from headway.core.view import PoolsView
from headway.policies import SCALERS

LIVE = sorted(name for name, each in SCALERS.items() if hasattr(each, "live_settings"))
SETTINGS: Mapping[str, dict[str, Any]] = {
    "chiron": {"theta": 0.5, "cooldown_s": 20.0},
    "freeness": {"normalised": True, "out_below": 0.98, "in_above": 0.99, "cooldown_s": 20.0},
    "headway": {"use": 0.2, "hold_s": 30.0},
    "keda": {"threshold": 10.0, "polling_s": 5.0, "stabilization_s": 60.0},
    "reactive": {"out_above": 0.02, "in_below": 0.01, "cooldown_s": 20.0},
    "target-utilization": {"kv_use": None, "in_flight": 10.0, "stabilization_s": 60.0, "interval_s": 5.0},
}
FLEET: dict[str, Any] = {
    "fleet": [
        {
            "name": "chat",
            "model": "llama-3.1-8b",
            "gpu": "h100",
            "engine": "vllm-0.15",
            "start_s": 8,
            "replicas": 2,
            "max_replicas": 8,
        }
    ],
    "workload": {
        "arrivals": {"kind": "curve", "step_s": 60, "rates": [5, 40, 3, 10]},
        "num_requests": 3000,
        "prompt_tokens": 400,
        "output_tokens": 60,
    },
}
Asked = list[tuple[float, dict[str, int]]]


class Scaled:
    """A scaler that is replaced before each call by one of the same settings, and notes what it asked for."""

    kind, is_replaced, goes_on = "", False, True
    asked: ClassVar[Asked] = []

    def __init__(self) -> None:
        self._present = self._new()
        self.interval_s = self._present.interval_s

    def _new(self) -> Any:
        return SCALERS[self.kind](**SETTINGS[self.kind])

    def scale(self, view: PoolsView) -> Mapping[str, int]:
        if self.is_replaced:
            new = self._new()
            assert isinstance(new, ChangesSettings)
            if self.goes_on:
                new.go_on(self._present)
            self._present = new
        found = dict(self._present.scale(view))
        self.asked.append((view.now, found))
        return found


def asked(name: str, replaced: bool, on: bool = True) -> Asked:
    class Own(Scaled):
        kind, is_replaced, goes_on = name, replaced, on
        asked: ClassVar[Asked] = []

    hw.simulate({**FLEET, "policies": {"routing": "least-loaded", "scaling": {"name": Own}}})
    return Own.asked


def test_these_are_all_scalers_whose_settings_can_change() -> None:
    assert sorted(SETTINGS) == LIVE


@pytest.mark.parametrize("name", LIVE)
def test_a_scaler_that_is_replaced_goes_on_as_if_it_were_not(name: str) -> None:
    usual = asked(name, False)
    assert len({number for _, each in usual for number in each.values()}) > 1  # it scales
    assert asked(name, True) == usual
    assert asked(name, True, on=False) != usual  # what it knew matters


@pytest.mark.parametrize("name", LIVE)
def test_other_settings_hold_from_the_next_call_on(name: str) -> None:
    before, period = SCALERS[name](**SETTINGS[name]), "polling_s" if name == "keda" else "interval_s"
    after: Any = SCALERS[name](**SETTINGS[name] | {period: 7.0})
    after.go_on(before)
    assert after.interval_s == 7.0
