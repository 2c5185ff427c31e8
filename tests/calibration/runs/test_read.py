"""Results of load generators, as their releases write them, and files that are none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.calibration.runs.read import is_runs, read
from headway.calibration.runs.run import MeasuredRun
from headway.core.errors import HeadwayError


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
        "requests_per_second": 2.0,
        "prompt_token_count": 512,
        "output_token_count": 128,
        "request_latency": 1.32,
        "time_to_first_token_ms": 50.0,
        "inter_token_latency_ms": 10.0,
        **changes,
    }
    metrics = {name: {"successful": {"mean": value, "count": 200}} for name, value in means.items()}
    return {"args": {"model": "meta-llama/Llama-3.1-8B"}, "benchmarks": [{"metrics": metrics}]}


def detailed(**changes: Any) -> dict[str, Any]:
    """A result of `vllm bench serve --save-detailed`: three requests, the last of which failed."""
    return {
        **vllm(2.0, completed=2, duration=4.0, total_input_tokens=30, total_output_tokens=7),
        "input_lens": [10, 20, 30],
        "output_lens": [3, 4, 0],
        "ttfts": [0.1, 0.2, 0.0],
        "itls": [[0.01, 0.03], [0.02, 0.02, 0.02], []],
        "start_times": [100.0, 101.0, 101.5],
        "errors": ["", "", "connection reset"],
        **changes,
    }


def aiperf(**changes: Any) -> dict[str, Any]:
    """A summary of AIPerf 0.13; genai-perf's has the same metrics."""

    def metric(value: float, unit: str = "ms", **more: float) -> dict[str, Any]:
        return {"unit": unit, "avg": value, "p90": 1.5 * value, "p99": 2 * value, **more}

    return {
        "request_throughput": {"unit": "requests/sec", "avg": 4.0},
        "request_count": {"unit": "requests", "avg": 80.0},
        "request_latency": metric(550.0),
        "time_to_first_token": metric(50.0),
        "inter_token_latency": metric(5.0),
        "output_sequence_length": metric(101.0, "tokens"),
        "input_sequence_length": metric(300.0, "tokens"),
        "usage_prompt_cache_read_tokens": metric(48.0, "tokens"),
        "input_config": {
            "models": {"items": [{"name": "Qwen/Qwen3-8B"}]},
            "phases": [{"kind": "profiling", "type": "concurrency", "requests": 80, "concurrency": 4}],
        },
        **changes,
    }


CSV = """Metric,avg,min,max,p99,p90
Input Sequence Length (tokens),300.00,300,300,600,450
Inter Token Latency (ms),5.00,1,9,10.00,7.50
Output Sequence Length (tokens),101.00,101,101,202,151.5
Request Latency (ms),"550.00",1,9,"1,100.00",825.00
Time To First Token (ms),50.00,1,9,100.00,75.00

Metric,Value
Request Throughput (requests/sec),4.00
Request Count,80
"""


def aiperf_request(start_s: float, cached: int = 0, **about: Any) -> dict[str, Any]:
    def metric(value: float, unit: str = "ms") -> dict[str, Any]:
        return {"value": value, "unit": unit}

    return {
        "metadata": {"request_start_ns": int(start_s * 1e9), "benchmark_phase": "profiling", **about},
        "metrics": {
            "request_latency": metric(550.0),
            "time_to_first_token": metric(50.0),
            "input_sequence_length": metric(300, "tokens"),
            "output_sequence_length": metric(101, "tokens"),
            "usage_prompt_cache_read_tokens": metric(cached, "tokens"),
        },
    }


def inference_perf(**load: Any) -> dict[str, Any]:
    """The report of a stage of inference-perf."""

    def statistics(mean: float) -> dict[str, float]:
        return {"mean": mean, "p90": 1.5 * mean, "p99": 2 * mean}

    return {
        "load_summary": {"count": 60, "requested_rate": 1.0, "achieved_rate": 1.04, **load},
        "successes": {
            "count": 60,
            "latency": {
                "request_latency": statistics(1.2),
                "time_to_first_token": statistics(0.04),
                "time_per_output_token": statistics(0.009),
                "inter_token_latency": statistics(0.009),
            },
            "throughput": {"requests_per_sec": 1.02},
            "prompt_tokens": {"total": 8100.0, "cached": 1920.0, "mean": 135.0},
            "output_len": {"mean": 129.0},
        },
        "failures": {"count": 0},
    }


