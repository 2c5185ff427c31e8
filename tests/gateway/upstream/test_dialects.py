"""Engines' metrics pages and names."""

from __future__ import annotations

import pytest

from headway.gateway.upstream.dialects import ADAPTERS, Load, api_of, parse_load


def test_samples_of_all_ranks_add_up_and_missing_metrics_are_unknown() -> None:
    page = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running{engine="1"} 4.0
vllm:num_requests_running_total 99
vllm:gpu_cache_usage_perc{engine="0"} 0.25
"""
    assert parse_load(ADAPTERS["vllm"], page) == Load(running=7, waiting=None, kv_share=0.25)
    assert parse_load(ADAPTERS["sglang"], page) == Load()


PAGE = "vllm:num_requests_running {}\nvllm:num_requests_waiting {}\nvllm:kv_cache_usage_perc {}\n"


@pytest.mark.parametrize(
    ("values", "load"),
    [(("e", "--", "1e"), Load()), (("1e999", "-3", "NaN"), Load()), (("3.0", "+4", "17"), Load(3, 4, 1.0))],
)
def test_invalid_samples_are_unknown(values: tuple[str, str, str], load: Load) -> None:
    assert parse_load(ADAPTERS["vllm"], PAGE.format(*values)) == load


@pytest.mark.parametrize(
    ("engine", "api"), [("vllm-v1", "vllm"), ("sglang", "sglang"), ("llama.cpp", "llama.cpp"), ("orca", "openai")]
)
def test_the_api_of_a_catalogs_engine(engine: str, api: str) -> None:
    assert api_of(engine) == api
