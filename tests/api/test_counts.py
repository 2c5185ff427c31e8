"""Counts that nobody has: each ends with an error at once, in Python and on the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headway as hw
from headway.cli import main

SMALL: dict[str, Any] = {
    "workload": {"prompt_tokens": 20, "output_tokens": 3, "arrivals": 5.0, "num_requests": 6},
    "fleet": [{"model": "llama-3.1-8b", "gpu": "h100", "engine": {"name": "simulated"}}],
    "slo": {"ttft_s": 1.0},
}
TIERS = {
    **SMALL,
    "workload": {
        **SMALL["workload"],
        "tiers": [
            {"tier": 0, "share": 0.5, "ttft_s": 1.0},
            {"tier": 1, "share": 0.5, "ttft_s": 2.0},
        ],
    },
}
HUGE = [10**12, 10**30]
CALLS: dict[str, Callable[[int], Any]] = {
    "replicas": lambda n: hw.load(SMALL, {"fleet.0.replicas": n}),
    "max_replicas": lambda n: hw.load(SMALL, {"fleet.0.max_replicas": n}),
    "num_requests": lambda n: hw.load(SMALL, {"workload.num_requests": n}),
    "concurrency": lambda n: hw.load(SMALL, {"workload.concurrency": n}),
    "compare seeds": lambda n: hw.compare(SMALL, seeds=n),
    "compare jobs": lambda n: hw.compare(SMALL, seeds=2, jobs=n),
    "sweep seeds": lambda n: hw.sweep(SMALL, {"workload.arrivals": [1]}, seeds=n),
    "capacity max_replicas": lambda n: hw.plan_capacity(SMALL, gpus=["h100"], ttft_p99_s=1.0, max_replicas=n),
    "capacity jobs": lambda n: hw.plan_capacity(SMALL, gpus=["h100"], tps=[1], ttft_p99_s=1.0, jobs=n),
    "cascade gpus": lambda n: hw.plan_cascade(hw.load(builtin="cascadia"), quality=80.0, gpus=n),
    "cascade offers": lambda n: hw.plan_cascade(hw.load(builtin="cascadia"), quality=80.0, gpus=[f"h100:{n}:2"]),
    "cascade draws": lambda n: hw.plan_cascade(hw.load(builtin="cascadia"), quality=80.0, fresh_draws=n),
    "combos offers": lambda n: hw.plan_combos(SMALL, [f"h100:{n}:2"]),
    "combos rps": lambda n: hw.plan_combos(SMALL, ["h100:8:2"], rps=float(n)),
    "combos sizes": lambda n: hw.plan_combos(SMALL, ["h100:8:2"], sizes=n),
    "fleet offers": lambda n: hw.plan_fleet(SMALL, [f"h100:{n}:2"]),
    "fleet seeds": lambda n: hw.plan_fleet(SMALL, ["h100:4:2"], seeds=n),
    "fleet jobs": lambda n: hw.plan_fleet(SMALL, ["h100:4:2"], jobs=n),
    "tiers seeds": lambda n: hw.plan_tiers(TIERS, num_tiers=[1, 2], seeds=n),
}
COMMANDS = {
    "--gpus": "plan cascade --builtin cascadia --quality 80 --gpus",
    "--fresh-draws": "plan cascade --builtin cascadia --quality 80 --fresh-draws",
    "--curve": "plan cascade --builtin cascadia --quality 80 --curve",
    "--replicas": "simulate --builtin chat --replicas",
    "--num-requests": "simulate --builtin chat --num-requests",
    "--seeds": "compare --builtin chat --seeds",
    "--jobs": "compare --builtin chat --jobs",
    "--max-replicas": "plan capacity chat.yaml --max-replicas",
    "--sizes": "plan combos chat.yaml --gpus h100:8:2 --sizes",
}


@pytest.mark.parametrize("count", HUGE)
@pytest.mark.parametrize("name", CALLS)
def test_a_count_that_nobody_has_is_an_error_in_python(name: str, count: int) -> None:
    with pytest.raises(hw.HeadwayError, match=r"expected (at most|integer|more than|1 to)|<= "):
        CALLS[name](count)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"workload.arrivals": {"kind": "curve", "step_s": 10, "rates": [1, 1e12]}},
            "would be drawn; expected at most",
        ),
        ({"workload.arrivals": 1e12}, "would be drawn; expected at most"),
        ({"workload.arrivals": {"kind": "deterministic", "rate": 1e300}}, "would be drawn; expected at most"),
        ({"workload.duration_s": 1e300}, "would be drawn; expected at most"),
        ({"workload.arrivals": {"kind": "gamma", "rate": 1, "cv": 1e-300}}, "cv: 1e-300; expected 0.001 to 1000"),
        ({"workload.arrivals": {"kind": "gamma", "rate": 1, "cv": 1e300}}, "expected 0.001 to 1000"),
        ({"observe.period_s": 1e-300}, "period_s must be 0, or 0.001 or more"),
        ({"workload.prompt_tokens": {"kind": "lognormal", "mean": 9, "cv": 1e300}}, "expected 0 to 1000"),
    ],
)
def test_numbers_with_which_a_run_would_not_end(changes: dict[str, Any], words: str) -> None:
    document = {**SMALL, "workload": {"prompt_tokens": 20, "output_tokens": 3, "arrivals": 5.0, "duration_s": 30.0}}
    with pytest.raises(hw.HeadwayError, match=words):
        hw.simulate(document, changes)


@pytest.mark.parametrize("option", COMMANDS)
def test_a_count_that_nobody_has_is_an_error_of_the_command_line(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "chat.yaml"]) == 0
    for count in HUGE:
        assert main([*COMMANDS[option].split(), str(count)]) == 2
        assert "Traceback" not in capfd.readouterr().err