def dump(path: Path, value: Any) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def one(path: Path, value: Any) -> MeasuredRun:
    assert is_runs(dump(path, value))
    (run,), left = read(path)
    assert not left
    return run


def test_vllm_results(tmp_path: Path) -> None:
    run = one(tmp_path / "a.json", vllm(request_rate=2.0, max_concurrency=None, burstiness=0.5))
    assert (run.model, run.settings, run.rate_rps) == ("meta-llama/Llama-3.1-8B-Instruct", {"tp": 2}, 2.0)
    assert (run.prompt_tokens, run.cached_tokens, run.output_tokens) == (512, 0, 128)
    assert (run.requested_rps, run.burstiness, run.concurrency, run.is_greedy) == (2.0, 0.5, None, True)
    assert run.latencies_s["tpot_mean"] == 0.01 and run.rows is None
    assert math.isnan(run.latencies_s["ttft_p90"])


def test_vllm_results_with_details(tmp_path: Path) -> None:
    """E2E is summed up from the gaps, even if the file has no mean; the failed request is left out, and named."""
    run = one(tmp_path / "a.json", detailed(request_rate="inf", max_concurrency=2))
    assert run.rows is not None and run.rows.start_s.tolist() == [100.0, 101.0]
    assert run.rows.e2e_s.tolist() == pytest.approx([0.14, 0.26])
    assert run.latencies_s["e2e_mean"] == pytest.approx(0.2)
    assert run.latencies_s["itl_mean"] == pytest.approx(0.1 / 5)
    assert run.latencies_s["tpot_mean"] == pytest.approx(0.02)
    assert (run.requested_rps, run.concurrency, run.rate_rps) == (None, 2, 0.5)
    assert run.notes == ("1 requests failed, and are left out",)


def test_settings_among_the_metadata(tmp_path: Path) -> None:
    """`--metadata max_num_seqs=4 prefix_len=64 temperature=0.7`."""
    run = one(tmp_path / "a.json", vllm(max_num_seqs="4", prefix_len="64", temperature="0.7"))
    assert run.settings == {"tp": 2, "max_num_seqs": 4, "prefix_tokens": 64}
    assert run.is_greedy is False


def test_guidellm_results(tmp_path: Path) -> None:
    run = one(tmp_path / "a.json", guidellm())
    assert (run.model, run.rate_rps, run.prompt_tokens) == ("meta-llama/Llama-3.1-8B", 2.0, 512)
    assert run.latencies_s["tpot_mean"] == pytest.approx(0.01)
    assert run.latencies_s["itl_mean"] == pytest.approx(0.01)


def test_guidellm_reports_of_its_second_version(tmp_path: Path) -> None:
    """YAML, with the strategy and the requests."""
    report = guidellm()
    benchmark, start = report["benchmarks"][0], 1.7e9
    del report["args"]
    benchmark["config"] = {
        "strategy": {"type_": "concurrent", "streams": 8},
        "backend": {"model": "Qwen/Qwen3-8B", "type_": "openai_http"},
    }
    benchmark["requests"] = {
        "successful": [
            {
                "request_start_time": start + i,
                "request_latency": 1.32,
                "time_to_first_token_ms": 50.0,
                "prompt_tokens": 512,
                "output_tokens": 128,
                "cached_tokens": 64,
            }
            for i in range(200)
        ]
    }
    run = one(tmp_path / "a.yaml", yaml.safe_dump(report))
    assert (run.model, run.concurrency, run.requested_rps, run.num_requests) == ("Qwen/Qwen3-8B", 8, None, 200)
    assert run.rows is not None and run.cached_tokens == 64
    assert run.latencies_s["ttft_p99"] == pytest.approx(0.05)
    del benchmark["requests"]["successful"][3:]  # a sample of the requests: the means stand for all
    assert one(tmp_path / "b.json", report).rows is None


