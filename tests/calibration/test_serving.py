"""Measured experiments: read strictly, replayed as they were run, and compared."""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from headway import catalog
from headway.calibration.replay import ReplayResult, SimulatedLatencies, engine, fleet, replay, workload
from headway.calibration.serving import OFFLOAD_BYTES, REQUIRED, ServingExperiment, read
from headway.calibration.validation import OVERALL, compare, validation
from headway.catalog.coefficients import CoefficientFile
from headway.cli import main
from headway.cli.validate import EXCEEDED
from headway.core.errors import HeadwayError
from headway.core.fleet import GREEDY

Row = dict[str, str]
LATENCIES: Row = {
    "e2e_mean_ms": "1100",
    "e2e_p90_ms": "1200",
    "e2e_p99_ms": "1300",
    "ttft_mean_ms": "30",
    "ttft_p90_ms": "40",
    "ttft_p99_ms": "50",
    "itl_mean_ms": "10.8",
}
SETTINGS: Row = {
    "exp_id": "1", "model": "meta-llama/Llama-3.1-8B-Instruct", "workload": "chat", "gpu": "H100", "tp": "1",
    "precision": "FP16", "max_num_batched_tokens": "2048", "cpu_kv_offload": "", "gpu_mem_util": "", "dp": "",
    "engine": "vLLM 0.15.1", "sys_prompt_len": "100", "question_len": "60", "output_len": "100",
}  # fmt: skip
STAGES: list[Row] = [
    {"stage": "summary", "rate_rps": "", "duration_s": ""},
    {"stage": "0", "rate_rps": "2", "duration_s": "30"},
    {"stage": "1", "rate_rps": "5.0", "duration_s": "30"},
]
Change = Callable[[list[Row]], object]


def write(path: Path, change: Change = len, **settings: str) -> Path:
    rows = [{**SETTINGS, **stage, **LATENCIES, **settings} for stage in STAGES]
    change(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture
def experiment(tmp_path: Path) -> ServingExperiment:
    return read(write(tmp_path / "m.csv"))[0][0]


def one(path: Path, **settings: str) -> ServingExperiment:
    return read(write(path / "one.csv", **settings))[0][0]


def test_reads_settings_stages_and_summary(experiment: ServingExperiment) -> None:
    assert (experiment.model.name, experiment.gpu.name) == ("llama-3.1-8b", "h100-80gb-sxm")
    assert (experiment.tp, experiment.dp, experiment.engine) == (1, 1, "vllm-0.15")
    assert [(stage.rate_rps, stage.duration_s) for stage in experiment.stages] == [(2.0, 30.0), (5.0, 30.0)]
    assert experiment.measured.e2e_mean_ms == 1100
    assert experiment.measured.tpot_ms(100) == pytest.approx(1070 / 99)
    assert experiment.contradiction is None


@pytest.mark.parametrize(
    ("given", "name", "dtype"),
    [
        (
            {"model": "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic", "precision": "FP8", "tp": "2"},
            "llama-4-scout-17b-16e-instruct-fp8-dynamic",
            "fp8",
        ),
        (
            {"model": "someone/Llama-4-Scout-17B-16E-Instruct-w8a8", "precision": "FP8", "tp": "2"},
            "llama-4-scout",
            "fp8",
        ),
        ({"model": "someone/Mixtral-8x7B-Instruct-v0.1-FP8", "precision": "fp8"}, "mixtral-8x7b", "fp8"),
        ({"model": "meta-llama/Llama-2-70b-chat-hf", "tp": "8"}, "llama-2-70b", "bf16"),
        ({"model": "RedHatAI/Meta-Llama-3.1-70B-Instruct-quantized.w8a8", "precision": "FP8"}, "llama-3.1-70b", "fp8"),
    ],
)
def test_finds_models_of_republished_variants(tmp_path: Path, given: Row, name: str, dtype: str) -> None:
    model = one(tmp_path, **given).model
    assert (model.name, model.dtype) == (name, dtype)


@pytest.mark.parametrize(
    ("name", "found"),
    [("A100-80", "a100-80gb"), ("a100", "a100-80gb"), ("L40S", "l40s"), ("H100", "h100-80gb-sxm")],
)
def test_finds_gpus(tmp_path: Path, name: str, found: str) -> None:
    assert one(tmp_path, gpu=name).gpu.name == found


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("", 0), ("no", 0), ("False", 0), ("yes", OFFLOAD_BYTES), ("8", 8 * 2**30)]
)
def test_host_memory_is_yes_no_or_gib(tmp_path: Path, text: str, num_bytes: float) -> None:
    assert one(tmp_path, cpu_kv_offload=text).kv_offload_bytes == num_bytes


