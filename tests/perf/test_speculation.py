"""Step times and memory with speculative decoding: parts by hand, published speed-ups, and where it pays."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import headway_papers
from headway import catalog
from headway.core.fleet import Parallel, Speculative, by_rate
from headway.perf import memory, speculation
from headway.perf.speculation import step_model
from headway.perf.step import StepModel, graph_tokens

MODEL = catalog.model("llama-3.1-8b")
GPU = catalog.gpu("h100")
ENGINE = catalog.engine("vllm-0.15")
HEAD = replace(MODEL, num_layers=1, sampling=None, tie_embeddings=True)
SRC = Path(speculation.__file__).parents[1]


def drafts(num: int, rate: float = 0.7, **given: Any) -> Speculative:
    kind = {"method": "ngram", **given}
    return Speculative(num_speculative_tokens=num, acceptance=by_rate(rate, num), **kind)


def eagle(num: int, rate: float = 0.7, **given: Any) -> Speculative:
    return drafts(num, rate, method="eagle", draft=HEAD, draft_shares_embeddings=True, **given)


def step_s(setting: Speculative | None, num: int = 1, context: int = 600, **given: Any) -> float:
    engine = ENGINE if setting is None else replace(ENGINE, speculative=setting)
    return step_model(MODEL, GPU, engine, Parallel(), **given).line(num, num * context)[0]


def token_s(setting: Speculative | None, num: int = 1) -> float:
    """Seconds of an output token of each sequence."""
    return step_s(setting, num) / (1.0 if setting is None else setting.tokens_per_iteration(num))


# Published measurements.

EAGLE_ON_8B = {2: (2.10, 4.37), 3: (2.29, 4.29), 4: (2.39, 4.48), 5: (2.43, 4.71), 6: (2.45, 4.94), 7: (2.47, 5.20)}
"""Llama-3.1-8B, batch size 1, MT-Bench: drafted tokens -> (mean acceptance length, TPOT in ms). vLLM issue 20780."""
SPEED_UPS_ON_H100 = {2: 1.51, 4: 1.48, 7: 1.27}
"""The same on one H100, from output tokens per second. vLLM pull request 16937, from which nothing was fitted."""


@pytest.mark.parametrize("num", EAGLE_ON_8B)
def test_iterations_with_an_eagle_head(num: int) -> None:
    length, tpot_ms = EAGLE_ON_8B[num]
    assert step_s(eagle(num)) * 1e3 == pytest.approx(length * tpot_ms, rel=0.05)


@pytest.mark.parametrize("num", SPEED_UPS_ON_H100)
def test_speed_ups_on_h100(num: int) -> None:
    length, _ = EAGLE_ON_8B[num]
    assert step_s(None) / step_s(eagle(num)) * length == pytest.approx(SPEED_UPS_ON_H100[num], rel=0.1)


EAGLE3_TPOT_MS = {2: 4.32, 3: 4.09, 4: 4.05, 5: 4.13, 6: 4.20, 7: 4.29}
"""The same with EAGLE-3, from a server. Its acceptance lengths in the issue are of other runs."""


def test_one_acceptance_rate_explains_all_times_with_eagle_3() -> None:
    """The rate is not published, but one value fits six numbers of drafted tokens."""
    head = replace(HEAD, vocab_size=32_000)
    for num, tpot_ms in EAGLE3_TPOT_MS.items():
        setting = drafts(num, 0.6, method="eagle3", draft=head)
        assert token_s(setting) * 1e3 == pytest.approx(tpot_ms, rel=0.03)


# Parts.


def test_a_draft_that_costs_nothing_divides_the_time_by_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """At batch size 1 verification reads the same weights, so the speed-up is nearly (1 - a**(k + 1)) / (1 - a)."""
    monkeypatch.setattr(speculation, "DRAFT_STEP_S", 0.0)
    monkeypatch.setattr(speculation, "NGRAM_SEQUENCE_S", 0.0)
    for num, rate in ((1, 0.5), (3, 0.7), (5, 0.9)):
        expected = (1 - rate ** (num + 1)) / (1 - rate)
        assert token_s(None) / token_s(drafts(num, rate)) == pytest.approx(expected, rel=0.03)


def test_speculation_pays_for_small_batches_and_costs_in_large_ones() -> None:
    gains = [token_s(None, num) / token_s(eagle(3, 0.6), num) for num in (1, 8, 64, 256)]
    assert gains[0] > 1.4 and gains[-1] < 0.9
    assert gains == sorted(gains, reverse=True)
    assert token_s(None, 256) / token_s(eagle(3, 0.0), 256) < 0.6


def test_a_schedule_by_batch_size_ends_the_loss() -> None:
    setting = eagle(3, 0.6, num_speculative_tokens_per_batch_size=((1, 32, 3), (33, 64, 1)))
    assert step_s(setting, 8) == step_s(eagle(3, 0.6), 8)
    assert step_s(setting, 64) < step_s(eagle(3, 0.6), 64)
    assert step_s(setting, 65) == step_s(None, 65)


def test_each_further_draft_is_one_pass_of_the_head() -> None:
    verify = [StepModel(MODEL, GPU, ENGINE, Parallel(), queries=n + 1, rows=n + 1).line(4, 2400)[0] for n in (2, 3)]
    passes = [step_s(eagle(num), 4) - verified for num, verified in zip((2, 3), verify, strict=True)]
    pass_s = passes[1] - passes[0]
    layer_bytes = memory.plan(HEAD, GPU, ENGINE, Parallel()).weights_bytes
    assert layer_bytes / GPU.bandwidth_bytes_per_s < pass_s < 2 * layer_bytes / GPU.bandwidth_bytes_per_s


def test_a_larger_draft_model_takes_longer() -> None:
    small, large = catalog.model("llama-3.2-3b"), MODEL
    one, other = (drafts(3, method="draft_model", draft=replace(each, sampling=None)) for each in (small, large))
    assert step_s(eagle(3)) < step_s(one) < step_s(other)
    assert step_s(other) > 3 * step_s(None)


def test_verification_reads_the_cache_once() -> None:
    """The cost of a context token does not depend on the number of drafted tokens while memory is the limit."""
    slopes = []
    for setting in (None, drafts(1), drafts(5)):
        engine = ENGINE if setting is None else replace(ENGINE, speculative=setting)
        model = step_model(MODEL, GPU, engine, Parallel())
        slopes.append(model.line(8, 80_000)[0] - model.line(8, 0)[0])
    assert slopes[1] == pytest.approx(slopes[0]) and slopes[2] == pytest.approx(slopes[0])


def test_prompts_pass_through_the_draft_model_too() -> None:
    chunk = [(2048, 0)]
    engine = replace(ENGINE, speculative=drafts(3, method="draft_model", draft=replace(MODEL, sampling=None)))
    times = [step_model(MODEL, GPU, each, Parallel()).line(0, 0, chunk)[0] for each in (ENGINE, engine)]
    assert times[1] > 1.8 * times[0]


@pytest.mark.parametrize(("num_seqs", "queries", "padded"), [(1, 4, 4), (2, 4, 8), (3, 3, 9), (4, 3, 18), (70, 4, 288)])
def test_graphs_have_whole_sequences(num_seqs: int, queries: int, padded: int) -> None:
    """vLLM rounds its sizes 1, 2, 4, 8, 16, ... up to multiples of the tokens of a sequence."""
    assert graph_tokens(num_seqs * queries, queries) == padded


def test_no_times_of_drafts_count_as_measured() -> None:
    assert step_model(MODEL, GPU, ENGINE, Parallel()).calibrated
    assert not step_model(MODEL, GPU, replace(ENGINE, speculative=drafts(3)), Parallel()).calibrated


# Memory.


def test_a_head_takes_memory_for_its_layer_and_its_cache() -> None:
    plain = memory.plan(MODEL, GPU, ENGINE, Parallel())
    own = replace(HEAD, vocab_size=32_000)
    found = memory.plan(MODEL, GPU, replace(ENGINE, speculative=drafts(3, method="eagle3", draft=own)), Parallel())
    layer = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336
    assert found.weights_bytes - plain.weights_bytes == pytest.approx(2.0 * (layer + 32_000 * 4096), rel=1e-3)
    assert found.kv_bytes_per_token == plain.kv_bytes_per_token * 33 / 32
    assert found.kv_capacity_tokens < plain.kv_capacity_tokens * 32 / 33
    shared = memory.plan(MODEL, GPU, replace(ENGINE, speculative=eagle(3)), Parallel())
    assert shared.weights_bytes - plain.weights_bytes == pytest.approx(2.0 * layer, rel=1e-3)


def test_matches_in_the_text_take_no_memory() -> None:
    assert memory.plan(MODEL, GPU, replace(ENGINE, speculative=drafts(3)), Parallel()) == memory.plan(
        MODEL, GPU, ENGINE, Parallel()
    )


# A rule.


def test_step_times_are_made_with_their_drafts() -> None:
    """Outside perf, `step_model` makes step times: `StepModel` knows nothing of speculation."""
    made = re.compile(r"(?<!Speculative)StepModel\(")
    folders = (SRC, Path(headway_papers.__path__[0]))
    users = [path for folder in folders for path in folder.rglob("*.py") if made.search(path.read_text())]
    assert {path.parent.name for path in users} == {"perf"}