@pytest.mark.parametrize("kind", ["poisson", "constant"])
@pytest.mark.parametrize("num_rows", [0, 3, 200])
def test_guidellm_reports_say_that_arrivals_are_assumed(tmp_path: Path, kind: str, num_rows: int) -> None:
    """Only where Poisson arrivals stand for those of guidellm, whose gaps repeat, and not where it tells them."""
    report = guidellm()
    row = {"request_latency": 1.32, "time_to_first_token_ms": 50.0, "prompt_tokens": 512, "output_tokens": 128}
    rows = [{**row, "request_start_time": 1.7e9 + i} for i in range(num_rows)]
    strategy = {"type_": kind, "rate": 2.0}
    report["benchmarks"][0] |= {"config": {"strategy": strategy}, "requests": {"successful": rows}}
    run = one(tmp_path / "a.json", report)
    assert (run.rows is not None) == (num_rows == 200)
    assert any("same gaps" in note for note in run.notes) == (kind == "poisson" and num_rows < 200)


def test_aiperf_summaries(tmp_path: Path) -> None:
    run = one(tmp_path / "profile_export_aiperf.json", aiperf())
    assert (run.model, run.concurrency, run.requested_rps, run.num_requests) == ("Qwen/Qwen3-8B", 4, None, 80)
    assert (run.rate_rps, run.output_tokens, run.cached_tokens) == (4.0, 101.0, 48.0)
    assert run.latencies_s["ttft_p99"] == pytest.approx(0.1) and run.latencies_s["tpot_mean"] == 0.005
    poisson = {"phases": [{"kind": "profiling", "type": "poisson", "rate": 10.0}]}
    run = one(tmp_path / "b.json", aiperf(input_config=poisson))
    assert (run.requested_rps, run.burstiness, run.concurrency) == (10.0, 1.0, None)


def test_genai_perf_summaries(tmp_path: Path) -> None:
    old = aiperf(input_config={"model_names": ["llama-3.1-8b"], "perf_analyzer": {"stimulus": {"concurrency": 3}}})
    del old["request_count"], old["usage_prompt_cache_read_tokens"]
    run = one(tmp_path / "profile_export_genai_perf.json", old)
    assert (run.model, run.concurrency, run.rate_rps) == ("llama-3.1-8b", 3, 4.0)


@pytest.mark.parametrize(
    ("data", "is_cached_known", "prompts"),
    [
        ({"type": "synthetic"}, False, 100),
        ({"type": "synthetic", "entries": 60}, False, 60),
        ({"type": "synthetic", "entries": 120}, False, None),
        ({"type": "file"}, False, None),
        ({"type": "synthetic"}, True, None),
    ],
)
def test_aiperf_prompts_that_are_sent_again_are_noted(
    tmp_path: Path, data: dict[str, Any], is_cached_known: bool, prompts: int | None
) -> None:
    """Unless the file has the cached tokens: AIPerf's timed runs draw from few prompts, which an engine has cached."""
    summary = aiperf(request_count={"unit": "requests", "avg": 120.0})
    summary["input_config"]["datasets"] = [data]
    lines = [aiperf_request(i / 4) for i in range(120)]
    if not is_cached_known:
        del summary["usage_prompt_cache_read_tokens"]
        for line in lines:
            del line["metrics"]["usage_prompt_cache_read_tokens"]
    expected = [f"120 requests share {prompts} synthetic prompts"] if prompts else []
    runs = [one(tmp_path / "profile_export_aiperf.json", summary)]
    runs.append(one(tmp_path / "profile_export.jsonl", "\n".join(map(json.dumps, lines))))
    for run in runs:
        assert [note.partition(" (")[0] for note in run.notes] == expected


def test_aiperf_tables_and_requests_take_the_load_from_the_summary_beside_them(tmp_path: Path) -> None:
    dump(tmp_path / "profile_export_aiperf.json", aiperf())
    table = one(tmp_path / "profile_export_aiperf.csv", CSV)
    assert (table.model, table.concurrency, table.rate_rps) == ("Qwen/Qwen3-8B", 4, 4.0)
    assert table.latencies_s["e2e_p99"] == pytest.approx(1.1)
    lines = [aiperf_request(i / 4, cached=64 * (i > 0)) for i in range(80)]
    lines[3:3] = [aiperf_request(0.0, benchmark_phase="warmup"), {**aiperf_request(0.0), "error": {"code": 500}}]
    run = one(tmp_path / "profile_export.jsonl", "\n".join(map(json.dumps, lines)))
    assert (run.model, run.concurrency, run.num_requests) == ("Qwen/Qwen3-8B", 4, 80)
    assert run.rows is not None and run.rows.cached_tokens.tolist()[:2] == [0, 64]
    assert run.is_same(table)
    assert run.notes == ("1 requests failed, and are left out",)