def put(index: int, **cells: str) -> Change:
    return lambda rows: rows[index].update(cells)


def again(rows: list[Row]) -> None:
    rows.append(dict(rows[1]))


BAD: list[tuple[Change, str]] = [
    (put(1, model="llama-9"), "line 3: experiment 1: unknown model 'llama-9'"),
    (put(1, gpu="H1000"), "line 3: experiment 1: unknown GPU 'H1000'"),
    (put(2, engine="mystery 1.0"), "unknown engine 'mystery'"),
    (put(1, precision="FP5"), "unknown precision 'FP5'"),
    (put(1, ttft_mean_ms="0"), "ttft_mean_ms is '0'; expected a number above 0"),
    (put(1, e2e_mean_ms="-3"), "e2e_mean_ms is '-3'"),
    (put(1, itl_mean_ms=""), "itl_mean_ms is ''"),
    (put(1, e2e_p99_ms="nan"), "e2e_p99_ms is 'nan'"),
    (put(1, rate_rps="inf"), "rate_rps is 'inf'"),
    (put(1, tp="1.5"), "tp is '1.5'; expected a whole number"),
    (put(1, tp="3"), "tp 3 does not divide"),
    (put(1, gpu_mem_util="90"), "gpu_mem_util 90; expected a share"),
    (put(1, itl_mean_ms="0.0108"), "latencies below 0.1 ms"),
    (put(1, e2e_mean_ms="1.1", e2e_p90_ms="1.2", e2e_p99_ms="1.3"), "mixed units"),
    (put(1, itl_mean_ms="10800"), "mixed units"),
    (put(1, ttft_p99_ms="0.05"), "mixed units"),
    (put(1, cpu_kv_offload="perhaps"), "cpu_kv_offload is 'perhaps'"),
    (again, "stage 0 a second time (first on line 3)"),
    (put(1, tp="2"), "tp differs between its rows"),
    (lambda rows: rows.pop(0), "needs one row with stage 'summary'"),
    (lambda rows: rows.__delitem__(slice(1, 3)), "has no stage"),
]


def test_shape_seats_prompts_caching_and_sampling_come_from_the_file(tmp_path: Path) -> None:
    given = {
        "pp": "2",
        "max_num_seqs": "64",
        "prefix_caching": "no",
        "prompt_groups": "3",
        "prompts_per_group": "0",
        "sampling": "greedy",
        "engine": "vLLM 0.16.0",
        "cpu_kv_offload": "yes",
    }
    experiment = one(tmp_path, **given)
    used = engine(experiment)
    assert (used.max_num_seqs, used.prefix_caching, used.kv_offload_bytes) == (64, False, 0)
    assert used.version == "0.16.0"
    assert fleet(experiment).pools[0].parallel.pp == 2
    assert experiment.model.sampling == GREEDY
    prefix = workload(experiment, 0).prefix
    assert prefix is not None
    assert sorted(set(prefix.ids[::2].tolist())) == [0, 1, 2]
    assert len(set(prefix.ids[1::2].tolist())) == len(prefix.ids) // 2  # no prompt twice


@pytest.mark.parametrize(
    ("column", "text", "named"),
    [("ep", "maybe", "ep is 'maybe'; expected yes or no"), ("sampling", "gredy", "greedy"), ("pp", "0", "pp is '0'")],
)
def test_bad_settings_are_named(tmp_path: Path, column: str, text: str, named: str) -> None:
    with pytest.raises(HeadwayError, match=named):
        one(tmp_path, **{column: text})


