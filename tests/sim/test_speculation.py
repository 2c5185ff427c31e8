"""Speculative decoding in the simulated engine: closed forms, the same results however it steps, and replay."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headway.core.fleet import Pool, Speculative, by_rate
from headway.records.parquet import load, save
from headway.sim.speculation import uniforms
from simulation import (
    MODEL,
    Demoting,
    Scenario,
    assert_agree,
    by_request,
    num_examples,
    play,
    pool,
    request,
    scenarios,
    seconds,
)


def drafts(num: int = 3, rate: float = 0.7, **given: Any) -> Speculative:
    return Speculative(method="ngram", num_speculative_tokens=num, acceptance=by_rate(rate, num), **given)


def speculating(pool: Pool, setting: Speculative) -> Pool:
    return replace(pool, engine=replace(pool.engine, speculative=setting))


def iterations(*pools: Pool, output: int = 30_001, **given: Any) -> int:
    """Iterations in which one request alone decodes all its tokens but the first."""
    records = play([request(0, 0.0, 5, output, **given)], *pools, line=seconds(0.01))
    return int(records.segments["left_tick"][0] - records.segments["joined_tick"][0])


# Closed forms.


@pytest.mark.parametrize("num", [1, 3, 5])
@pytest.mark.parametrize("rate", [0.0, 0.4, 0.7, 0.95, 1.0])
def test_tokens_an_iteration(num: int, rate: float) -> None:
    """(1 - a**(k + 1)) / (1 - a), from Leviathan et al., equation 1."""
    expected = num + 1 if rate == 1.0 else (1 - rate ** (num + 1)) / (1 - rate)
    assert drafts(num, rate).tokens_per_iteration() == pytest.approx(expected)
    model = replace(MODEL, max_context_tokens=1_000_000)
    found = 30_000 / iterations(pool(model=model, kv_capacity_tokens=10**6, speculative=drafts(num, rate)))
    assert found == pytest.approx(expected, rel=0.02)


def test_acceptance_by_position() -> None:
    setting = Speculative(method="ngram", num_speculative_tokens=3, acceptance=(0.73, 0.52, 0.36))
    assert setting.tokens_per_iteration() == pytest.approx(2.61)
    assert 30_000 / iterations(pool(kv_capacity_tokens=10**6, speculative=setting)) == pytest.approx(2.61, rel=0.02)


def test_iterations_without_a_match_give_one_token() -> None:
    setting = drafts(3, 1.0, match_share=0.25)
    assert 30_000 / iterations(pool(kv_capacity_tokens=10**6, speculative=setting)) == pytest.approx(1.75, rel=0.02)


def test_a_request_has_its_own_acceptance() -> None:
    one = pool(kv_capacity_tokens=10**6, speculative=drafts(3, 0.7))
    assert iterations(one, output=4001, acceptance=0.0) == 4000
    assert iterations(one, output=4001, acceptance=1.0) == 1000


def test_the_last_iteration_gives_no_token_too_many() -> None:
    records = play([request(0, 0.0, 5, 7)], pool(speculative=drafts(3, 1.0)), line=seconds(1.0))
    assert records.requests["generated_tokens"].tolist() == [7]
    assert records.requests["end_s"].tolist() == [3.0]  # the prompt and one token, then 4 and 2


def test_saved_records_have_the_accepted_tokens(tmp_path: Path) -> None:
    one = pool(speculative=drafts(3, 0.7))
    records = play([request(i, 0.1 * i, 5, 40) for i in range(5)], one, line=seconds(0.01))
    save(records, tmp_path, {})
    loaded, _ = load(tmp_path)
    assert records.drafts["tokens"].sum() > 50
    for name, column in records.drafts.items():
        assert (loaded.drafts[name] == column).all()
    assert play([request(0, 0.0, 5, 40)], pool(), line=seconds(0.01)).drafts == {}


def test_uniforms_are_uniform_and_independent() -> None:
    drawn = np.concatenate([uniforms(3, request, np.arange(2000, dtype=np.uint64)) for request in range(20)])
    counts, _ = np.histogram(drawn, 20, (0.0, 1.0))
    assert ((counts - 2000) ** 2 / 2000).sum() < 43.8  # chi-squared with 19 degrees of freedom, 0.1 %
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(drawn[:2000], drawn[2000:4000])[0, 1]) < 0.06
    assert uniforms(3, 0, np.array([7], np.uint64))[0] == drawn[7]


def test_the_acceptance_of_a_request_depends_on_the_seed_alone() -> None:
    requests = [request(i, 0.1 * i, 20, 40) for i in range(20)]
    one = pool(speculative=drafts())
    first, again, other = (play(requests, one, line=seconds(0.01), seed=seed) for seed in (1, 1, 2))
    alone = play(
        [requests[0], *(replace(each, arrival_s=100.0) for each in requests[1:])], one, line=seconds(0.01), seed=1
    )
    ticks = [records.segments["left_tick"] - records.segments["joined_tick"] for records in (first, again, other)]
    assert (ticks[0] == ticks[1]).all()
    assert len(ticks[0]) != len(ticks[2]) or (ticks[0] != ticks[2]).any()
    of_0 = [records.segments["left_tick"] - records.segments["joined_tick"] for records in (first, alone)]
    at = [int(np.flatnonzero(records.segments["request"] == 0)[0]) for records in (first, alone)]
    assert of_0[0][at[0]] == of_0[1][at[1]]


# Memory, budget and batch size.


def test_drafted_tokens_take_slots() -> None:
    """A request of 64 tokens fits 4 blocks of 16; with 3 drafted tokens it needs a fifth."""
    kept = {"block_size_tokens": 16, "kv_capacity_tokens": 64}
    [plain] = play([request(0, 0.0, 60, 5)], pool(**kept)).requests["outcome"]
    [drafting] = play([request(0, 0.0, 60, 5)], pool(**kept, speculative=drafts(3))).requests["outcome"]
    assert (plain, drafting) == (0, 2)
    assert drafts(3).num_slots == 3
    assert drafts(3, draft=MODEL).num_slots == 6


def test_drafted_tokens_use_the_budget_of_prompts() -> None:
    """10 sequences decode with 3 drafted tokens each: of 100 tokens, 60 are left for a prompt, not 90."""
    requests = [*(request(i, 0.0, 1, 200) for i in range(10)), request(10, 1.0, 120, 1)]
    engine = {"max_num_batched_tokens": 100, "max_num_seqs": 20}
    for setting, most in ((None, 90), (drafts(3, 0.0), 60)):
        records = play(requests, pool(**engine, speculative=setting), line=seconds(0.1))
        assert records.stretches["prefill_tokens"][1:].max() == most


def test_large_batches_draft_less() -> None:
    setting = drafts(3, 1.0, num_speculative_tokens_per_batch_size=((1, 1, 3), (2, 2, 1)))
    one = pool(speculative=setting)
    for num, ticks in ((1, 30), (2, 60), (3, 120)):
        records = play([request(i, 0.0, 5, 121) for i in range(num)], one, line=seconds(0.01))
        assert (records.segments["left_tick"] - records.segments["joined_tick"]).tolist() == [ticks] * num
    # Two sequences until the first ends: 60 tokens by twos, then the rest of the other by fours.
    records = play([request(0, 0.0, 5, 61), request(1, 0.0, 5, 121)], one, line=seconds(0.01))
    assert sorted((records.segments["left_tick"] - records.segments["joined_tick"]).tolist()) == [30, 45]


# Stretches, exact steps and replay.


def _with_drafts(scenario: Scenario, setting: Speculative) -> Scenario:
    pools = tuple(speculating(each, setting) for each in scenario.pools)
    combos = tuple(
        replace(combo, parts=tuple(speculating(part, setting) for part in combo.parts)) for combo in scenario.combos
    )
    return dataclasses.replace(scenario, pools=pools, combos=combos)


_settings = st.builds(
    drafts,
    num=st.sampled_from((1, 3, 5)),
    rate=st.sampled_from((0.0, 0.5, 0.8, 1.0)),
    match_share=st.sampled_from((1.0, 1.0, 0.5)),
    num_speculative_tokens_per_batch_size=st.sampled_from(((), (), ((1, 2, 1),), ((1, 1, 1), (2, 4, 0)))),
    draft=st.sampled_from((None, MODEL)),
)


@pytest.mark.ci
@settings(
    max_examples=num_examples(60),
    derandomize="HEADWAY_FUZZ_EXAMPLES" not in os.environ,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(scenarios(), _settings)
def test_stretches_change_nothing(scenario: Scenario, setting: Speculative) -> None:
    assert_agree(_with_drafts(scenario, setting))


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize(
    "setting", [drafts(3, 0.6), drafts(4, 0.9, num_speculative_tokens_per_batch_size=((1, 6, 2),))]
)
def test_stretches_change_nothing_under_pressure(setting: Speculative, prefix_caching: bool) -> None:
    rng = np.random.default_rng(3)
    requests = tuple(
        request(
            i, 0.05 * i, int(rng.integers(1, 200)), int(rng.integers(1, 120)), acceptance=0.3 if i % 5 == 0 else None
        )
        for i in range(60)
    )
    engine = {"max_num_seqs": 12, "max_num_batched_tokens": 128, "kv_capacity_tokens": 900}
    pools = (pool(prefix_caching=prefix_caching, **engine, speculative=setting),)
    records = assert_agree(Scenario(requests, pools, ordering=Demoting))
    assert records.requests["preemptions"].sum() > 0
    assert (records.stretches["iterations"] > 1).any()
    assert (by_request(records.requests)["generated_tokens"] == [each.output_tokens for each in requests]).all()
