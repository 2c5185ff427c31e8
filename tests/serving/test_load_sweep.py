"""Loads from one client to beyond saturation: on a queue whose limits are known, and on an emulated engine."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import numpy as np
import pytest

import serving
from headway import records
from headway.cli import load_sweep, main
from headway.cli.load_twin import Twin
from headway.core.errors import HeadwayError
from headway.core.request import Request
from headway.report.render import page as html
from headway.serving.load_generator import page
from headway.serving.load_generator import run as load_generator
from headway.serving.load_generator.answer import Answer
from headway.serving.load_generator.drive import Sent
from headway.serving.load_generator.results import Slo, measured
from headway.serving.load_generator.run import Load
from headway.serving.load_generator.sweep import PRECISION, HighestRate, Point, Sweep, next_trial, sweep
from headway.workload.generate import generate
from headway.workload.spec import WorkloadSpec, resolved
from headway.workload.table import Workload

SERVICE_S = 0.1
SLO = Slo(ttft_s=0.35)


def loaded(sent: list[Sent], slo: Slo | None = SLO, is_stopped: bool = False) -> Load:
    columns = {"arrival_s": [0.0], "prompt_tokens": [1], "output_tokens": [1]}
    table = Workload({name: np.array(column) for name, column in columns.items()})
    return Load(sent, table, measured(sent, slo), (), 0, is_stopped)


def served(arrivals_s: list[float]) -> list[Sent]:
    """One server takes `SERVICE_S` for each request, in order; an answer has two tokens."""
    sent, free_s = [], 0.0
    for i, at_s in enumerate(arrivals_s):
        free_s = max(free_s, at_s) + SERVICE_S
        answer = Answer(at_s, [free_s - SERVICE_S / 2, free_s], [1, 1], free_s, 10, 0, 2)
        sent.append(Sent(Request(i, at_s, 10, 2), answer))
    return sent


async def on_a_queue(rate_rps: float | None, concurrency: int | None) -> Load:
    """Poisson arrivals; or clients that wait for each other."""
    if rate_rps is None:
        assert concurrency is not None
        return loaded(served([max(i - concurrency + 1, 0) * SERVICE_S for i in range(200)]))
    gaps_s = np.random.default_rng(1).exponential(1 / rate_rps, 800)
    return loaded(served(np.cumsum(gaps_s).tolist()))


def test_the_limits_of_a_queue_are_found() -> None:
    found = asyncio.run(sweep(on_a_queue, 16, 0.9))
    assert found.most_rps == pytest.approx(1 / SERVICE_S, rel=0.05)
    beyond = [each for each in found.open_points if each.rate_rps > 1.01 / SERVICE_S]  # type: ignore[operator]
    assert beyond and all(each.is_growing for each in beyond)
    assert not any(each.is_growing for each in found.open_points if each.rate_rps < 0.8 / SERVICE_S)  # type: ignore[operator]
    # Of M/D/1, rho / (1 + rho / (2 (1 - rho))) is the power, greatest at rho = 2 - 2 ** 0.5, about 0.59.
    assert found.knee is not None and found.knee.rate_rps is not None
    assert 0.4 < found.knee.rate_rps * SERVICE_S < 0.8
    assert found.highest is not None and found.highest.missed_rps is not None
    assert 0 < found.highest.rate_rps < found.highest.missed_rps < 1.1 / SERVICE_S
    assert found.highest.missed_rps <= PRECISION * found.highest.rate_rps
    shares = {each.rate_rps: each.load.measured.slo_attainment or 0.0 for each in found.open_points}
    grows = {each.rate_rps for each in found.open_points if each.is_growing}
    assert shares[found.highest.rate_rps] >= 0.9 and found.highest.rate_rps not in grows
    assert shares[found.highest.missed_rps] < 0.9 or found.highest.missed_rps in grows
    text = page.headline(found, "ttft=350ms", 0.9)
    assert "knee at" in text and f"up to {found.highest.rate_rps:.3g} requests/s" in text


def test_rates_go_on_until_waits_grow() -> None:
    """A closed loop with too few clients shows less than the engine can do."""
    found = asyncio.run(sweep(on_a_queue, 1))
    assert found.highest is None and found.open_points[-1].is_growing

    async def slow_clients(rate_rps: float | None, concurrency: int | None) -> Load:
        if rate_rps is None:
            return loaded(served([i * 0.3 for i in range(60)]))
        return await on_a_queue(rate_rps, concurrency)

    found = asyncio.run(sweep(slow_clients, 4))
    assert found.open_points[-1].is_growing and found.open_points[-1].rate_rps > 0.9 / SERVICE_S  # type: ignore[operator]


def test_a_stop_ends_the_sweep_and_an_engine_without_answers_has_none() -> None:
    async def stopped(rate_rps: float | None, concurrency: int | None) -> Load:
        return loaded(served([i * 0.3 for i in range(20)]), is_stopped=rate_rps is not None)

    found = asyncio.run(sweep(stopped, 4, 0.9))
    assert found.is_stopped and len(found.points) == 3 and found.highest is None

    async def refused(rate_rps: float | None, concurrency: int | None) -> Load:
        return loaded([Sent(Request(0, 0.0, 5, 5), Answer(0.0, end_s=0.1, kind="status 500"))])

    with pytest.raises(HeadwayError, match="answers no request whole"):
        asyncio.run(sweep(refused, 4))


def test_the_next_trial_lies_between_what_meets_and_what_misses() -> None:
    assert next_trial(HighestRate(4.0, None), 1.0) is None
    assert next_trial(HighestRate(0.0, 2.0), 2.0) == 1.0
    assert next_trial(HighestRate(4.0, 9.0), 1.0) == pytest.approx(6.0)
    assert next_trial(HighestRate(4.0, 4.3), 1.0) is None


@pytest.mark.ci
def test_the_page_has_a_row_for_each_load_and_marks_the_knee() -> None:
    found = asyncio.run(sweep(on_a_queue, 8, 0.9))
    predicted = [{"ttft_mean": 0.1, "e2e_mean": 0.2} if each.rate_rps else None for each in found.points]
    rows = page.rows(found, predicted)
    assert len(rows) == len(found.points) and {len(row) for row in rows} == {len(page.heads(predicted))}
    assert sum(row[0].endswith(", knee") for row in rows) == 1
    text = html(page.report(found, predicted, {"Model": "<m>"}, "t", ["a <note>"]), "c")
    assert "&lt;m&gt;" in text and "a &lt;note&gt;" in text
    bare = [None] * len(found.points)
    assert page.heads(bare) == list(page.HEADS) and "predicted" not in html(page.report(found, bare, {}, "t", []), "c")


@pytest.mark.parametrize(("rate_rps", "num"), [(0.3, 2), (4.0, 50), (90.0, 900)])
def test_arrivals_come_at_the_rate_of_their_load(rate_rps: float, num: int) -> None:
    full = resolved(WorkloadSpec(prompt_tokens=9, output_tokens=2, num_requests=9, arrivals=1.0))
    for seed in range(20):
        arrivals_s = generate(load_sweep._spec(full, num, None, rate_rps, None, seed), seed).arrival_s
        assert len(arrivals_s) == num and num / np.ptp(arrivals_s) == pytest.approx(rate_rps)
        assert np.std(np.diff(arrivals_s)) > 0.3 / rate_rps or num == 2  # at random


def test_a_sweep_of_an_emulated_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, folder, out = tmp_path / "page.html", tmp_path / "ran", tmp_path / "fitted.json"
    with serving.closing(
        engine := serving.emulator("--speed", "10", "--max-num-seqs", "8", "--enable-prompt-tokens-details")
    ):
        words = (
            f"{engine.url} --sweep --num-requests 8 --prompt-tokens 20 --output-tokens 6 --concurrency 8 --slo e2e=9"
            f" --no-warm-up --gpu h100 --page {file} --records {folder} --json"
        )
        assert main(["load", *words.split()]) == 0
        found = json.loads(capsys.readouterr().out)
        points = found["points"]
        assert [each["concurrency"] for each in points[:2]] == [1, 8] and len(points) >= 3
        assert all(each["measured"]["num_completed"] >= 8 for each in points)
        assert {each["measured"]["cached_prompt_share"] for each in points} == {0}
        rates = [each["rate_rps"] for each in points[2:]]
        # Where the limits are is tested on a queue: here a busy machine moves them.
        assert rates == sorted(rates) and {found["knee_rps"], found["highest"]["rate_rps"]} <= {*rates}
        # A load whose tokens came all at once, as on a machine that stood still, is not compared.
        skipped = [note for note in found["notes"] if "no prediction" in note]
        assert len(skipped) == sum(each["predicted"] is None for each in points)
        assert all(each["predicted"] is None or each["predicted"]["e2e_mean"] > 0 for each in points)
        assert len(list(folder.iterdir())) == len(points) and len(records.load(folder / "clients-1")[0].replicas) == 1
        assert "Latency against throughput" in file.read_text()
        trace = tmp_path / "trace.csv"
        trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,40,3\n0.01,50,4\n0.02,60,5\n")
        assert main(["load", engine.url, "--trace", str(trace), "--sweep", "--num-requests", "4", "--json"]) == 0
        of_trace = [each["measured"] for each in json.loads(capsys.readouterr().out)["points"]]
        assert {(each["num_requests"], each["output_tokens"]) for each in of_trace} == {(3, 12)}
        fleet = tmp_path / "fleet.yaml"
        fleet.write_text(
            "fleet: [{name: mine, model: qwen3-8b, gpu: a100, engine: {name: vllm-0.15, max_num_seqs: 8}}]"
        )
        assert main(["load", *words.split(), "--fleet", str(fleet)]) == 0
        assert not any("gpu" in note for note in json.loads(capsys.readouterr().out)["notes"])
        for words, why in (
            (f"--sweep --fleet {tmp_path / 'none.yaml'}", "no such file"),
            ("--sweep --rate 2", "--rate: not with a sweep"),
            ("--sweep --save-detailed x.json", "--save-detailed: not with a sweep"),
            ("--page x.html", "--page: goes with --sweep"),
            ("--sweep --pool a", "--pool: goes with --fleet"),
            ("--sweep --slo ttfb=2s", "ttft"),
            ("--sweep --write", "--write: goes with --calibrate and --fleet"),
            (f"--calibrate {out} --write", "--write: goes with --calibrate and --fleet"),
        ):
            assert main(["load", engine.url, *words.split()]) == 2
            assert why in capsys.readouterr().err
        monkeypatch.setattr(load_generator, "load", None)  # a load would fail
        pools = [{"name": name, "model": "qwen3-8b", "gpu": "a100", "engine": "vllm-0.15"} for name in "ab"]
        fleet.write_text(json.dumps({"fleet": pools}))
        words = f"{engine.url} --calibrate {out} --no-warm-up --fleet {fleet}"
        assert main(["load", *words.split()]) == 2
        assert (
            f"--calibrate: {fleet}: {engine.url} is no endpoint in it: which pool was measured?"
            in capsys.readouterr().err
        )
    assert not out.exists()


def test_loads_are_predicted_by_the_pool_of_the_fleet_file(tmp_path: Path) -> None:
    found = asyncio.run(sweep(on_a_queue, 8, 0.9))
    few = Point(3.0, None, loaded(served([0.0, 1.0])))
    at_once = served([float(i) for i in range(8)])
    for each in at_once:
        each.answer.chunk_s[0] = each.answer.chunk_s[1]
    points = [*found.points, few, Point(5.0, None, loaded(at_once))]
    predicted = {}
    for gpu in ("h100", "a100"):
        fleet = f"fleet: [{{name: mine, model: qwen3-8b, gpu: {gpu}, engine: {{name: vllm-0.15, max_num_seqs: 8}}}}]"
        twin = Twin.of(points, fleet, None, "qwen3-8b", True)
        assert [note.split(":")[0] for note in twin.notes] == [each.name for each in points[-2:]]
        assert "fewer than 5 whole answers" in twin.notes[0] and "tpot_s is 0" in twin.notes[1]
        predicted[gpu] = twin.predicted()
        assert predicted[gpu][-2:] == [None, None]
    engine, file = {"name": "vllm-0.15", "max_num_seqs": 8}, tmp_path / "several.yaml"
    file.write_text(json.dumps({"fleet": [
        {"name": gpu, "model": "qwen3-8b", "gpu": gpu, "engine": engine, "endpoints": [f"http://{gpu}:8000/v1"]}
        for gpu in predicted
    ]}))  # fmt: skip
    for gpu, alone in predicted.items():
        assert Twin.of(points, "", file, "qwen3-8b", True, "http://other", gpu).predicted() == alone
        assert Twin.of(points, "", file, "qwen3-8b", True, f"http://{gpu}:8000").predicted() == alone
    for on_h100, on_a100 in zip(predicted["h100"][:-2], predicted["a100"][:-2], strict=True):
        assert on_h100 is not None and on_a100 is not None and 0 < on_h100["e2e_mean"] < on_a100["e2e_mean"]


def test_a_load_in_which_the_engine_stood_still_is_left_out_of_the_fit() -> None:
    """Loads that differ by queueing alone stay, however slow the engine is beside its profile."""
    points = list(asyncio.run(sweep(on_a_queue, 8, 0.9)).points)
    fleet = "fleet: [{name: mine, model: qwen3-8b, gpu: h100, engine: {name: vllm-0.15, max_num_seqs: 8}}]"
    twin = Twin.of(points, fleet, None, "qwen3-8b", True)
    assert twin.without_standstills() == twin
    stuck = served([float(i) for i in range(8)])
    for each in stuck:
        answer = each.answer
        answer.chunk_s[:] = [answer.sent_s + 1000 * (at_s - answer.sent_s) for at_s in answer.chunk_s]
        answer.end_s = answer.chunk_s[-1]
    twin = Twin.of([*points, Point(7.0, None, loaded(stuck))], fleet, None, "qwen3-8b", True)
    kept = twin.without_standstills()
    assert kept.runs == (*twin.runs[:-1], None) and twin.runs[-1] is not None
    assert kept.notes[-1].startswith("7/s: left out of the fit: ")


def test_a_fit_that_is_worse_at_unseen_loads_is_doubted() -> None:
    before = {"e2e_mean": 20.0, "itl_mean": 10.0, "ttft_mean": 30.0}
    assert not [*load_sweep._doubts({"before": before, "held_out": {}})]
    assert not [*load_sweep._doubts({"before": before, "held_out": before})]
    (doubt,) = load_sweep._doubts({"before": before, "held_out": {**before, "itl_mean": 11.0, "ttft_mean": 40.0}})
    assert doubt.startswith("ITL, TTFT of loads left out of the fit: predicted worse than before.")


def test_power_is_of_open_loops_with_answers() -> None:
    silent = loaded([Sent(Request(0, 0.0, 5, 5), Answer(0.0, end_s=0.1, kind="x"))])
    good = loaded(served([0.0, 1.0]))
    points = (Point(None, 1, good), Point(1.0, None, good), Point(2.0, None, silent))
    assert Sweep(points, None, False).knee is points[1] and math.isnan(points[2].e2e_s)
    assert Sweep(points[:1], None, False).knee is None