@pytest.mark.parametrize(("change", "named"), BAD, ids=[named for _, named in BAD])
def test_bad_rows_are_named_and_refused(tmp_path: Path, change: Change, named: str) -> None:
    with pytest.raises(HeadwayError) as error:
        read(write(tmp_path / "m.csv", change))
    assert named in str(error.value)
    assert "bad row" in str(error.value)


def test_bad_rows_are_counted_and_can_be_left_out(tmp_path: Path) -> None:
    def change(rows: list[Row]) -> None:
        rows += [{**row, "exp_id": "2", "ttft_mean_ms": "-1"} for row in rows]

    file = write(tmp_path / "m.csv", change)
    with pytest.raises(HeadwayError, match=r"3 bad rows: line 5: experiment 2: .*--skip-bad"):
        read(file)
    experiments, refused = read(file, skip_bad=True)
    assert [experiment.id for experiment in experiments] == ["1"]
    assert len(refused) == 3


@pytest.mark.parametrize("name", REQUIRED)
def test_missing_columns_are_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(HeadwayError, match=f"line 1: missing columns: {name}"):
        read(write(tmp_path / "m.csv", lambda rows: [row.pop(name) for row in rows]))


def test_seconds_for_milliseconds_are_named(tmp_path: Path) -> None:
    def change(rows: list[Row]) -> None:
        for row in rows:
            row["e2e_mean_s"] = row.pop("e2e_mean_ms")

    with pytest.raises(HeadwayError, match="e2e_mean_s is there: give milliseconds"):
        read(write(tmp_path / "m.csv", change))


def test_unknown_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match="unknown column 'gpu_mem_utl'; did you mean 'gpu_mem_util'"):
        read(write(tmp_path / "m.csv", gpu_mem_utl="0.9"))


def test_the_load_is_what_was_measured(experiment: ServingExperiment) -> None:
    table = workload(experiment, seed=3)
    assert len(table) == 2 * 30 + 5 * 30
    assert np.count_nonzero(table.arrival_s < 30) == 60
    assert (np.diff(table.arrival_s) >= 0).all()
    assert set(table.prompt_tokens) == {160}
    assert set(table.output_tokens) == {100}
    assert table.prefix is not None
    ids = table.prefix.ids.reshape(-1, 2)
    assert len(set(ids[:, 0])) == 10
    assert len(set(ids[:100, 1])) == 100
    assert (ids[:100] == ids[100:200]).all()
    assert set(table.prefix.tokens) == {100, 60}
    assert (workload(experiment, seed=3).arrival_s == table.arrival_s).all()
    assert (workload(experiment, seed=4).arrival_s != table.arrival_s).any()


def test_a_prompt_without_a_shared_part_has_one_segment(experiment: ServingExperiment) -> None:
    table = workload(replace(experiment, sys_prompt_tokens=0), seed=0)
    assert table.prefix is not None
    assert len(table.prefix.ids) == len(table)


def test_engine_settings_are_those_of_the_experiment(tmp_path: Path) -> None:
    found = one(tmp_path, gpu_mem_util="0.95", dp="3", max_num_batched_tokens="1024")
    assert engine(found).gpu_memory_utilization == 0.95
    assert engine(found).max_num_batched_tokens == 1024
    assert engine(found).max_num_seqs == 128
    pool = fleet(found).pools[0]
    assert (pool.replicas, pool.parallel.tp) == (3, 1)


def test_host_memory_is_the_caches_second_tier(experiment: ServingExperiment) -> None:
    pool = fleet(replace(experiment, kv_offload_bytes=8e9)).pools[0]
    assert (pool.engine.kv_offload_bytes, pool.engine.prefix_caching) == (8e9, True)
    assert pool.gpu == experiment.gpu


