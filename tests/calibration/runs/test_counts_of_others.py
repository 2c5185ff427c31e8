"""Load generators count tokens, chunks and temperatures in their own ways; a run has one time per token."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from headway.calibration.runs.read import read

TOKENS, TTFT_S, TPOT_S, CHUNKS = 20, 0.3, 0.05, 12
"""An engine that takes 50 ms a token and sends 20 tokens in 12 chunks."""
E2E_S = TTFT_S + (TOKENS - 1) * TPOT_S


def vllm_bench(num: int = 12, details: bool = False, **more: Any) -> dict[str, Any]:
    """As `vllm bench serve --save-result` of 0.25.1 writes it; its `itl` are gaps between chunks."""
    gap_s = (E2E_S - TTFT_S) / (CHUNKS - 1)
    document: dict[str, Any] = {
        "backend": "openai", "model_id": "meta-llama/Llama-3.1-8B", "request_rate": 2.0, "burstiness": 1.0,
        "max_concurrency": None, "duration": num / 2, "completed": num, "total_input_tokens": 57 * num,
        "total_output_tokens": TOKENS * num, "rtfx": 0.0, "mean_ttft_ms": 1e3 * TTFT_S, "p99_ttft_ms": 1e3 * TTFT_S,
        "mean_tpot_ms": 1e3 * TPOT_S, "p99_tpot_ms": 1e3 * TPOT_S, "mean_itl_ms": 1e3 * gap_s,
        "p99_itl_ms": 3e3 * gap_s,
    }  # fmt: skip
    if details:
        document |= {
            "input_lens": [57] * num,
            "output_lens": [TOKENS] * num,
            "ttfts": [TTFT_S] * num,
            "itls": [[gap_s] * (CHUNKS - 1)] * num,
            "start_times": [i / 2 for i in range(num)],
            "errors": [""] * num,
        }
    return document | more


def saved(path: Path, *documents: Any) -> Path:
    path.write_text("\n".join(json.dumps(each) for each in documents))
    return path


@pytest.mark.parametrize("more", [{}, {"mean_e2el_ms": 1e3 * E2E_S}, {"mean_e2e_latency_ms": 1e3 * E2E_S}])
@pytest.mark.parametrize("details", [False, True])
def test_the_time_between_tokens_counts_tokens_and_not_chunks(
    details: bool, more: dict[str, Any], tmp_path: Path
) -> None:
    (run,), _ = read(saved(tmp_path / "a.json", vllm_bench(details=details, **more)))
    assert run.latencies_s["itl_mean"] == pytest.approx(TPOT_S)
    assert run.latencies_s["tpot_mean"] == pytest.approx(TPOT_S)
    assert math.isnan(run.latencies_s["itl_p99"])  # nobody knows it: gaps between chunks are others


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_results_that_windows_wrote_are_read(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(vllm_bench()), encoding=encoding)
    assert len(read(path)[0]) == 1


@pytest.mark.parametrize("summary_first", [True, False])
def test_requests_go_before_their_summary(summary_first: bool, tmp_path: Path) -> None:
    both = [vllm_bench(), vllm_bench(details=True)]
    (run,), skipped = read(saved(tmp_path / "a.jsonl", *(both if summary_first else both[::-1])))
    assert run.rows is not None and "the same as" in skipped[0]


@pytest.mark.parametrize(
    ("more", "is_greedy"),
    [
        ({}, False),  # since 0.17, which has `rtfx`, the client leaves the temperature to the engine
        ({"temperature": 0.6}, False),
        ({"temperature": 0.0}, True),
        ({"temperature": "0"}, True),
        ({"mean_e2e_latency_ms": 1e3 * E2E_S, "server_info": {"tp_size": 2}}, True),  # SGLang's sends 0
    ],
)
def test_a_run_is_greedy_where_its_client_asked_for_it(more: dict[str, Any], is_greedy: bool, tmp_path: Path) -> None:
    (run,), _ = read(saved(tmp_path / "a.json", vllm_bench(**more)))
    assert run.is_greedy is is_greedy
    assert any("names no temperature" in note for note in run.notes) == (not more)
    old = {key: value for key, value in vllm_bench().items() if key != "rtfx"}
    (run,), _ = read(saved(tmp_path / "old.json", old))
    assert run.is_greedy is True and not run.notes


def test_settings_of_sglangs_server_are_read(tmp_path: Path) -> None:
    server = {"tp_size": 2, "max_running_requests": 64, "chunked_prefill_size": 4096}
    more = {"mean_e2e_latency_ms": 1e3 * E2E_S, "p99_e2e_latency_ms": 1e3 * E2E_S, "server_info": server}
    (run,), _ = read(saved(tmp_path / "a.json", vllm_bench(**more)))
    assert run.settings == {"tp": 2, "max_num_seqs": 64, "max_num_batched_tokens": 4096}
    assert run.latencies_s["e2e_p99"] == pytest.approx(E2E_S)


def test_a_stage_of_inference_perf_counts_the_engines_tokens(tmp_path: Path) -> None:
    """Its own tokenizer finds 19 of the engine's 20 tokens, and its times per token are over those."""
    own_s = (E2E_S - TTFT_S) / (TOKENS - 2)

    def spread(value: float) -> dict[str, float]:
        return {"mean": value, "p90": value, "p99": value}

    document = {
        "load_summary": {"count": 16, "requested_rate": 2.0},
        "successes": {
            "count": 16,
            "prompt_len": spread(50),
            "output_len": spread(TOKENS - 1),
            "output_tokens": spread(TOKENS),
            "throughput": {"requests_per_sec": 1.7},
            "latency": {
                "request_latency": spread(E2E_S),
                "time_to_first_token": spread(TTFT_S),
                "time_per_output_token": spread(own_s),
                "inter_token_latency": spread(own_s),
            },
        },
    }
    (run,), _ = read(saved(tmp_path / "stage_0_lifecycle_metrics.json", document))
    assert run.output_tokens == TOKENS
    assert run.latencies_s["tpot_mean"] == pytest.approx(TPOT_S) == run.latencies_s["tpot_p99"]
    assert run.latencies_s["itl_mean"] == pytest.approx(TPOT_S)
    implied_s = run.latencies_s["ttft_mean"] + (TOKENS - 1) * run.latencies_s["tpot_mean"]
    assert run.latencies_s["e2e_mean"] == pytest.approx(implied_s)
