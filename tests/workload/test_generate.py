"""Lengths of one request together: correlation and mixes."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from headway.core.errors import HeadwayError
from headway.workload import lengths
from headway.workload.generate import generate
from headway.workload.spec import WorkloadSpec, resolved
from headway.workload.table import Workload

BASE = """
num_requests: 30000
arrivals: 8
prompt_tokens: {kind: lognormal, mean: 1000, cv: 1.0}
reasoning_tokens: servegen-reasoning
output_tokens: {kind: uniform, min: 10, max: 3000}
"""


def made(text: str, seed: int = 1) -> Workload:
    return generate(msgspec.yaml.decode(text, type=WorkloadSpec), seed).validate()


def columns(rows: Workload) -> list[np.ndarray]:
    reasoning = rows.column("reasoning_tokens")
    return [rows.prompt_tokens, reasoning, rows.output_tokens - reasoning]


@pytest.mark.parametrize("correlation", [0.2, 0.6, 0.95])
def test_every_pair_has_the_rank_correlation_that_was_asked_for(correlation: float) -> None:
    rows = made(BASE + f"correlation: {correlation}\n")
    for one, other in itertools.combinations(columns(rows), 2):
        assert stats.spearmanr(one, other).statistic == pytest.approx(correlation, abs=0.02)


def test_correlation_leaves_each_column_its_distribution_and_arrivals_alone() -> None:
    alone, tied = made(BASE), made(BASE + "correlation: 0.7\n")
    assert (alone.arrival_s == tied.arrival_s).all()
    for one, other in zip(columns(alone), columns(tied), strict=True):
        assert stats.ks_2samp(one, other).pvalue > 1e-3
    assert all((a == b).all() for a, b in zip(columns(alone), columns(made(BASE + "correlation: 0\n")), strict=True))


def test_correlation_of_one_gives_equal_ranks() -> None:
    one = [c.astype("i8") for c in columns(made(BASE + "correlation: 1\n"))]
    order = np.argsort(one[0], kind="stable")
    for other in one[1:]:
        # Ties of the shorter column apart, the order is the same.
        assert stats.spearmanr(one[0], other).statistic > 0.99999
        assert (np.maximum.accumulate(other[order]) - other[order]).max() <= 30


def test_longer_workload_starts_like_a_shorter_one() -> None:
    text = BASE + "correlation: 0.5\n"
    short, long = made(text.replace("30000", "300")), made(text)
    assert all((a == b[:300]).all() for a, b in zip(columns(short), columns(long), strict=True))


DISTRIBUTIONS = [
    lengths.Lognormal(mean=300, cv=1.3, max=2000),
    lengths.Lognormal(p50=300, p99=4000),
    lengths.Uniform(min=3, max=600),
    lengths.Uniform(min=128, max=2048, step=128),
    lengths.Geometric(mean=7),
    lengths.Geometric(mean=1),
    lengths.QuantileTable((0, 0.2, 1), (10, 500, 4000)),
]


@pytest.mark.parametrize("length", DISTRIBUTIONS)
def test_the_value_at_a_score_is_the_quantile_of_what_is_sampled(length: lengths.Distribution) -> None:
    num = 40_000
    drawn = length.sample(np.random.default_rng(1), num)
    at = length.at_scores(stats.norm.ppf((np.arange(num) + 0.5) / num))
    assert (np.diff(at) >= 0).all()
    assert stats.ks_2samp(drawn, at).pvalue > 1e-3
    ends = length.at_scores(np.array([-9.0, 9.0]))
    assert ends[0] <= drawn.min() and ends[1] >= drawn.max()


def test_uniform_steps_are_equally_frequent() -> None:
    drawn = lengths.Uniform(min=128, max=2048, step=128).sample(np.random.default_rng(2), 16_000)
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == list(range(128, 2049, 128))
    assert stats.chisquare(counts).pvalue > 1e-3


MIX = """
num_requests: 20000
arrivals: 8
mix:
  - {share: 3, builtin: reasoning}
  - {share: 1, prompt_tokens: 7, output_tokens: 9}