@pytest.mark.parametrize(
    "settings",
    [
        {"gpu": "A100-80", "tp": "2", "max_num_batched_tokens": "8192"},
        {"gpu": "L40S", "precision": "FP8", "gpu_mem_util": "0.95"},
        {"gpu": "A100-80", "precision": "FP8"},
        {"dp": "2", "cpu_kv_offload": "yes"},
        {"gpu": "A100-80", "model": "mistralai/Mixtral-8x7B-Instruct-v0.1", "tp": "4"},
        {"gpu": "L40S", "model": "mistralai/Mixtral-8x7B-Instruct-v0.1", "tp": "4", "precision": "FP8"},
        {"gpu": "L40S", "model": "meta-llama/Llama-2-70b-hf", "tp": "8", "max_num_batched_tokens": "1024"},
    ],
)
def test_every_combination_runs(tmp_path: Path, settings: Row) -> None:
    found = replay(one(tmp_path, **settings), [0])
    assert found.num_unfinished == 0
    assert len(found.overall.e2e_ms) == 210
    assert sum(len(stage.e2e_ms) for stage in found.stages) == 210
    assert 0 < found.overall.ttft_ms.min() < found.overall.e2e_ms.max()
    assert 1 < found.overall.tpot_ms.mean() < 1000


def test_a_slower_client_path_shows_in_ttft_and_not_in_tpot(experiment: ServingExperiment) -> None:
    profile = replace(catalog.engine("vllm-0.15"), request_overhead_s=0.0, response_overhead_s=0.0)
    slow = replace(profile, request_overhead_s=0.05)
    fast, late = replay(experiment, [0], profile), replay(experiment, [0], slow)
    assert late.overall.ttft_ms.mean() - fast.overall.ttft_ms.mean() == pytest.approx(50, rel=0.05)
    assert late.overall.tpot_ms.mean() == pytest.approx(fast.overall.tpot_ms.mean(), rel=0.02)


def same(experiment: ServingExperiment, factor: float) -> ReplayResult:
    m = experiment.measured
    e2e, ttft = np.full(10, m.e2e_mean_ms * factor), np.full(10, m.ttft_mean_ms * factor)
    found = SimulatedLatencies(e2e, ttft, (e2e - ttft) / 99)
    return ReplayResult(found, (found, found), 0)


def test_errors_are_signed_and_their_means_are_not(experiment: ServingExperiment) -> None:
    up, down = compare(experiment, same(experiment, 1.1), True), compare(experiment, same(experiment, 0.9), True)
    assert up.errors["e2e_mean"].error_pct == pytest.approx(10)
    assert down.errors["ttft_mean"].error_pct == pytest.approx(-10)
    assert up.errors["tpot_mean"].error_pct == pytest.approx(10)
    found = validation([up, down])
    assert found.overall["e2e_mean"] == pytest.approx(10)
    assert found.bias["e2e_mean"] == pytest.approx(0)
    assert set(found.overall) == set(OVERALL)


def test_a_contradiction_is_flagged_and_left_out_of_the_second_mean(
    tmp_path: Path, experiment: ServingExperiment
) -> None:
    odd = replace(one(tmp_path, itl_mean_ms="14"), id="odd")
    assert odd.contradiction is not None
    assert "1.30x" in odd.contradiction
    found = validation([compare(experiment, same(experiment, 1.1), True), compare(odd, same(odd, 2.0), True)])
    assert found.contradicting == ["odd"]
    assert found.consistent["e2e_mean"] == pytest.approx(10)
    assert found.overall["e2e_mean"] == pytest.approx(55)


