"""Whole fleets rehearsed model by model have the metrics of one simulation, and share what they have in common."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from headway.planning.combos.problem import GpuCombo, Group
from headway.planning.fleet.allocation import Parts, one_less
from headway.planning.fleet.apart import ApartRehearsals, WholeFleet
from headway.planning.fleet.problem import FleetPart
from headway.planning.fleet.rehearsal import FleetTemplate, rehearsal
from headway.planning.rehearsals import Rehearsals, Resources
from headway.policies import ROUTERS
from headway.scenario import Simulator
from headway.scenario.sharding import NUMBERED
from headway.workload.files import to_parquet
from headway.workload.table import Prefix, Workload

MODELS = ("llama-3.2-1b", "qwen3-8b", "gemma-3-4b-it")
GPUS = ("l4", "h100-80gb-sxm")


def requests(draw: Random, folder: Path, prefixes: bool = False, num: int = 90) -> Path:
    """Requests of all models, some with SLOs of their own, in a file."""
    random = np.random.default_rng(draw.randrange(1000))
    columns = {
        "arrival_s": np.cumsum(random.exponential(1 / draw.choice([10.0, 60.0]), num)).round(draw.choice([1, 6])),
        "prompt_tokens": random.integers(20, 1500, num).astype("i4"),
        "output_tokens": random.integers(1, 80, num).astype("i4"),
        "model": random.integers(0, len(MODELS), num).astype("i2"),
        "tier": random.integers(0, 2, num).astype("i2"),
        "slo_ttft_s": np.where(random.random(num) < 0.5, 0.3, np.nan),
    }
    prefix = None
    if prefixes:
        ids = random.integers(0, 5, num)
        prefix = Prefix(np.arange(num + 1), ids, np.minimum(columns["prompt_tokens"], 200).astype("i4"))
    path = folder / f"{draw.randrange(10**9)}.parquet"
    to_parquet(Workload(columns, MODELS, prefix=prefix), path)
    return path


def fleet(draw: Random, with_combos: bool = False) -> Parts:
    """One to three replicas of each model, on one type of GPU or two, and for some also prefill and decode apart."""
    parts: list[FleetPart] = []
    for model in MODELS:
        alone = [GpuCombo(model, 2.0, aggregated=Group(gpu)) for gpu in draw.sample(GPUS, draw.choice([1, 2]))]
        parts += [FleetPart(model, unit, draw.randint(1, 3)) for unit in alone]
        if with_combos and draw.random() < 0.6:
            unit = GpuCombo(model, 6.0, prefill=Group("l4"), decode=Group("h100-80gb-sxm", instances=2))
            parts[draw.choice([-1, len(parts)]) :] = [FleetPart(model, unit, draw.randint(1, 2))]
    return tuple(parts)


def template(folder: Path, slo: Mapping[str, float], warmup_s: float = 0.0, engine: str = "vllm") -> FleetTemplate:
    document: dict[str, Any] = {"slo": dict(slo), "simulation": {"warmup_s": warmup_s}}
    pools: dict[str, dict[str, Any]] = {model: {"model": model, "engine": engine} for model in MODELS}
    return FleetTemplate(document, pools, {}, folder)


@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_the_metrics_are_those_of_one_simulation(router: str, tmp_path: Path) -> None:
    draw = Random(router)
    of_all = template(
        tmp_path, {"tpot_s": 0.02}, warmup_s=draw.choice([0.0, 0.3]), engine=draw.choice(["vllm", "simulated"])
    )
    for ordering in ("fcfs", "priority"):
        asked = WholeFleet(
            fleet(draw), {"routing": router, "ordering": ordering}, requests(draw, tmp_path, prefixes=True)
        )
        apart = ApartRehearsals(of_all, Rehearsals(Resources(Simulator())))
        whole = rehearsal(of_all.scenario(*asked)).simulated(Simulator())
        assert apart.runs([asked]) == [whole]
        assert apart.runs([asked, asked]) == [whole, whole]
        assert whole.num_requests > 40


def test_routers_by_numbers_are_simulated_whole(tmp_path: Path) -> None:
    draw = Random(3)
    of_all, parts, file = template(tmp_path, {"ttft_s": 1.0}), fleet(draw), requests(draw, tmp_path)
    for router, couples in [("least-loaded", False), *[(each, True) for each in NUMBERED]]:
        scenario = of_all.scenario(parts, {"routing": router}, file)
        assert Simulator().couples(scenario) is couples


def test_fleets_share_the_models_that_are_the_same(tmp_path: Path) -> None:
    draw = Random(5)
    of_all, file = template(tmp_path, {"ttft_s": 1.0}), requests(draw, tmp_path)
    rehearsals = Rehearsals(Resources(Simulator()))
    apart = ApartRehearsals(of_all, rehearsals)
    parts = tuple(FleetPart(model, GpuCombo(model, 2.0, aggregated=Group("l4")), 2) for model in MODELS)
    fewer = [one_less(parts, part) for part in parts]
    apart.runs([WholeFleet(each, {"routing": "least-loaded"}, file) for each in (parts, *fewer)])
    assert rehearsals.num_simulated == 2 * len(MODELS)
    apart.runs([WholeFleet(parts, {"routing": "least-kv"}, file)])
    assert rehearsals.num_simulated == 3 * len(MODELS)
    least = tuple(FleetPart(part.model, part.unit, 1) for part in parts)
    found = apart.runs([WholeFleet(least, {"routing": each}, file) for each in ("least-kv", "random", "freest")])
    assert rehearsals.num_simulated == 3 * len(MODELS), "one replica gets all requests, whatever the router"
    assert found[0] == found[1] == found[2]


def test_no_model_does_worse_than_the_one_that_does_worst(tmp_path: Path) -> None:
    """The bound is the named model's own attainment, and what it took is not simulated again with the whole fleet."""
    draw = Random(7)
    of_all = template(tmp_path, {"ttft_s": 0.2, "tpot_s": 0.02}, warmup_s=0.3)
    for router, couples in [("least-loaded", False), ("freest", False), (NUMBERED[0], True)]:
        asked = WholeFleet(fleet(draw), {"routing": router}, requests(draw, tmp_path))
        rehearsals = Rehearsals(Resources(Simulator()))
        apart = ApartRehearsals(of_all, rehearsals)
        bounds = apart.at_most([(asked, model) for model in MODELS])
        (whole,) = apart.runs([asked])
        assert bounds == ([1.0] * len(MODELS) if couples else [whole.by_model[model] for model in MODELS])
        assert rehearsals.num_simulated == (1 if couples else len(MODELS))


def test_kept_bounds_are_not_simulated(tmp_path: Path) -> None:
    draw = Random(8)
    of_all = template(tmp_path, {"ttft_s": 0.2})
    asked = [(WholeFleet(fleet(draw), {"routing": "freest"}, requests(draw, tmp_path)), model) for model in MODELS]
    found = []
    for num in (len(MODELS), 0):
        rehearsals = Rehearsals(Resources(Simulator(), tmp_path / "cache"))
        found.append(ApartRehearsals(of_all, rehearsals).at_most(asked))
        assert rehearsals.num_simulated == num
    assert found[0] == found[1]
