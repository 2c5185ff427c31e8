"""`headway calibrate`, from files to a file that a simulation uses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway import catalog
from headway.catalog.coefficients import CoefficientFile
from headway.cli import main
from made_up_measurements import all_reduce, attention, gemm, runs, write

needs_data = pytest.mark.skipif("HEADWAY_DATA" not in os.environ, reason="HEADWAY_DATA is unset")
SIMULATE = (
    "simulate --model llama-3.1-8b --gpu h100 --engine vllm-0.15 --rate 2 --num-requests 40 --prompt-tokens 500"
    " --output-tokens 50 --json --coefficients"
).split()


@pytest.fixture
def tables(tmp_path: Path) -> list[str]:
    found = {"gemm": gemm(), "attention": attention(), "all_reduce": [*all_reduce(2), *all_reduce(8)]}
    return [str(write(tmp_path / f"{name}.csv", rows)) for name, rows in found.items()]


def calibrate(*args: object) -> int:
    return main(["calibrate", "--gpu", "h100", "--engine", "vllm-0.15", *map(str, args)])


def test_tables_to_coefficients_to_a_simulation(
    tables: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.json"
    assert calibrate(*tables, "--out", out, "--source", "us, 2026") == 0
    printed = capsys.readouterr().out
    assert "gemm.bf16" in printed and f"wrote {out}" in printed
    assert "taken from the catalog for h100-80gb-sxm (measured on it): gemm.fp8" in printed
    file = msgspec.json.decode(out.read_bytes(), type=CoefficientFile)
    assert file.gpus == ("h100-80gb-sxm",)
    assert "us, 2026: all_reduce.2, all_reduce.8, decode_attention, gemm.bf16" in file.kernels.source
    assert file.kernels.residuals["gemm.bf16"] < 0.05
    assert main([*SIMULATE, str(out)]) == 0
    mine = json.loads(capsys.readouterr().out)["results"][0]
    assert main(SIMULATE[:-1]) == 0
    catalogs = json.loads(capsys.readouterr().out)["results"][0]
    assert mine["calibrated"] is True
    assert mine["metrics"]["tpot_s.mean"] == pytest.approx(catalogs["metrics"]["tpot_s.mean"], rel=0.1)
    slow = json.loads(out.read_text())
    slow["kernels"]["gemm"]["bf16"]["memory_efficiency"] /= 4
    out.write_text(json.dumps(slow))
    assert main([*SIMULATE, str(out)]) == 0
    slower = json.loads(capsys.readouterr().out)["results"][0]
    assert slower["metrics"]["tpot_s.mean"] > 2 * mine["metrics"]["tpot_s.mean"]


def test_json_says_all(tables: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate(*tables, "--json") == 0
    found: Any = json.loads(capsys.readouterr().out)
    assert {fit["key"] for fit in found["fits"]} >= {"gemm.bf16", "decode_attention", "all_reduce.8"}
    assert [file["num_used"] for file in found["files"]] == [len(gemm()), len(attention()), 46]
    assert found["out"] is None


def test_a_gpu_without_all_kernels_is_not_calibrated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, out = write(tmp_path / "a.csv", gemm("l4")), tmp_path / "l4.json"
    args = ["calibrate", str(table), "--gpu", "l4", "--engine", "vllm-0.15", "--out", str(out), "--source", "us"]
    assert main(args) == 2
    assert "are faster than the peaks of l4 allow" in capsys.readouterr().err
    table = write(tmp_path / "a.csv", [{**r, "latency_ms": float(str(r["latency_ms"])) * 12} for r in gemm("l4")])
    assert main(args) == 0
    assert "count as uncalibrated" in capsys.readouterr().out
    file = msgspec.json.decode(out.read_bytes(), type=CoefficientFile)
    assert (file.gpus, file.like) == ((), ("l4",))


def test_rows_of_another_gpu_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate(write(tmp_path / "a.csv", gemm("l40s"))) == 2
    assert f"nothing that can be used for h100-80gb-sxm: {tmp_path / 'a.csv'}: 42 of l40s" in capsys.readouterr().err


def test_the_same_table_twice_counts_once(tables: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate(tables[0], tables[0], "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["files"][-1]["left_out"] == {"that are duplicates": 42}
    assert found["fits"][0]["num_fitted"] + found["fits"][0]["num_held_out"] == 42


def test_a_fit_that_fails_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, out = write(tmp_path / "a.csv", attention()), tmp_path / "mine.json"
    slow = write(
        tmp_path / "b.csv",
        [{**row, "latency_ms": float(str(row["latency_ms"])) * (20 if row["isl"] == 1 else 1)} for row in attention()],
    )
    out.write_text("before")
    assert calibrate(slow, "--out", out, "--source", "us") == 2
    assert "memory_efficiency leaves its physical bounds" in capsys.readouterr().err
    assert out.read_text() == "before"
    assert calibrate(table, "--out", out, "--source", "us") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "b.csv", "mine.json"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere.csv"], "nowhere.csv: no such file"),
        (["nowhere.json"], "nowhere.json: no such file"),
        (["odd.csv"], "odd.csv: line 1: not recognised; expected logs of iterations"),
        (["empty.csv"], "empty.csv: the file is empty"),
        (["binary.csv"], "binary.csv: line 1: not recognised"),
        (["torn.gz"], "torn.gz: the gzip file is truncated"),
        (["header.csv"], "nothing that can be used for h100-80gb-sxm: header.csv: no rows"),
        (["short.csv"], "nothing could be fitted for h100-80gb-sxm: gemm.bf16: 1 usable shapes, 13 are needed"),
        (["nan.json"], "rate_rps is nan"),
        (["odd.csv", "--out", "x.json"], "--source is missing"),
        (["odd.csv", "--gpu", "h1000"], "unknown GPU 'h1000'; did you mean"),
        (["odd.csv", "--engine", "vlm"], "unknown engine 'vlm'; did you mean"),
        ([], "Missing argument 'MEASUREMENTS...'"),
    ],
)
def test_mistakes_are_one_line(
    args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("odd.csv").write_text("a,b\n1,2\n")
    Path("empty.csv").write_text("")
    header = '"gemm_dtype","m","n","k","latency_ms","system"\r\n'
    Path("header.csv").write_text(header)
    Path("short.csv").write_text(header + '"bfloat16",1,4096,4096,"0.02",h100_sxm\r\n')
    keys = ("completed", "duration", "total_input_tokens", "total_output_tokens", "mean_ttft_ms", "mean_tpot_ms")
    Path("nan.json").write_text(json.dumps(dict.fromkeys(keys, float("nan"))))
    Path("binary.csv").write_bytes(b"\x80\x81\xff\n")
    Path("torn.gz").write_bytes(b"\x1f\x8b\x08")
    assert calibrate(*args) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error


def test_mistakes_in_coefficients_of_a_scenario(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, message in (("{", "not a file of coefficients"), ("{}", "not a file of coefficients")):
        (tmp_path / "c.json").write_text(text)
        assert main([*SIMULATE, str(tmp_path / "c.json")]) == 2
        assert message in capsys.readouterr().err
    assert main([*SIMULATE, str(tmp_path / "none.json")]) == 2
    assert "--coefficients" in capsys.readouterr().err


def served(folder: Path) -> list[str]:
    """Results of `vllm bench serve` on an engine with an overhead of 2 ms a step."""
    paths = []
    for i, run in enumerate(runs()):
        num, tokens = run.num_requests, int(run.output_tokens)
        ttft_ms, tpot_ms = 1e3 * run.latencies_s["ttft_mean"], 1e3 * run.latencies_s["tpot_mean"]
        result = {
            "model_id": run.model,
            "completed": num,
            "duration": num / run.rate_rps,
            "mean_ttft_ms": ttft_ms,
            "total_input_tokens": num * int(run.prompt_tokens),
            "total_output_tokens": num * tokens,
            "mean_tpot_ms": tpot_ms,
            "mean_e2el_ms": ttft_ms + tpot_ms * (tokens - 1),
            "request_rate": run.rate_rps,
        }
        paths.append(folder / f"bench-{i}.json")
        paths[-1].write_text(json.dumps(result))
    return [str(path) for path in paths]


@pytest.mark.ci
def test_results_of_a_load_generator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.json"
    args = ["--out", out, "--source", "us", "--engine-version", "0.99", "--max-num-batched-tokens", 8192]
    assert calibrate(*served(tmp_path), *args) == 0
    assert "overhead.vllm-0.15" in capsys.readouterr().out
    file = msgspec.json.decode(out.read_bytes(), type=CoefficientFile)
    overhead = file.engines["vllm-0.15"]
    assert overhead.step_s == pytest.approx(0.002, rel=0.1)
    assert (overhead.version, overhead.source) == ("0.99", "us")
    assert overhead.residuals["median_absolute"] < 0.02
    assert "us" not in file.kernels.source.split(":")[0]


@pytest.mark.long
@needs_data
def test_on_served_experiments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same numbers for all models; the experiment that contradicts itself is left out.

    A fifth of the experiments, as all of them take minutes.
    """
    whole = Path(os.environ["HEADWAY_DATA"]) / "measured" / "vllm015_serving_train.csv"
    lines = whole.read_text().splitlines()
    at = lines[0].split(",").index("exp_id")
    ids = [*dict.fromkeys(line.split(",")[at] for line in lines[1:])]
    kept = {"67", *ids[::5]}
    path = tmp_path / "some.csv"
    path.write_text("\n".join([lines[0], *(line for line in lines[1:] if line.split(",")[at] in kept)]) + "\n")
    assert calibrate(path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert "experiment 67: its ITL is 1.29x" in found["files"][0]["notes"][0]
    (fit,) = found["fits"]
    assert fit["residual"] < 0.12
    assert all(value >= 0 for name, value in fit["values"].items() if name != "layer_s")
    assert fit["values"]["layer_s"] >= -15e-6  # in a graph, a kernel starts while the one before it ends
    assert fit["held_out"]["e2e_mean"] < 6 and fit["held_out"]["itl_mean"] < 6


@needs_data
@pytest.mark.parametrize("gpu", ["a100", "h100", "h200", "l40s"])
def test_on_measured_tables(gpu: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Medians on held-out shapes, FP8 products apart; and the shipped coefficients are what this gives."""
    folder = Path(os.environ["HEADWAY_DATA"]) / "measured"
    tables = sorted(folder.glob("aic_[acgm]*.csv.gz"))
    args = ["calibrate", *map(str, tables), "--gpu", gpu, "--engine", "vllm-0.15", "--json"]
    assert main(args) == 0
    found = {fit["key"]: fit for fit in json.loads(capsys.readouterr().out)["fits"]}
    for key in ("gemm.bf16", "decode_attention", "prefill_attention", "all_reduce.2", "all_reduce.4", "all_reduce.8"):
        assert found[key]["residual"] < 0.0805, key
    shipped = catalog.coefficients(catalog.gpu(gpu).name, "vllm-0.15").kernels
    for key, known in (("gemm.bf16", shipped.gemm["bf16"]), ("decode_attention", shipped.decode_attention)):
        assert found[key]["values"]["memory_efficiency"] == pytest.approx(known.memory_efficiency, rel=0.03)
    for fit in found.values():
        for name, value in fit["values"].items():
            assert value >= 0 and (not name.endswith("efficiency") or value <= 1)
