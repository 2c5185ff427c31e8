"""An autopilot that tries other settings of the fleet's scaler, and what the fleet may cost at most."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

pytest.importorskip("httptools")

from headway.autopilot.machine import Change, Limits, Observed, too_dear
from headway.gateway.gateway import Gateway
from headway.gateway.reload import Reloader
from headway.gateway.telemetry.recording import Recording
from headway.serving.autopilot import Autopilot, most_usd_per_h
from headway.serving.reload import FleetFile

NIGHT_S = 1767574800.0
POOL = {"name": "pool", "model": "qwen3-8b", "gpu": "h100", "engine": "vllm-0.15", "usd_per_gpu_hour": 3.0}
COMMAND = {"command": ["true", "{port}"]}
STARTED = {**POOL, "processes": {**COMMAND, "ports": [1, 9]}, "max_replicas": 3}
FREENESS = {"name": "freeness", "cooldown_s": 60.0}
LATER = {**FREENESS, "out_below": 0.3, "in_above": 0.9}


def fleet(folder: Path, **sections: Any) -> FleetFile:
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(sections))
    return FleetFile(path, lambda read: read)


async def ask(kinds: Any) -> dict[str, Any]:
    assert kinds == ("scaling.settings",)
    proposal = {
        "name": "scaling: freeness, out below 0.3",
        "kinds": ["scaling.settings"],
        "changes": [{"key": ["policies", "scaling"], "value": LATER}],
        "attainment": {"mean": 0.3, "low": 0.2, "high": 0.4},
    }
    return {"is_withheld": False, "proposals": [proposal], "today": {"attainment": 0.5}}


@pytest.mark.parametrize(("gain", "outcome", "settings"), [(0.3, "promoted", LATER), (-0.3, "rolled back", FREENESS)])
def test_settings_are_tried_in_turns_and_what_the_scaler_knows_goes_over(
    gain: float, outcome: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    allowed = {"allow": ["scaling.settings"], "max_usd_per_h": 9}
    file = fleet(tmp_path, fleet=[STARTED], policies={"scaling": FREENESS}, slo={"e2e_s": 60}, autopilot=allowed)

    async def story() -> None:
        gateway = Gateway(file.plan, Recording(enabled=False))
        Reloader(gateway, file.read_again, None).start()
        gateway.scaling._start_took_s["qwen3-8b"] = 40.0
        made = Autopilot(gateway, file, tmp_path, ask, lambda: NIGHT_S)
        made._trial.requests_per_s = lambda now: 50.0  # type: ignore[method-assign]
        turns: list[float] = []

        def scaler() -> Any:
            control = gateway.scaling.control
            assert control is not None
            return control.scaler

        async def pair(change: Change, before: Any, after: Any) -> None:
            for policies in (after, before):
                made._serve(policies)
                turns.append(scaler()._out_below)
                assert scaler()._stepped_s == {"pool": 12.0}
            await made._step(Observed(gain))

        made._pair = pair  # type: ignore[method-assign]
        scaler()._stepped_s["pool"] = 12.0
        await made.look_now()
        while not made.state().past:
            await made._next()
        change = made._stored.state.change
        assert change is not None and change.most_usd_per_h == 9.0
        assert change.staging.settle_s == 41.0  # the scaler is asked every second, and a replica starts in 40 s
        assert turns[:2] == [0.3, -0.5]
        assert made.state().past[0].outcome == outcome
        assert yaml.safe_load(file.path.read_text())["policies"]["scaling"] == settings
        assert scaler()._out_below == settings.get("out_below", -0.5) and scaler()._stepped_s == {"pool": 12.0}

    asyncio.run(story())


def combo(**keys: Any) -> dict[str, Any]:
    sides = {
        name: {**POOL, "name": "", "replicas": num, "processes": {**COMMAND, "ports": ports}}
        for name, num, ports in (("prefill", 1, [1, 9]), ("decode", 2, [11, 30]))
    }
    return {"name": "pair", **sides, **keys}


SCALED = {"policies": {"scaling": "freeness"}}


@pytest.mark.parametrize(
    ("sections", "usd"),
    [
        ({"fleet": [{**POOL, "endpoints": ["http://127.0.0.1:1", "http://127.0.0.1:2"]}]}, 6.0),
        ({"fleet": [STARTED]}, 3.0),
        ({"fleet": [STARTED], **SCALED}, 9.0),
        ({"combos": [combo(replicas=2)], "policies": {"routing": "cauchy"}}, 18.0),
        ({"combos": [combo(max_replicas=4)], "policies": {"routing": "cauchy", "scaling": "freeness"}}, 36.0),
    ],
    ids=["endpoints", "no scaler", "scaler", "combos", "combos that scale"],
)
def test_what_a_fleet_may_cost_counts_all_replicas_that_it_may_have(
    sections: dict[str, Any], usd: float, tmp_path: Path
) -> None:
    most = most_usd_per_h(fleet(tmp_path, **sections).plan)
    assert most == usd
    assert bool(too_dear(most, Limits((), 16.0))) == (usd > 16)


def test_without_a_most_number_of_replicas_the_gpus_are_the_bound_and_else_nothing_is(tmp_path: Path) -> None:
    limited = {"gpu_limits": [{"gpu": "h100", "count": 5}]}
    for sections, usd in ((limited, 15.0), ({}, None)):
        plan = fleet(tmp_path, fleet=[STARTED], **SCALED, **sections).plan
        pools = [replace(each, pool=replace(each.pool, max_replicas=None)) for each in plan.pools]  # as pods have none
        most = most_usd_per_h(replace(plan, pools=tuple(pools)))
        assert most == usd
        assert bool(too_dear(most, Limits((), 16.0))) == (usd is None)
        assert not too_dear(most, Limits((), None))