def test_the_command_prints_json_and_fails_above_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write(tmp_path / "m.csv"))
    assert main(["validate", file, "--json", "--seeds", "1"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {"e2e_mean", "itl_mean", "ttft_mean"} <= set(printed["overall"])
    pair = printed["experiments"][0]["errors"]["e2e_mean"]
    assert pair["measured"] == 1100
    assert pair["error_pct"] == pytest.approx((pair["predicted"] / 1100 - 1) * 100)
    assert main(["validate", file, "--max-error", "0.01", "--seeds", "1"]) == EXCEEDED
    assert "above --max-error 0.01%: e2e_mean" in capsys.readouterr().err
    assert main(["validate", file, "--max-error", "1000", "--seeds", "1"]) == 0
    assert "mean absolute error" in capsys.readouterr().out


def test_the_command_names_what_cannot_be_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(rows: list[Row]) -> None:
        rows += [{**row, "exp_id": "2", "model": "llama-3.1-70b"} for row in rows]

    assert main(["validate", str(write(tmp_path / "m.csv", change)), "--json", "--seeds", "1"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [one["id"] for one in printed["experiments"]] == ["1"]
    assert "experiment 2: cannot be replayed: llama-3.1-70b (tp 1, pp 1) needs" in printed["refused"][0]
    assert main(["validate", str(write(tmp_path / "m.csv", model="llama-3.1-70b"))]) == 2
    assert "smallest tp that fits" in capsys.readouterr().err


def test_the_command_names_bad_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write(tmp_path / "m.csv", put(1, gpu="H1000")))
    assert main(["validate", file]) == 2
    assert "unknown GPU 'H1000'" in capsys.readouterr().err


def test_the_command_writes_a_scorecard_of_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(write(tmp_path / "m.csv")), str(write(tmp_path / "n.csv", exp_id="9"))]
    card = tmp_path / "card.md"
    assert main(["validate", *files, "--seeds", "1", "--scorecard", str(card), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [one["file"] for one in printed["experiments"]] == ["m.csv", "n.csv"]
    text = card.read_text()
    assert "headway validate m.csv n.csv --scorecard card.md" in text
    assert "| m.csv | 1 |" in text and "| n.csv | 1 |" in text


def test_the_command_takes_coefficients_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write(tmp_path / "m.csv"))
    own = catalog.coefficients("h100-80gb-sxm", "vllm-0.15")
    slow = CoefficientFile(("h100-80gb-sxm",), own.kernels, {"vllm-0.15": replace(own.overhead, step_s=0.1)})
    path = tmp_path / "slow.json"
    path.write_bytes(msgspec.json.encode(slow))
    found = []
    for more in ([], ["--coefficients", str(path)]):
        assert main(["validate", file, "--json", "--seeds", "1", *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["experiments"][0]["errors"]["tpot_mean"]["predicted"])
    assert found[1] - found[0] == pytest.approx(100, rel=0.02)


@pytest.mark.skipif("HEADWAY_DATA" not in os.environ, reason="HEADWAY_DATA is unset")
def test_measured_serving_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(os.environ["HEADWAY_DATA"]) / "measured" / "vllm015_serving_train.csv"
    assert main(["validate", str(file), "--json", "--seeds", "1"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["contradicting"] == ["67"]
    assert printed["num_experiments"] == 12
    consistent, overall = printed["consistent"], printed["overall"]
    assert consistent["e2e_mean"] <= 5
    assert consistent["itl_mean"] <= 5
    assert max(overall["ttft_mean"], consistent["ttft_mean"]) <= 10
    assert overall["e2e_mean"] <= 5


@pytest.mark.skipif("HEADWAY_DATA" not in os.environ, reason="HEADWAY_DATA is unset")
@pytest.mark.parametrize(("prefix", "model"), [("l8b", "llama-3.1-8b"), ("q30b", "qwen3-30b-a3b")])
def test_measured_requests_of_vllm_025_are_predicted(
    prefix: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Poisson arrivals at 4 and 9 a second with the Azure trace's lengths."""
    source = Path(os.environ["HEADWAY_DATA"]) / "measured" / "vllm025_h100_requests.csv.gz"
    header, *lines = gzip.decompress(source.read_bytes()).decode().splitlines()
    rows = [line for line in lines if line.startswith((f"{prefix},azure4,", f"{prefix},azure9,"))]
    path = tmp_path / "requests.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    flags = ["--model", model, "--gpu", "h100", "--engine", "vllm-0.25", "--greedy"]
    assert main(["validate", str(path), "--json", *flags]) == 0
    for found in json.loads(capsys.readouterr().out)["experiments"]:
        assert abs(found["errors"]["e2e_mean"]["error_pct"]) <= 5
        assert abs(found["errors"]["tpot_mean"]["error_pct"]) <= 5
