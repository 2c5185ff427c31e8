"""Fallbacks and hosted pools in a fleet file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway import scenario
from headway.config.scenario import assemble
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.core.fleet import Fallbacks, Fleet

LLAMA = {"name": "chat", "model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm-0.15"}
HOSTED = {
    "name": "hosted",
    "model": "gpt-x",
    "hosted": {"ttft_s": 0.5, "tokens_per_s": 100, "max_context_tokens": 8000},
    "usd_per_million_input_tokens": 1.0,
    "usd_per_million_output_tokens": 4.0,
}
LOAD = {"arrivals": 5.0, "num_requests": 40, "prompt_tokens": 100, "output_tokens": 50}


def load(*pools: Any, **sections: Any) -> scenario.Scenario:
    return assemble({"workload": LOAD, "fleet": list(pools), **sections}, Places(), Path())


def fleet(*pools: Any, **sections: Any) -> Fleet:
    return load(*pools, **sections).fleet


def test_a_pool_names_the_pools_that_answer_in_its_place() -> None:
    found = fleet({**LLAMA, "fallback": ["hosted", "small"]}, {**LLAMA, "name": "small", "model": "qwen3-8b"}, HOSTED)
    assert found.fallbacks == Fallbacks({"llama-3.1-8b": ("gpt-x", "qwen3-8b")}, {}, frozenset({"gpt-x"}))
    hosted = found.pools[2]
    assert (hosted.num_gpus, hosted.usd_per_hour, hosted.model.max_context_tokens) == (0, 0.0, 8000)


def test_a_fallback_of_the_same_model_stands_by() -> None:
    spare = {**LLAMA, "name": "spare", "gpu": "l40s"}
    found = fleet(spare, {**LLAMA, "fallback": ["spare"]}, {**LLAMA, "name": "more"})
    first, chat, more = found.pools
    assert first.is_standby and first.names == ("llama-3.1-8b@spare",) and first.model.hf_id == chat.model.hf_id
    assert not (chat.is_standby or more.is_standby) and chat.model.name == more.model.name == "llama-3.1-8b"
    assert found.fallbacks.models == {"llama-3.1-8b": ("llama-3.1-8b@spare",)}
    assert found.fallbacks.are_same("llama-3.1-8b", "llama-3.1-8b@spare")


def test_a_combo_has_fallbacks_too() -> None:
    side = {key: value for key, value in LLAMA.items() if key != "name"}
    combo = {"name": "pair", "prefill": side, "decode": side, "fallback": ["hosted"]}
    assert fleet(HOSTED, combos=[combo]).fallbacks.models == {"llama-3.1-8b": ("gpt-x",)}


CHAT = {**LLAMA, "fallback": ["hosted"]}
B, QWEN = {**LLAMA, "name": "b"}, {**LLAMA, "name": "c", "model": "qwen3-8b"}
BIG = {**LLAMA, "name": "big", "model": "llama-3.1-70b", "tp": 4}
STAGES = {"cascade": {"models": ["llama-3.1-8b", "llama-3.1-70b"]}}
BAD: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "unknown": (
        [{**LLAMA, "fallback": ["hostd"]}, HOSTED],
        {},
        r"fleet\[0\]\.fallback\[0\]: unknown pool 'hostd'; did you",
    ),
    "itself": ([{**LLAMA, "fallback": ["chat"]}], {}, r"fallback\[0\]: chat is the pool itself"),
    "twice": ([{**LLAMA, "fallback": ["hosted"] * 2}, HOSTED], {}, r"fallback\[1\]: hosted is in the list twice"),
    "loop": ([CHAT, {**HOSTED, "fallback": ["chat"]}], {}, "a loop: llama-3.1-8b -> gpt-x ->"),
    "each other": ([{**LLAMA, "fallback": ["b"]}, {**B, "fallback": ["chat"]}], {}, "another pool of llama-3.1-8b has"),
    "two lists": (
        [CHAT, {**B, "fallback": ["c"]}, QWEN, HOSTED],
        {},
        r"fleet\[1\]\.fallback: another pool of llama-3.1-8b has \[hosted\]; expected the same",
    ),
    "of a cascade": ([CHAT, BIG, HOSTED], STAGES, "is a stage of the cascade"),
    "hosted on a GPU": ([{**HOSTED, "gpu": "h100"}], {}, r"fleet\[0\]\.gpu: is not a hosted pool's"),
    "hosted in shards": ([{**HOSTED, "tp": 2}], {}, r"fleet\[0\]\.tp: is not a hosted pool's"),
    "hosted vLLM": ([{**HOSTED, "api": "vllm"}], {}, r"fleet\[0\]\.api: vllm; expected openai"),
    "no time": ([{**HOSTED, "hosted": {"ttft_s": 0}}], {}, r"hosted\.ttft_s: expected number > 0"),
    "unknown reason": ([LLAMA], {"policies": {"fallback": {"when": ["dwon"]}}}, "unknown value 'dwon'"),
}


@pytest.mark.parametrize(("pools", "sections", "expected"), BAD.values(), ids=BAD)
def test_what_cannot_be_a_fallback_is_refused(pools: list[Any], sections: dict[str, Any], expected: str) -> None:
    with pytest.raises(HeadwayError, match=expected) as refused:
        load(*pools, **sections)
    assert "\n" not in str(refused.value)


def test_a_hosted_pool_of_unknown_speed_is_not_simulated() -> None:
    with pytest.raises(HeadwayError, match=r"fleet\[0\]\.hosted\.tokens_per_s: missing; expected it, without which"):
        scenario.run(load({**HOSTED, "hosted": {"ttft_s": 1}}))


def test_a_hosted_pool_takes_its_time_and_its_price() -> None:
    result = scenario.run(load(HOSTED))
    summary = result.summary
    assert summary.ttft_s is not None and summary.tpot_s is not None
    assert 0.5 <= summary.ttft_s.p50 <= summary.ttft_s.max <= 0.511
    assert summary.tpot_s.mean == pytest.approx(0.01)
    assert summary.usd == pytest.approx(40 * (100 * 1.0 + 50 * 4.0) / 1e6) and summary.gpu_hours == 0


def test_a_hosted_pool_serves_no_more_at_a_time_than_it_may() -> None:
    hosted = {**HOSTED, "hosted": {"ttft_s": 0.5, "tokens_per_s": 100, "max_concurrent": 1}}
    summary = scenario.run(load(hosted)).summary
    assert summary.num_completed == 40 and summary.window_s >= 40 * 0.98


def test_what_a_fallback_costs_is_compared() -> None:
    pools = [{**LLAMA, "gpu": "l40s", "fallback": ["hosted"]}, HOSTED]
    down = {"faults": [{"replica": 0, "at_s": 1.0, "down_s": 4.0}]}
    off = scenario.run(load(*pools, **down, policies={"fallback": {"when": []}})).summary
    on = scenario.run(load(*pools, **down)).summary
    assert off.fallbacks == {} and off.models == {}
    answered = on.fallbacks["down"]
    assert set(on.fallbacks) == {"down"} and 10 < answered.num_requests < 40
    assert on.models["gpt-x"].usd == pytest.approx(answered.num_requests * 300 / 1e6)
    assert on.ttft_s is not None and off.ttft_s is not None and on.ttft_s.max < off.ttft_s.max


def test_saved_records_keep_reasons_and_prices(tmp_path: Any) -> None:
    from headway.records import parquet
    from headway.workload.files import from_parquet

    pools = [{**LLAMA, "gpu": "l40s", "fallback": ["hosted"]}, HOSTED]
    records = scenario.run(load(*pools, faults=[{"replica": 0, "at_s": 1.0, "down_s": 4.0}])).records
    parquet.save(records, tmp_path, {})
    loaded, _ = parquet.load(tmp_path)
    assert loaded.requests["fallback"].tolist() == records.requests["fallback"].tolist()
    assert [each.usd_per_million_output_tokens for each in loaded.replicas] == [0.0, 4.0]
    assert len(from_parquet(tmp_path / "requests.parquet")) == 40


@pytest.mark.parametrize(("cached_usd", "expected_usd"), [(None, 40 * 170 * 1.0), (0.1, 39 * (64 * 0.1 + 106) + 170)])
def test_prompts_that_a_service_has_cached_have_their_own_price(cached_usd: float | None, expected_usd: float) -> None:
    """All prompts but the first share 64 of their 170 tokens with it: two full blocks."""
    service = {**HOSTED, "hosted": {**HOSTED["hosted"], "prompt_cache_block_tokens": 32}}  # type: ignore[dict-item]
    prices = {"usd_per_million_output_tokens": 0.0, "usd_per_million_cached_tokens": cached_usd}
    load_ = {**LOAD, "arrivals": 0.5, "prefixes": {"num_groups": 1, "prefix_tokens": 70}}
    result = scenario.run(assemble({"workload": load_, "fleet": [{**service, **prices}]}, Places(), Path()))
    assert result.summary.usd == pytest.approx(expected_usd / 1e6)
