"""`headway load --calibrate`: a fit to loads of an engine whose step times are known, without an engine's clock."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("scipy")

from msgspec.structs import replace

import serving
from headway.calibration.replay import replay
from headway.catalog.load import coefficients_in
from headway.cli import main
from headway.cli.load_twin import Twin
from headway.core.request import Request
from headway.serving.load_generator import run
from headway.serving.load_generator.answer import Answer
from headway.serving.load_generator.drive import Sent
from headway.serving.load_generator.results import measured
from headway.serving.load_generator.run import Load
from headway.serving.load_generator.sweep import Point
from headway.workload.spec import WorkloadSpec
from headway.workload.table import Workload

FLEET = "fleet: [{name: mine, model: qwen3-8b, gpu: h100, engine: {name: vllm-0.15, max_num_seqs: 64}}]"


def _load(sent: list[Sent]) -> Load:
    columns = {"arrival_s": [0.0], "prompt_tokens": [1], "output_tokens": [1]}
    table = Workload({name: np.array(column) for name, column in columns.items()})
    return Load(sent, table, measured(sent, None), (), 0, False)


def _asked(rate_rps: float | None, concurrency: int | None, num: int) -> Point:
    """Requests of mixed lengths, with answers that are not known yet."""
    rng = np.random.default_rng(3)
    arrivals_s = np.cumsum(rng.exponential(1 / (rate_rps or concurrency or 1), num))
    sent = []
    for i, at_s in enumerate(arrivals_s.tolist()):
        prompt, output = int(rng.integers(200, 2000)), int(rng.integers(40, 200))
        answer = Answer(at_s, [at_s + 0.1, at_s + 2.0], [1, output - 1], at_s + 2.0, prompt, 0, output)
        sent.append(Sent(Request(i, at_s, prompt, output), answer))
    return Point(rate_rps, concurrency, _load(sent))


def _answered(point: Point, changed: dict[str, float]) -> Point:
    """The answers of an engine whose step times differ from the catalog's by these terms."""
    (found,) = Twin.of([point], FLEET, None, "qwen3-8b", True).runs
    assert found is not None
    known = found.coefficients
    times = replay(found.experiment, (0,), coefficients=replace(known, overhead=replace(known.overhead, **changed)))
    sent = []
    for each, ttft_ms, e2e_ms in zip(point.load.sent, times.overall.ttft_ms, times.overall.e2e_ms, strict=True):
        at_s, num = each.request.arrival_s, each.request.output_tokens
        chunks_s = (at_s + np.linspace(ttft_ms, e2e_ms, num) / 1e3).tolist()
        answer = Answer(at_s, chunks_s, [1] * num, chunks_s[-1], each.request.prompt_tokens, 0, num)
        sent.append(Sent(each.request, answer))
    return Point(point.rate_rps, point.concurrency, _load(sent))


SLOWER = {"step_s": 0.0015, "sequence_s": 2e-5}


def test_a_fit_to_loads_finds_an_engine_that_is_slower_than_the_catalog(tmp_path: Path) -> None:
    points = [_answered(_asked(rate_rps, None, 40), SLOWER) for rate_rps in (0.5, 2.0, 6.0, 12.0)]
    twin = Twin.of(points, FLEET, None, "qwen3-8b", True)
    before = twin.errors()
    fitted, (fit,) = twin.calibrated(tmp_path / "fit.json", "a test", "0.1")
    after = twin.errors(fitted)
    assert before["e2e_mean"] > 10 and before["itl_mean"] > 10
    assert all(after[key] < before[key] / 2 for key in before) and after["e2e_mean"] < before["e2e_mean"] / 10
    assert fit.held_out["e2e_mean"] < before["e2e_mean"] / 10, "loads that a fit has not seen are predicted, too"
    assert twin.errors(coefficients_in(tmp_path / "fit.json", "h100-80gb-sxm", "vllm-0.15")) == after


def test_without_scipy_nothing_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with serving.closing(engine := serving.emulator()):
        assert main(["load", engine.url, "--calibrate", str(tmp_path / "fitted.json"), "--gpu", "h100"]) == 2
        assert serving.metric(engine, "vllm:prompt_tokens_total") == 0
    assert "pip install 'headway[calibrate]'" in capsys.readouterr().err


@pytest.mark.ci
def test_the_command_sweeps_fits_and_tells_the_errors_before_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine answers what it is; the times of its loads are simulated."""

    async def load(target: Any, spec: WorkloadSpec, *_: Any) -> Load:
        rate_rps = None if spec.concurrency else float(spec.arrivals)  # type: ignore[arg-type]
        return _answered(_asked(rate_rps, spec.concurrency, min(spec.num_requests or 0, 40)), SLOWER).load

    monkeypatch.setattr(run, "load", load)
    out = tmp_path / "fitted.json"
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(FLEET)
    with serving.closing(engine := serving.emulator()):
        words = f"{engine.url} --calibrate {out} --gpu h100 --num-requests 40 --concurrency 8 --no-warm-up --json"
        assert main(["load", *words.split()]) == 0
        found = json.loads(capsys.readouterr().out)
        words = words.replace("--gpu h100", f"--fleet {fleet} --write").replace("--json", "")
        with monkeypatch.context() as patched:
            patched.setattr("headway.cli.load_sweep._held_out", lambda _: {"e2e_mean": 300.0, "itl_mean": 0.1})
            assert main(["load", *words.split()]) == 0
        assert f"{fleet} is as it was, as loads" in capsys.readouterr().out and fleet.read_text() == FLEET
        assert main(["load", *words.split()]) == 0
        assert f"{fleet} names it" in capsys.readouterr().out and "coefficients: " in fleet.read_text()
    errors = found["calibration"]
    assert errors["after"]["e2e_mean"] < errors["before"]["e2e_mean"] / 3 and errors["out"] == str(out)
    assert errors["held_out"]["e2e_mean"] < errors["before"]["e2e_mean"] and out.exists()
    for point in found["points"]:
        assert point["predicted"]["e2e_mean"] == pytest.approx(point["measured"]["e2e_s"]["mean"], rel=0.1)
