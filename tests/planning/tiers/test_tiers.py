"""The best number of tiers: against brute force, with ties, tolerances and few seeds."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_rel

from headway import scenario
from headway.cli import main
from headway.config.spec import PolicySpecs
from headway.core.errors import HeadwayError
from headway.metrics.interval import interval
from headway.planning.tiers.rehearsal import with_tiers
from headway.planning.tiers.search import highest_mean, merged, plan


@given(st.integers(1, 12), st.integers(1, 12))
def test_neighbours_are_merged_as_evenly_as_possible(num_classes: int, num_tiers: int) -> None:
    classes = np.arange(num_classes, dtype=np.int16)
    tiers = merged(classes, num_classes, num_tiers)
    assert tiers.dtype == classes.dtype
    assert (np.diff(tiers) >= 0).all() and tiers[0] == 0 and tiers.max() < num_tiers
    if num_tiers <= num_classes:
        sizes = np.bincount(tiers)
        assert len(sizes) == num_tiers and sizes.max() - sizes.min() <= 1


@given(st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=6, max_size=6), st.floats(0, 0.3))
def test_the_plan_follows_its_definitions(table: list[list[float]], tolerance: float) -> None:
    pairs = [(k, decay) for k in (2, 3, 5) for decay in (0.5, 1.0)]
    known = dict(zip(pairs, table, strict=True))
    found = plan(lambda k, decay, seed: known[k, decay][seed], (2, 3, 5), (0.5, 1.0), range(4), interval, tolerance)
    assert found.best.mean == max(fmean(values) for values in table)
    best = found.best.values
    for setting in found.settings:
        losses = np.subtract(best, setting.values)
        if np.ptp(losses) > 1e-6:
            # Tied: a paired t test at 5%, two-sided, does not find it worse.
            test = ttest_rel(best, setting.values)
            if abs(test.pvalue - 0.05) > 1e-6:
                assert setting.is_tied == (test.pvalue > 0.05)
        assert setting.is_enough == (setting.loss[1] <= tolerance)
    enough = [setting for setting in found.settings if setting.is_enough]
    assert found.chosen in enough and found.best in enough and found.best in found.tied
    assert found.chosen.num_tiers == min(setting.num_tiers for setting in enough)


def test_fewer_tiers_are_enough_if_they_lose_little() -> None:
    def value(k: int, decay: float, seed: int) -> float:
        return 1 - 2.0**-k + 1e-4 * ((seed * k) % 3)

    found = plan(value, (1, 2, 4, 8), (1.0,), range(5), interval, tolerance=0.1)
    assert (found.best.num_tiers, found.chosen.num_tiers) == (8, 4)
    strict = plan(value, (1, 2, 4, 8), (1.0,), range(5), interval, tolerance=0.001)
    assert strict.chosen.num_tiers == 8


def test_one_tier_is_evaluated_with_one_decay() -> None:
    asked = []

    def value(k: int, decay: float, seed: int) -> float:
        asked.append((k, decay))
        return 1.0 + 0.01 * seed

    found = plan(value, (1, 2), (0.5, 1.0, 2.0), (0, 1), interval)
    assert sorted(set(asked)) == [(1, 0.5), (2, 0.5), (2, 1.0), (2, 2.0)]
    assert found.chosen.num_tiers == 1 and len(found.tied) == 4


@pytest.mark.parametrize("given_", [((), (1.0,), (0, 1)), ((1,), (), (0, 1)), ((1,), (1.0,), (0,))])
def test_too_little_to_choose_from(given_: tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...]]) -> None:
    with pytest.raises(HeadwayError, match="expected"):
        plan(lambda k, decay, seed: 1.0, *given_, interval)


# `headway plan tiers`.

SCENARIO = """
workload:
  builtin: ktier
  num_requests: 200
  arrivals: 300
  tiers:
    - {tier: 0, ttft_s: 0.2}
    - {tier: 1, ttft_s: 1}
    - {tier: 2, ttft_s: 3}
    - {tier: 3}
fleet:
  - {model: llama-2-7b, gpu: a100-80gb, engine: {name: simulated, max_num_seqs: 16}, replicas: 2}
policies:
  routing: freest
  ordering: {name: priority, preemptive: false}
  ordering_at: both
  window: 16
  migration: {name: llumnix, h_max: 0.1}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(SCENARIO)
    return path


def test_as_many_tiers_as_classes_is_the_scenario_itself(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiers", str(file), "--tiers", "1,4", "--decay", "1", "--seeds", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    four = next(setting for setting in found["settings"] if setting["num_tiers"] == 4)
    for seed in range(2):
        changes: Any = {("seed",): ("", seed), ("policies", "routing"): ("", {"name": "freest", "num_tiers": 4})}
        run = scenario.run(scenario.load(file, changes))
        assert four["values"][seed] == run.summary.slo_attainment


def test_the_table_marks_sufficient_settings(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "tiers", str(file), "--tiers", "1,2", "--decay", "0.5,2", "--seeds", "2", "--tolerance", "1"])
        == 0
    )
    out = capsys.readouterr().out
    assert "fewest tiers that lose 100.0% at most: 1 tier," in out
    assert "of 3 settings are tied" in out


def test_policies_with_tiers_get_the_number_and_those_with_headroom_the_decay() -> None:
    policies = PolicySpecs(routing="freest", migration={"name": "llumnix", "h_max": 0.1}, ordering="priority", window=3)
    assert with_tiers(policies, 3, 0.5) == PolicySpecs(
        routing={"name": "freest", "num_tiers": 3, "decay": 0.5},
        migration={"name": "llumnix", "h_max": 0.1, "num_tiers": 3, "decay": 0.5},
        ordering="priority",
        window=3,
    )
    phases = PolicySpecs(ordering={"name": "tiers-and-phases", "quantum_tokens": 9})
    assert with_tiers(phases, 3, 0.5).ordering == {"name": "tiers-and-phases", "quantum_tokens": 9, "num_tiers": 3}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ttft_s", "timeout_s", "no request has an SLO"),
        ("arrivals: 300", "arrivals: 300\n  concurrency: 4", "expected no concurrency"),
        ("freest", "freeest", "did you mean"),
    ],
)
def test_mistakes_are_named(file: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str) -> None:
    file.write_text(SCENARIO.replace(old, new))
    assert main(["plan", "tiers", str(file), "--tiers", "1", "--seeds", "2"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--tiers", "0"], ["--tiers", "two"], ["--decay", "-1"], []])
def test_options_that_are_no_numbers_are_refused(
    file: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert main(["plan", "tiers", *([str(file)] if flags else []), *flags]) == 2
    assert "expected" in capsys.readouterr().err


values = st.lists(st.sampled_from([0.0, 0.5, 0.75, 1.0]), min_size=3, max_size=3)


@given(st.lists(st.tuples(values, values), min_size=1, max_size=4))
def test_the_best_is_found_without_keys_whose_bound_is_lower(drawn: list[tuple[list[float], list[float]]]) -> None:
    exact = {i: [min(pair) for pair in zip(*both, strict=True)] for i, both in enumerate(drawn)}
    bounds = {i: bound for i, (bound, _) in enumerate(drawn)}
    asked: list[int] = []

    def looked_at(i: int) -> list[float]:
        asked.append(i)
        return exact[i]

    best, found = highest_mean(bounds, looked_at)
    assert best == max(exact, key=lambda i: sum(exact[i])) and list(found) == exact[best]
    assert len(asked) == len(set(asked))
    assert all(sum(bounds[i]) >= sum(found) for i in asked)
