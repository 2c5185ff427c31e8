"""Shares of power: sane for every GPU, and marked where they were not measured."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from headway import catalog
from headway.catalog.power import power_shares
from headway.core.fleet import Gpu

SCRIPT = Path(__file__).parents[2] / "scripts" / "fit_power.py"


@pytest.mark.parametrize("gpu", catalog.gpus(), ids=lambda gpu: gpu.name)
def test_every_gpu_has_shares(gpu: Gpu) -> None:
    found, is_measured = power_shares(gpu)
    assert 0 < found.idle < found.idle + found.active < 1 <= found.idle + found.active + found.memory + found.compute
    assert 0 < found.error <= found.error_if_like
    assert is_measured == (gpu.name in ("h100-80gb-sxm", "b200-180gb-sxm"))


def test_a_gpu_of_ones_own_has_those_of_the_h100() -> None:
    h100 = catalog.gpu("h100")
    found, is_measured = power_shares(replace(h100, name="mine", watts=300.0))
    assert found == power_shares(h100)[0] and not is_measured


def test_names_are_those_of_the_catalog() -> None:
    names = {each.name for each in catalog.gpus()}
    for gpu in catalog.gpus():
        shares, _ = power_shares(gpu)
        assert {*shares.gpus, *shares.like} <= names


def test_the_script_says_why_it_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_DATA", raising=False)
    monkeypatch.setattr(sys, "argv", ["fit_power.py"])
    pytest.importorskip("scipy")
    with pytest.raises(SystemExit, match="HEADWAY_DATA is not set"):
        runpy.run_path(str(SCRIPT), run_name="__main__")


def test_phases_that_are_left_out_are_within_a_tenth() -> None:
    """Mean power of each phase on the H100, by a fit on the others."""
    pytest.importorskip("scipy")
    if not (data := os.environ.get("HEADWAY_DATA")):
        pytest.skip("HEADWAY_DATA is not set")
    script = runpy.run_path(str(SCRIPT))
    idle = power_shares(catalog.gpu("h100"))[0].idle
    loads = script["phases"](Path(data) / "measured")
    ratios = script["held_out"](loads, idle, lambda each: each.name)
    assert len(ratios) == 10 and max(abs(ratio - 1) for ratio in ratios) < 0.1
    fitted = script["fitted"](loads, idle)
    shares = power_shares(catalog.gpu("h100"))[0]
    assert fitted == pytest.approx((shares.active, shares.memory, shares.compute), abs=2e-3)