@pytest.mark.parametrize("kind", ["poisson", "constant"])
def test_inference_perf_reports(tmp_path: Path, kind: str) -> None:
    """The configuration beside the report names model and shared prefixes; both types are Poisson loads."""
    config = {
        "server": {"model_name": "Qwen/Qwen3-8B"},
        "load": {"type": kind},
        "data": {"type": "shared_prefix", "shared_prefix": {"num_groups": 3, "system_prompt_len": 100}},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    run = one(tmp_path / "stage_0_lifecycle_metrics.json", inference_perf())
    assert (run.model, run.requested_rps, run.burstiness, run.rate_rps) == ("Qwen/Qwen3-8B", 1.0, 1.0, 1.02)
    assert run.settings == {"num_prefixes": 3, "prefix_tokens": 100}
    assert run.cached_tokens == 32 and run.latencies_s["e2e_p90"] == pytest.approx(1.8)
    assert one(tmp_path / "b.json", inference_perf(concurrency=5)).concurrency == 5


def test_inference_perf_requests(tmp_path: Path) -> None:
    entry = {
        "start_time": 10.0,
        "end_time": 11.0,
        "request": "...",
        "error": None,
        "info": {
            "request_metrics": {"text": {"input_tokens": 135}},
            "response_metrics": {
                "output_tokens": 100,
                "output_token_times": [10.01, 10.5, 11.0],
                "server_usage": {"completion_tokens": 101, "prompt_tokens_details": {"cached_tokens": 32}},
            },
        },
    }
    failed = {**entry, "error": {"error_type": "HTTP Error 500"}}
    run = one(tmp_path / "per_request_lifecycle_metrics.json", [entry, {**entry, "start_time": 10.005}, failed])
    assert run.rows is not None and run.rows.output_tokens.tolist() == [101, 101]
    assert run.latencies_s["e2e_mean"] == pytest.approx(0.9975)
    assert (run.cached_tokens, run.num_requests) == (32, 2)


def test_json_lines_with_one_result_each(tmp_path: Path) -> None:
    path = dump(tmp_path / "a.jsonl", "\n".join(json.dumps(vllm(rate, mean_ttft_ms=10 * rate)) for rate in (1.0, 2.0)))
    assert [run.rate_rps for run in read(path)[0]] == [1.0, 2.0]


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
    good_and_bad = [vllm(), vllm(rate=3.0, **{"mean_ttft_ms": 40.0, **changes})]
    found, left = read(dump(tmp_path / "a.json", good_and_bad))
    assert len(found) == len(left) == 1
    with pytest.raises(HeadwayError, match=f"no run that can be used: .*{message}"):
        read(dump(tmp_path / "a.json", good_and_bad[1:]))


def test_runs_given_twice_count_once(tmp_path: Path) -> None:
    found, left = read(dump(tmp_path / "a.json", [vllm(), vllm(), vllm(3.0, mean_ttft_ms=60.0)]))
    assert len(found) == 2
    assert left == [f"{tmp_path / 'a.json'}: run 2: the same as {tmp_path / 'a.json'}: run 1"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"completed": 3}, "missing duration, total_input_tokens"),
        ("{", "not valid JSON"),
        ("[1]", "expected JSON objects, found int"),
        ({"a": 1, "b": 2}, "not recognised, with the keys a, b; expected a result of vllm bench serve"),
        (aiperf(time_to_first_token=None), "missing time_to_first_token; were answers streamed"),
        (aiperf(request_latency={"unit": "parsecs", "avg": 1.0}), "unit 'parsecs'; expected ns, us, ms"),
        (detailed(ttfts=[0.1]), "details of unequal length: input_lens 3, output_lens 3, ttfts 1"),
        (detailed(itls=[["a"], [], []]), "request 0: expected numbers in start_times"),
        ({**inference_perf(), "successes": {"count": 0, "latency": {}}}, "missing request_latency"),
        ({"benchmarks": [{"metrics": {}}]}, "metrics: missing prompt_token_count"),
        ({"benchmarks": []}, "the file holds none"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(HeadwayError, match=message):
        read(dump(tmp_path / "a.json", value))
