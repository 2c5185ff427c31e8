"""Logs of iterations: durations that are certain, and a fit that finds the terms that made them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from headway import catalog
from headway.calibration.steps.fit import SpanTimes, fit_steps
from headway.calibration.steps.read import Iteration, Span, is_steps, read
from headway.calibration.steps.regions import regions
from headway.catalog.coefficients import Coefficients
from headway.cli import main
from headway.core.errors import HeadwayError
from headway.core.fleet import Parallel, Pool
from headway.perf.step import StepModel

HEADER = "seq,scheduled_s,done_s,decodes,decode_context_tokens,prompt_tokens,prompt_chunks,running,waiting\n"
ENGINE = replace(catalog.engine("vllm-0.15"), max_num_seqs=1024)
POOL = Pool(
    name="p",
    model=replace(catalog.model("llama-3.1-8b"), sampling=None),
    gpu=catalog.gpu("h100"),
    engine=ENGINE,
    parallel=Parallel(1, 1, 1),
)
KNOWN = catalog.coefficients(POOL.gpu.name, ENGINE.name)


def written(path: Path, rows: str, about: str = "") -> Path:
    path.write_text(about + HEADER + rows)
    return path


def test_an_end_that_a_launch_delays_ends_no_span(tmp_path: Path) -> None:
    """Iteration 1 is processed only after the prompts of iteration 2 have been launched: their sum is certain."""
    rows = (
        "0,0.000,0.007,4,4000,0,,4,0\n"  # the engine was idle before
        "1,0.001,0.020,4,4004,0,,4,0\n"
        "2,0.008,0.035,4,4008,300,300:0,5,0\n"
        "3,0.021,0.042,5,4312,0,,5,0\n"
        "4,1.000,1.007,5,4317,0,,5,0\n"
    )
    log = read(written(tmp_path / "steps.csv", rows))
    assert [(len(span.iterations), round(span.seconds, 6)) for span in log.spans] == [
        (1, 0.007),
        (2, 0.028),
        (1, 0.007),
        (1, 0.007),
    ]
    assert log.num_used == log.num_rows == 5 and not log.left_out
    assert log.spans[1].iterations[1] == Iteration(4, 4008, ((300, 0),))


def test_an_engine_that_stands_still_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = "0,0.0,0.01,1,100,0,,1,0\n1,0.001,4.0,1,101,0,,1,0\n2,0.02,4.01,1,102,0,,1,0\n"
    log = read(written(tmp_path / "steps.csv", rows))
    assert [round(span.seconds, 6) for span in log.spans] == [0.01, 0.01]
    assert log.left_out == {"in which the engine stood still": 1}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("0,0.0,x,1,100,0,,1,0\n", "could not convert"),
        ("0,0.0,0.1,1,100,5,4:0,1,0\n", "not the sum"),
        ("0,0.0,0.1,1,100,5,5-0,1,0\n", "invalid literal"),
        ("0,0.0\n", "not an iteration"),
    ],
)
def test_a_bad_row_is_named_by_its_line(row: str, why: str, tmp_path: Path) -> None:
    good = "0,0.0,0.1,1,100,0,,1,0\n"
    with pytest.raises(HeadwayError, match=f"steps.csv:3: .*{why}|steps.csv:3: not an iteration"):
        read(written(tmp_path / "steps.csv", good + row))


def test_what_is_a_log(tmp_path: Path) -> None:
    about = "# " + json.dumps({"version": "0.25.1"}) + "\n"
    assert is_steps(written(tmp_path / "steps-0-1-0001.csv", "", about)) and is_steps(tmp_path)
    assert read(tmp_path).about == {"version": "0.25.1"}
    other = tmp_path / "gemm.csv"
    other.write_text("gemm_dtype,m,n,k,latency_ms\n")
    assert not is_steps(other) and not is_steps(tmp_path / "none.csv")
    two = tmp_path / "two.csv"
    two.write_text("model," + HEADER + "a,0,0.0,0.1,1,100,0,,1,0\nb,0,0.0,0.1,1,100,0,,1,0\n")
    with pytest.raises(HeadwayError, match="several models: a, b"):
        read(two)


def changed() -> Coefficients:
    """An engine that differs from the catalog's in host time, in products and in attention."""
    gemm = {
        dtype: replace(
            one,
            memory_efficiency=0.95 * one.memory_efficiency,
            compute_efficiency=0.88 * one.compute_efficiency,
        )
        for dtype, one in KNOWN.kernels.gemm.items()
    }
    decode = KNOWN.kernels.decode_attention
    kernels = replace(
        KNOWN.kernels,
        gemm=gemm,
        elementwise_efficiency=0.95 * KNOWN.kernels.elementwise_efficiency,
        decode_attention=replace(decode, memory_efficiency=0.8 * decode.memory_efficiency),
    )
    overhead = replace(KNOWN.overhead, step_s=9e-4, sequence_s=6e-6, launch_part_layer_s=4e-4, launch_layer_s=1.1e-3)
    return replace(KNOWN, kernels=kernels, overhead=overhead)