"""


def test_a_mix_has_its_shares_and_the_lengths_of_its_parts() -> None:
    rows, whole = made(MIX), made("{builtin: reasoning, num_requests: 20000, arrivals: 8}")
    second = rows.prompt_tokens == 7
    plain = second & (rows.output_tokens == 9) & (rows.column("reasoning_tokens") == 0)
    assert plain.mean() == pytest.approx(0.25, abs=0.01)
    assert (rows.arrival_s == whole.arrival_s).all()
    for name in ("prompt_tokens", "output_tokens", "reasoning_tokens"):
        assert (rows.column(name)[~plain] == whole.column(name)[~plain]).all()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0, 5), min_size=2, max_size=5).filter(any), st.integers(0, 99))
def test_kinds_of_a_mix_depend_only_on_the_shares(shares: list[float], seed: int) -> None:
    parts = [{"share": share, "prompt_tokens": k + 1, "output_tokens": 50} for k, share in enumerate(shares)]
    spec = {"num_requests": 2000, "arrivals": 8.0, "mix": parts}
    rows = generate(msgspec.convert(spec, WorkloadSpec), seed)
    counts = np.bincount(rows.prompt_tokens, minlength=len(shares) + 1)[1:]
    expected = 2000 * np.array(shares) / sum(shares)
    assert (np.abs(counts - expected) <= 5 * np.sqrt(expected) + 5).all()  # of a share near 0, one may come
    assert not counts[np.array(shares) == 0].any()


def test_part_of_a_mix_overrides_lengths_of_its_builtin() -> None:
    text = MIX.replace("builtin: reasoning", "builtin: gpqa, output_tokens: 3, reasoning_tokens: 0, correlation: 0")
    rows = made(text)
    assert set(rows.output_tokens.tolist()) == {3, 9} and not rows.column("reasoning_tokens").any()


def test_sessions_of_a_mix() -> None:
    rows = made(MIX + "sessions: {turns: 2, think_s: 1}\n")
    assert set(np.unique(rows.output_tokens[rows.column("reasoning_tokens") == 0])) >= {9}
    assert len(rows) == 20_000


def test_mix_overrides_lengths_of_a_builtin() -> None:
    text = "{builtin: alpaca-eval, mix: [{prompt_tokens: 2, output_tokens: 3}]}"
    rows = made(text)
    assert len(rows) == 2000 and (rows.output_tokens == 3).all() and (rows.column("slo_tpot_s") == 0.1).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("builtin: gqpa", "mix: builtin: unknown builtin workload 'gqpa'; did you mean 'gpqa'"),
        ("builtin: arena-hard-reasoning-heavy", "arena-hard-reasoning-heavy is a mix itself"),
    ],
)
def test_invalid_parts_are_errors(text: str, message: str) -> None:
    spec = msgspec.yaml.decode(MIX.replace("builtin: reasoning", text), type=WorkloadSpec)
    with pytest.raises(HeadwayError, match=message):
        resolved(spec)


def test_a_mix_without_shares_is_an_error() -> None:
    with pytest.raises(HeadwayError, match="mix: shares"):
        made("{num_requests: 5, arrivals: 8, mix: [{share: 0, builtin: chat}]}")


# LoRA adapters.


def test_adapters_are_drawn_by_their_shares_and_leave_all_else_as_it_was() -> None:
    spec = {"arrivals": 10.0, "num_requests": 4000, "prompt_tokens": 10, "output_tokens": 5}
    plain = generate(msgspec.convert(spec, WorkloadSpec), 1)
    for mix, expected in (
        ({"shares": {"sql": 3, "law": 1}, "base_share": 0.2}, {"": 0.2, "sql": 0.6, "law": 0.2}),
        ({"count": 3, "skew": 1.0}, {"": 0.0, "adapter-0": 6 / 11, "adapter-1": 3 / 11, "adapter-2": 2 / 11}),
        ({"count": 2, "skew": 0}, {"": 0.0, "adapter-0": 0.5, "adapter-1": 0.5}),
    ):
        rows = generate(msgspec.convert({**spec, "loras": mix}, WorkloadSpec), 1)
        found = np.bincount(rows.columns["lora"], minlength=len(rows.loras)) / len(rows)
        assert dict(zip(rows.loras, found.tolist(), strict=True)) == pytest.approx(expected, abs=0.03)
        np.testing.assert_array_equal(rows.arrival_s, plain.arrival_s)


@pytest.mark.parametrize(
    ("mix", "expected"),
    [
        ({}, "shares or count"),
        ({"count": 2, "shares": {"a": 1}}, "shares or count"),
        ({"shares": {}}, "shares"),
        ({"shares": {"a": -1}}, "from 0"),
        ({"count": 0}, "count"),
        ({"count": 2, "base_share": 2}, "base_share"),
    ],
)
def test_mixes_of_adapters_that_make_no_sense(mix: dict[str, object], expected: str) -> None:
    spec = {"arrivals": 1.0, "num_requests": 1, "prompt_tokens": 1, "output_tokens": 1, "loras": mix}
    with pytest.raises(msgspec.ValidationError, match=expected):
        msgspec.convert(spec, WorkloadSpec)
