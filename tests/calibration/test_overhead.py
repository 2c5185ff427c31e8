"""Served loads: read from load generators' JSON, and an engine's overhead found again in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headway.calibration.benchmarks import BenchmarkSettings, is_benchmark, read
from headway.calibration.overhead import fit_overhead
from headway.core.errors import HeadwayError
from measured import GPU, KNOWN, loads


def test_a_known_overhead_is_found_again() -> None:
    fit, notes = fit_overhead(loads(), GPU, "vllm-v1", KNOWN)
    assert fit.values == {
        "step_s": pytest.approx(0.002, rel=0.1), "layer_s": pytest.approx(2e-5, rel=0.2),
        "sequence_s": pytest.approx(4e-5, rel=0.1),
    }  # fmt: skip
    assert fit.residual < 0.01
    assert not notes


def test_undetermined_coefficients_are_kept() -> None:
    fit, notes = fit_overhead(loads(("llama-3.1-8b",)), GPU, "vllm-v1", KNOWN)
    assert fit.values["layer_s"] == KNOWN.overhead.layer_s
    assert "same number of layers" in notes[0]
    alike = [replace(load, name=str(i)) for i, load in enumerate([loads()[0]] * 6)]
    fit, notes = fit_overhead(alike, GPU, "vllm-v1", KNOWN)
    assert fit.values["sequence_s"] == KNOWN.overhead.sequence_s
    assert len(notes) == 2


def test_too_few_loads() -> None:
    with pytest.raises(HeadwayError, match="3 served loads; expected at least 4"):
        fit_overhead(loads()[:3], GPU, "vllm-v1", KNOWN)


@pytest.mark.parametrize(
    ("factor", "message"), [(1e-3, "of what the kernels alone take"), (1e3, "times what the kern")]
)
def test_loads_in_another_unit(factor: float, message: str) -> None:
    wrong = [replace(load, tpot_s=load.tpot_s * factor, rate_rps=load.rate_rps / factor) for load in loads()]
    with pytest.raises(HeadwayError, match=message):
        fit_overhead(wrong, GPU, "vllm-v1", KNOWN)


def vllm(rate: float = 2.0, **changes: Any) -> dict[str, Any]:
    """One result of `vllm bench serve`."""
    return {
        "backend": "vllm", "model_id": "meta-llama/Llama-3.1-8B-Instruct", "num_prompts": 200, "request_rate": rate,
        "tensor_parallel_size": "2", "duration": 200 / rate, "completed": 200, "total_input_tokens": 200 * 512,
        "total_output_tokens": 200 * 128, "mean_ttft_ms": 50.0, "mean_tpot_ms": 10.0, "mean_itl_ms": 10.1,
        "mean_e2el_ms": 50.0 + 127 * 10.0, **changes,
    }  # fmt: skip


def guidellm(**changes: Any) -> dict[str, Any]:
    """A report of guidellm with one benchmark."""
    means = {
        "requests_per_second": 2.0, "prompt_token_count": 512, "output_token_count": 128, "request_latency": 1.32,
        "time_to_first_token_ms": 50.0, "inter_token_latency_ms": 10.0, **changes,
    }  # fmt: skip
    metrics = {name: {"successful": {"mean": value, "count": 200}} for name, value in means.items()}
    return {"args": {"model": "meta-llama/Llama-3.1-8B"}, "benchmarks": [{"metrics": metrics}]}


def dump(path: Path, value: Any) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_vllm_results(tmp_path: Path) -> None:
    path = dump(tmp_path / "a.json", vllm())
    assert is_benchmark(path)
    (load,), left = read(path, BenchmarkSettings())
    assert not left
    assert (load.model.name, load.tp, load.rate_rps) == ("llama-3.1-8b", 2, 2.0)
    assert (load.prompt_tokens, load.cached_tokens, load.output_tokens, load.tpot_s) == (512, 0, 128, 0.01)
    assert load.num_decode == round(2.0 * 0.01 * 127)


def test_guidellm_results(tmp_path: Path) -> None:
    (load,), _ = read(dump(tmp_path / "a.json", guidellm()), BenchmarkSettings(tp=4))
    assert (load.model.name, load.tp, load.rate_rps, load.prompt_tokens) == ("llama-3.1-8b", 4, 2.0, 512)
    assert load.tpot_s == pytest.approx(0.01)


def test_json_lines_with_one_result_each(tmp_path: Path) -> None:
    path = dump(tmp_path / "a.jsonl", "\n".join(json.dumps(vllm(rate)) for rate in (1.0, 2.0, 4.0)))
    assert [load.rate_rps for load in read(path, BenchmarkSettings())[0]] == [1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean_tpot_ms": 0}, "tpot_s is 0; expected a number above 0"),
        ({"mean_tpot_ms": -3.0}, "tpot_s is -0.003"),
        ({"mean_ttft_ms": "fast"}, "ttft_s is nan"),
        ({"completed": 0}, "rate_rps is 0"),
        ({"mean_e2el_ms": 1.32}, "contradicts TTFT and TPOT.*mixed units"),
        ({"mean_itl_ms": 0.0101}, "contradicts TPOT.*mixed units"),
        ({"mean_tpot_ms": 0.01, "mean_itl_ms": 0.01, "mean_e2el_ms": 51.3}, "is the unit right"),
        ({"total_output_tokens": 200}, "one output token"),
    ],
)
def test_bad_runs_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    good_and_bad = [vllm(), vllm(rate=3.0, **changes)]
    found, left = read(dump(tmp_path / "a.json", good_and_bad), BenchmarkSettings())
    assert len(found) == len(left) == 1
    with pytest.raises(HeadwayError, match=f"no run that can be used: .*{message}"):
        read(dump(tmp_path / "a.json", good_and_bad[1:]), BenchmarkSettings())


def test_runs_given_twice_count_once(tmp_path: Path) -> None:
    found, left = read(dump(tmp_path / "a.json", [vllm(), vllm(), vllm(3.0)]), BenchmarkSettings())
    assert len(found) == 2
    assert left == [f"{tmp_path / 'a.json'}: run 2: the same as {tmp_path / 'a.json'}: run 1"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"completed": 3}, "missing duration, total_input_tokens"),
        ("{", "not valid JSON"),
        ("[1]", "expected JSON objects, found int"),
        (vllm(model_id="llama-3.1-9b"), "did you mean 'llama-3.1-8b'.*or give --model"),
        ({**vllm(), "model_id": None}, "names no model; give --model"),
        ({"benchmarks": [{"metrics": {}}]}, "metrics: missing prompt_token_count"),
        ({"benchmarks": []}, "the file holds none"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(HeadwayError, match=message):
        read(dump(tmp_path / "a.json", value), BenchmarkSettings())