def traffic(num: int, truth: Coefficients, seed: int = 1) -> list[Span]:
    """Iterations of mixed traffic with durations that `truth` gives, 2% of noise upon them."""
    rng = random.Random(seed)
    model = StepModel(POOL.model, POOL.gpu, POOL.engine, POOL.parallel, truth)
    spans = []
    for i in range(num):
        decodes = int(2 ** rng.uniform(0, 8.5))
        chunks: tuple[tuple[int, int], ...] = ()
        if i % 5 == 0:
            chunks = ((int(2 ** rng.uniform(5, 13)), 0),)
            decodes = 0 if i % 10 == 0 else decodes
        one = Iteration(decodes, decodes * int(2 ** rng.uniform(8, 12)), chunks)
        seconds = model.line(decodes, one.context_tokens, chunks)[0]
        spans.append(Span((one,), seconds * rng.gauss(1, 0.02)))
    return spans


def test_a_fit_finds_the_engine_that_was_logged() -> None:
    spans = traffic(1500, changed())
    found = fit_steps(spans, POOL, KNOWN)
    assert abs(found.before[-1].error) > 0.04  # the catalog's profile is off
    assert all(abs(each.error) < 0.02 for each in found.after)
    fresh = traffic(800, changed(), seed=2)
    predicted = SpanTimes(fresh, POOL).seconds(found.coefficients)
    assert all(abs(each.error) < 0.02 for each in regions(fresh, predicted))
    assert found.result.values["decode_attention"] == pytest.approx(0.8, abs=0.04)


def test_what_traffic_does_not_show_keeps_the_catalogs_value_and_is_named() -> None:
    spans = [span for span in traffic(1500, changed()) if not span.iterations[0].chunks]
    found = fit_steps(spans, POOL, KNOWN)
    note = next(each for each in found.notes if each.startswith("not determined"))
    assert "launch_part_layer_s" in note and "prompt_attention" in note
    assert found.result.values["prompt_attention"] == pytest.approx(1, abs=0.02)
    assert found.coefficients.kernels.prefill_attention == KNOWN.kernels.prefill_attention


def test_the_wrong_gpu_or_unit_is_refused() -> None:
    spans = [replace(span, seconds=1000 * span.seconds) for span in traffic(300, KNOWN)]
    with pytest.raises(HeadwayError, match="are GPU, model and tp right"):
        fit_steps(spans, POOL, KNOWN)
    with pytest.raises(HeadwayError, match="at least 200"):
        fit_steps(spans[:50], POOL, KNOWN)


def log_of(spans: list[Span]) -> str:
    """The spans as an engine would log them: each iteration begins when the one before has ended."""
    rows, now_s = [], 0.0
    for i, span in enumerate(spans):
        one = span.iterations[0]
        chunks = ";".join(f"{new}:{before}" for new, before in one.chunks)
        prompt = sum(new for new, _ in one.chunks)
        end_s = now_s + span.seconds
        rows.append(f"{i},{now_s + 1e-6:.6f},{end_s:.6f},{one.decodes},{one.context_tokens},{prompt},{chunks},0,0\n")
        now_s = end_s
    return "".join(rows)


@pytest.mark.ci
def test_from_a_log_to_a_profile_that_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The two commands, one after the other."""
    about = "# " + json.dumps({"model": "meta-llama/Llama-3.1-8B", "device": "NVIDIA H100 80GB HBM3", "tp": 1}) + "\n"
    log = written(tmp_path / "steps-0-7-0001.csv", log_of(traffic(1200, changed())), about)
    out = tmp_path / "h100.json"
    assert main(["calibrate", str(tmp_path), "--source", "a test", "--out", str(out), "--no-progress"]) == 0
    assert "on iterations that the fit has not seen" in capsys.readouterr().out
    assert main(["validate", str(log), "--coefficients", str(out), "--json", "--max-error", "2"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["gpu"] == "h100-80gb-sxm" and answer["regions"][-1]["name"] == "all"
    assert main(["validate", str(log), "--max-error", "2"]) == 3
