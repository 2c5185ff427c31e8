"""`headway validate` on results of load generators and on records: the fleet that was measured, and the replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.calibration.steps.read import StepLog
from headway.cli import main
from headway.cli.measured_fleet import MeasuredFleet, found_runs, of_steps
from headway.core.errors import HeadwayError
from made_up_measurements import experiments, runs

FLEET = """
workload: {builtin: chat}
fleet:
- {name: small, model: qwen2.5-7b, gpu: h100, engine: {name: vllm-0.15, max_num_seqs: 7}}
- {name: large, model: llama-3.1-8b, gpu: h100, engine: {name: vllm-0.15, max_num_seqs: 9}}
"""


def result(**changes: Any) -> dict[str, Any]:
    """What `vllm bench serve` writes of a run of 200 requests."""
    run = runs(("llama-3.1-8b",), 3)[-1]
    ttft_ms, tpot_ms = 1e3 * run.latencies_s["ttft_mean"], 1e3 * run.latencies_s["tpot_mean"]
    return {
        "model_id": run.model,
        "completed": 200,
        "duration": 200 / run.rate_rps,
        "mean_ttft_ms": ttft_ms,
        "mean_tpot_ms": tpot_ms,
        "total_input_tokens": 200 * 512,
        "total_output_tokens": 200 * 256,
        "request_rate": run.rate_rps,
        **changes,
    }


def write(path: Path, value: Any) -> str:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


def validated(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    assert main(["validate", *args, "--json", "--no-progress"]) == 0
    return json.loads(capsys.readouterr().out)


def test_seats_tensor_parallelism_and_model_come_from_the_run(tmp_path: Path) -> None:
    """Options go before the run's file, which goes before the fleet's."""
    fleet = Path(write(tmp_path / "fleet.yaml", FLEET))
    path = Path(write(tmp_path / "a.json", result(max_num_seqs="5", tp="2")))
    (found,), _ = found_runs(path, {"fleet": fleet})
    one = found.experiment
    assert (found.pool.name, one.model.name, one.max_num_seqs, one.tp) == ("large", "llama-3.1-8b", 5, 2)
    (found,), _ = found_runs(path, {"fleet": fleet, "max_num_seqs": 3})
    assert found.experiment.max_num_seqs == 3
    (found,), _ = found_runs(Path(write(tmp_path / "b.json", result())), {"fleet": fleet, "pool": "small"})
    assert (found.experiment.model.name, found.experiment.max_num_seqs) == ("qwen2.5-7b", 7)


def test_requests_of_the_file_are_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two bursts of long prompts: the file's own times and lengths, not a Poisson process of means."""
    num, ttft_s, gap_s = 40, 0.2, 0.01
    details = {
        "input_lens": [4000] * num,
        "output_lens": [20] * num,
        "ttfts": [ttft_s] * num,
        "itls": [[gap_s] * 19] * num,
        "start_times": [0.0] * (num // 2) + [10.0] * (num // 2),
        "request_rate": "inf",
    }
    (found,), _ = found_runs(Path(write(tmp_path / "a.json", result(**details))), {"gpu": "h100"})
    load = found.experiment.load
    assert load is not None and load.workload.arrival_s.tolist() == details["start_times"]
    assert set(load.workload.prompt_tokens.tolist()) == {4000}
    burst = validated(capsys, str(tmp_path / "a.json"), "--gpu", "h100")["experiments"][0]["errors"]
    assert burst["ttft_mean"]["predicted"] > 500  # the last prompt of a burst waits for nineteen others
    closed = write(tmp_path / "b.json", result(**details, max_concurrency=1))
    alone = validated(capsys, closed, "--gpu", "h100")["experiments"][0]["errors"]
    assert alone["ttft_mean"]["predicted"] < 200


def test_what_the_engine_had_cached_is_not_computed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prefix among the metadata, shared by all prompts."""
    long = result(total_input_tokens=200 * 8000)
    alone = validated(capsys, write(tmp_path / "a.json", long), "--gpu", "h100")
    shared = validated(capsys, write(tmp_path / "b.json", {**long, "prefix_len": "7900"}), "--gpu", "h100")
    ttft_ms = [one["experiments"][0]["errors"]["ttft_mean"]["predicted"] for one in (alone, shared)]
    assert ttft_ms[1] < 0.8 * ttft_ms[0]


@pytest.mark.parametrize(
    ("value", "args", "message"),
    [
        (result(), [], "a.json: names no GPU; give --gpu, or --fleet"),
        (result(model_id="llama-3.1-9b"), ["--gpu", "h100"], "did you mean 'llama-3.1-8b'?; or give --model"),
        (result(model_id=None), ["--gpu", "h100"], "names no model; give --model"),
        (result(tp="3"), ["--gpu", "h100"], "a.json: "),
        (result(model_id="x"), ["--fleet", "fleet.yaml"], "which pool was measured? Give --pool, one of small, large"),
        (result(), ["--fleet", "fleet.yaml", "--pool", "larg"], "--pool: 'larg'; expected one of small, large"),
        (result(), ["--fleet", "none.yaml"], "none.yaml: no such file"),
        ({"a": 1}, ["--gpu", "h100"], "a.json: not recognised, with the keys a; expected a result of vllm bench"),
    ],
)
def test_mistakes_are_one_line(
    value: Any,
    args: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "fleet.yaml", FLEET)
    assert main(["validate", write(tmp_path / "a.json", value), *args, "--no-progress"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error


def test_records_of_a_run_are_predicted_by_the_fleet_that_they_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A simulated day: each replica, replayed from its records, takes as long as it took."""
    write(
        tmp_path / "fleet.yaml",
        """
name: day
workload: {num_requests: 300, arrivals: 6, prompt_tokens: 400, output_tokens: 60}
fleet:
- {name: pool, model: llama-3.1-8b, gpu: h100, engine: vllm-0.15, replicas: 2}
""",
    )
    out = tmp_path / "out"
    assert main(["simulate", str(tmp_path / "fleet.yaml"), "--out", str(out), "--no-progress"]) == 0
    capsys.readouterr()
    (folder,) = {path.parent for path in out.rglob("requests.parquet")}
    found = validated(capsys, str(folder))
    assert found["num_experiments"] == 2
    assert found["overall"]["e2e_mean"] < 1 and found["overall"]["ttft_mean"] < 5


def test_one_run_in_two_files_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [write(tmp_path / name, result()) for name in ("a.json", "b.json")]
    found = validated(capsys, *paths, "--gpu", "h100")
    assert found["num_experiments"] == 1
    assert found["refused"] == [f"{paths[1]}: the same as {paths[0]}"]


def test_a_run_is_an_experiment_with_its_means() -> None:
    one = experiments(("llama-3.1-8b",), 1)[0]
    assert (one.question_tokens, one.output_tokens, one.stages[0].rate_rps) == (512, 256, 0.5)
    assert one.contradiction is None and one.load is not None and len(one.load.workload) == 200


def test_a_fleet_without_runs_names_the_hardware() -> None:
    pool, known = MeasuredFleet({"gpu": "h100", "engine": "vllm-0.15"}).any_pool()
    assert (pool.gpu.name, pool.engine.name, known.calibrated) == ("h100-80gb-sxm", "vllm-0.15", True)


def step_log(**about: Any) -> StepLog:
    known = {"model": "meta-llama/Llama-3.1-8B-Instruct", "device": "NVIDIA H100 80GB HBM3", "version": "0.25.1"}
    return StepLog("steps", known | about, (), 0, {})


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({}, ("llama-3.1-8b", "bf16", 2.0, "vllm-0.25", "0.25.1", 1)),
        ({"version": "0.25.2rc1+cu130"}, ("llama-3.1-8b", "bf16", 2.0, "vllm-0.25", "0.25.2", 1)),
        ({"version": "0.15.1"}, ("llama-3.1-8b", "bf16", 2.0, "vllm-0.15", "0.15.1", 1)),
        ({"quantization": "fp8"}, ("llama-3.1-8b", "fp8", 2.0, "vllm-0.25", "0.25.1", 1)),
        ({"quantization": "awq_marlin"}, ("llama-3.1-8b", "w4a16", 2.0, "vllm-0.25", "0.25.1", 1)),
        (
            {"quantization": "compressed-tensors", "model": "someone/Meta-Llama-3.1-8B-Instruct-FP8"},
            ("llama-3.1-8b", "fp8", 2.0, "vllm-0.25", "0.25.1", 1),
        ),
        ({"kv_cache_dtype": "fp8_e4m3"}, ("llama-3.1-8b", "bf16", 1.0, "vllm-0.25", "0.25.1", 1)),
        ({"pp": 2}, ("llama-3.1-8b", "bf16", 2.0, "vllm-0.25", "0.25.1", 2)),
    ],
)
def test_a_log_of_iterations_says_what_its_engine_is(about: dict[str, Any], expected: tuple[Any, ...]) -> None:
    pool, _ = of_steps([step_log(**about)], {})
    engine = pool.engine
    found = pool.model.name, pool.model.dtype, engine.kv_dtype_bytes, engine.name, engine.version, pool.parallel.pp
    assert found == expected


def test_weights_that_a_log_calls_by_an_unknown_name_are_no_16_bits(tmp_path: Path) -> None:
    log = step_log(quantization="compressed-tensors")
    with pytest.raises(HeadwayError, match="weights are 'compressed-tensors'; expected --fleet"):
        of_steps([log], {})
    fleet = Path(write(tmp_path / "fleet.yaml", "fleet: [{model: llama-3.1-8b, gpu: h100, quantization: gptq}]"))
    assert of_steps([log], {"fleet": fleet})[0].model.dtype == "w4a16"
