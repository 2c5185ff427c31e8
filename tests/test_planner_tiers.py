"""The best number of tiers: against brute force, with ties, tolerances and few seeds."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_rel

from headway.core.errors import HeadwayError
from headway.planner.tiers import merged, plan
from headway.reproduce.interval import interval


@given(st.integers(1, 12), st.integers(1, 12))
def test_neighbours_go_together_as_evenly_as_can_be(num_classes: int, num_tiers: int) -> None:
    classes = np.arange(num_classes, dtype=np.int16)
    tiers = merged(classes, num_classes, num_tiers)
    assert tiers.dtype == classes.dtype
    assert (np.diff(tiers) >= 0).all() and tiers[0] == 0 and tiers.max() < num_tiers
    if num_tiers <= num_classes:
        sizes = np.bincount(tiers)
        assert len(sizes) == num_tiers and sizes.max() - sizes.min() <= 1


@given(st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=6, max_size=6), st.floats(0, 0.3))
def test_the_answer_is_what_its_words_say(table: list[list[float]], tolerance: float) -> None:
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


def test_fewer_tiers_will_do_where_they_lose_little() -> None:
    def value(k: int, decay: float, seed: int) -> float:
        return 1 - 2.0**-k + 1e-4 * ((seed * k) % 3)

    found = plan(value, (1, 2, 4, 8), (1.0,), range(5), interval, tolerance=0.1)
    assert (found.best.num_tiers, found.chosen.num_tiers) == (8, 4)
    strict = plan(value, (1, 2, 4, 8), (1.0,), range(5), interval, tolerance=0.001)
    assert strict.chosen.num_tiers == 8


def test_one_tier_is_tried_once_whatever_its_decay() -> None:
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
