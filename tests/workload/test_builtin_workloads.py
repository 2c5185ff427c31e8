"""The built-in workloads of PASCAL and of K-tier Llumnix against what the papers say of them."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from scipy import stats

from headway.workload.describe import describe
from headway.workload.generate import generate
from headway.workload.spec import WorkloadSpec, builtin_workloads
from headway.workload.table import Workload

NUM = 100_000
CHAT = ("alpaca-eval", "arena-hard")
PROBLEMS = ("math-500", "gpqa", "live-code-bench")


def made(name: str, num: int | None = NUM, seed: int = 5, more: str = "") -> Workload:
    suffix = "" if num is None else f", num_requests: {num}"
    return generate(msgspec.yaml.decode(f"{{builtin: {name}{suffix}{more}}}", type=WorkloadSpec), seed).validate()


def phases(rows: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Reasoning and answer tokens."""
    reasoning = rows.column("reasoning_tokens").astype("i8")
    return reasoning, rows.output_tokens - reasoning


@pytest.mark.parametrize("name", CHAT)
def test_chat_thinks_briefly_but_for_a_long_tail(name: str) -> None:
    reasoning, answer = phases(made(name))
    assert (reasoning < 1000).mean() > 0.70
    assert stats.skew(reasoning) > 2
    assert 300 < np.median(answer) < 1000 and answer.mean() > 0.85 * reasoning.mean()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", CHAT)
def test_run_over_many_bins_is_counted_in_pieces(name: str, seed: int) -> None:
    reasoning, _ = phases(made(name, 2000, seed, ", arrivals: 5"))
    counts = np.bincount(reasoning // 256)
    assert (counts[:12] >= 1).all() and (counts[: 4096 // 256] >= 1).sum() >= 15
    assert len(counts) > 5120 // 256
    assert (reasoning < 1000).mean() > 0.68


def test_arena_hard_is_longer_than_alpaca_eval() -> None:
    alpaca, arena = made("alpaca-eval"), made("arena-hard")
    for one, other in zip((*phases(alpaca), alpaca.prompt_tokens), (*phases(arena), arena.prompt_tokens), strict=True):
        assert one.mean() < other.mean() and np.median(one) < np.median(other)


def test_math_workloads_have_long_reasoning_and_short_answers() -> None:
    ratios = {}
    for name in PROBLEMS:
        reasoning, answer = phases(made(name))
        ratios[name] = reasoning.mean() / answer.mean()
        assert answer.mean() < phases(made("arena-hard"))[1].mean()
        assert reasoning.mean() > phases(made("arena-hard"))[0].mean()
    assert max(ratios.values()) == pytest.approx(8.48, rel=0.02)
    assert min(ratios.values()) > 4


@pytest.mark.parametrize("name", (*CHAT, *PROBLEMS))
def test_means_match_the_file_despite_bounds(name: str) -> None:
    rows = made(name)
    known = builtin_workloads()[name]
    reasoning, answer = phases(rows)
    drawn = {"prompt_tokens": rows.prompt_tokens, "reasoning_tokens": reasoning, "output_tokens": answer}
    for column, tokens in drawn.items():
        assert tokens.mean() == pytest.approx(getattr(known, column).mean, rel=0.02)
    assert stats.spearmanr(reasoning, answer).statistic == pytest.approx(known.correlation, abs=0.02)


def test_half_of_arena_hard_is_replaced_by_the_three_alike() -> None:
    mixed, arena = made("arena-hard-reasoning-heavy"), made("arena-hard")
    kinds = {name: made(name) for name in ("arena-hard", *PROBLEMS)}
    same = {
        name: np.all([mixed.column(c) == rows.column(c) for c in ("prompt_tokens", "output_tokens")], axis=0)
        for name, rows in kinds.items()
    }
    assert same["arena-hard"].mean() == pytest.approx(0.5, abs=0.01)
    for name in PROBLEMS:
        assert same[name].mean() == pytest.approx(1 / 6, abs=0.01)
    assert np.any(list(same.values()), axis=0).all()
    assert (mixed.arrival_s == arena.arrival_s).all()


def test_pascals_first_experiment_is_of_the_reasoning_phase() -> None:
    rows = made("pascal-reasoning", None)
    reasoning, answer = phases(rows)
    assert len(rows) == 300 and (rows.prompt_tokens == 128).all() and (answer == 1).all()
    counts = np.bincount(reasoning, minlength=2049)
    assert (counts[[128, 256, 512, 1024, 2048]] >= 5).all() and counts[::128].sum() == 300
    assert phases(made("pascal-reasoning"))[0].mean() == pytest.approx((128 + 2048) / 2, rel=0.01)
    gaps = np.diff(made("pascal-reasoning").arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.02)


def test_pascals_second_experiment_is_of_the_answering_phase() -> None:
    rows = made("pascal-answering", None)
    assert len(rows) == 300 and (rows.prompt_tokens == 128).all() and not rows.column("reasoning_tokens").any()
    assert (np.bincount(rows.output_tokens, minlength=2049)[[128, 256, 512, 1024, 2048]] >= 5).all()
    assert (rows.column("slo_ttft_s") == 0.25).all() and (rows.column("slo_tpot_s") == 0.1).all()


def test_k_tier_lengths_are_those_of_table_1() -> None:
    rows = made("ktier")
    total = rows.prompt_tokens.astype("i8") + rows.output_tokens
    assert total.min() >= 64 and total.max() <= 512
    # A length on the edge of two ranges counts half for each.
    below = [((total < edge).mean() + (total <= edge).mean()) / 2 for edge in (64, 128, 256, 384, 512)]
    assert np.diff(below) * 0.99 == pytest.approx([0.65, 0.22, 0.10, 0.02], abs=0.006)
    assert (np.abs(rows.prompt_tokens - 2 * rows.output_tokens) <= 2).all()
    assert describe(rows).rate == pytest.approx(1250, rel=0.02)


@pytest.mark.parametrize("mix", ["uniform", "gaussian", "enterprise"])
def test_k_tier_takes_any_mix_and_any_number_of_tiers(mix: str) -> None:
    for num_tiers in (1, 2, 5, 10):
        rows = made("ktier", 5000, 1, f", tiers: {{mix: {mix}, num_tiers: {num_tiers}}}")
        assert len(np.unique(rows.column("tier"))) == num_tiers
        assert (rows.prompt_tokens == made("ktier", 5000, 1).prompt_tokens).all()


def test_production_reasoning_requests_at_a_poisson_rate() -> None:
    data = os.environ.get("HEADWAY_DATA")
    if not data:
        pytest.skip("HEADWAY_DATA is not set: no real trace to read")
    path = Path(data) / "traces" / "servegen_reasoning_requests.csv.gz"
    text = f"{{trace: {{path: {path}, limit: 2000, rate_scale: 2}}, arrivals: 5}}"
    rows = generate(msgspec.yaml.decode(text, type=WorkloadSpec), 1).validate()
    assert len(rows) == 2000 and describe(rows).rate == pytest.approx(10, rel=0.1)
    reasoning, answer = phases(rows)
    assert (reasoning.mean(), answer.mean()) == (pytest.approx(1135, rel=0.15), pytest.approx(396, rel=0.15))
    scaled = msgspec.yaml.decode(f"{{trace: {{path: {path}, rate_scale: 10}}}}", type=WorkloadSpec)
    whole = generate(scaled, 1)
    assert len(whole) == 50_000 and describe(whole).rate == pytest.approx(5.79, rel=0.01)
    assert whole.column("reasoning_tokens").mean() == pytest.approx(1134.9, abs=0.1)
