"""Regret and ranking, on numbers worked out by hand."""

import pytest

from headway_papers.arena.ranking import best_of, regrets, standings


def test_regret_is_the_paired_difference_from_the_best_over_its_mean() -> None:
    # Both swing by far more than they differ: only the pairs show that b is worse in every seed.
    found = regrets({"a": [10.0, 20.0, 30.0], "b": [9.0, 19.0, 29.0], "c": [11.0, 18.0, 30.0]}, "high")
    assert found["a"].mean == 0 and found["a"].is_tied
    assert found["b"].mean == pytest.approx(1 / 20) and not found["b"].is_tied
    assert found["b"].low == pytest.approx(found["b"].high) == pytest.approx(0.05)
    assert found["c"].is_tied and found["c"].mean == pytest.approx(1 / 60)
    assert found["c"].by_seed == pytest.approx((-0.05, 0.1, 0.0))


def test_low_is_better_for_latencies() -> None:
    found = regrets({"a": [1.0, 1.0], "b": [3.0, 3.0]}, "low")
    assert found["b"].mean == pytest.approx(2.0)
    assert best_of({"a": [1.0], "b": [3.0]}, "low") == "a"


def test_an_oracle_is_no_best_one_and_may_have_negative_regret() -> None:
    values = {"real": [8.0, 8.0], "oracle": [10.0, 10.0]}
    assert best_of(values, "high", {"oracle"}) == "real"
    assert regrets(values, "high", {"oracle"})["oracle"].mean == pytest.approx(-0.25)
    assert best_of({"oracle": [10.0]}, "high", {"oracle"}) == "oracle"


def test_where_the_best_has_nothing_nobody_loses() -> None:
    assert regrets({"a": [0.0], "b": [0.0]}, "high")["b"].mean == 0
    assert regrets({"a": [0.0], "b": [4.0]}, "low")["b"].mean == 1
    assert regrets({}, "high") == {}


def test_the_ranking_is_by_mean_regret_over_cells_with_an_interval_over_seeds() -> None:
    cells = {
        "x": regrets({"a": [10.0, 10.0], "b": [9.0, 8.0], "half": [5.0, 5.0]}, "high"),
        "y": regrets({"a": [10.0, 10.0], "b": [10.0, 10.0]}, "high"),
    }
    first, second, third, last = standings(cells, ["none", "half", "b", "a"])
    assert [first.name, second.name, third.name, last.name] == ["a", "b", "half", "none"]
    assert second.regret is not None and second.regret.mean == pytest.approx(0.075)
    assert second.regret.half == pytest.approx(12.706 * 0.025, rel=1e-3)  # Student's t with one degree of freedom
    assert second.worst == pytest.approx(0.15)
    assert (second.worst_cell, second.tied_share) == ("x", 1.0)
    assert (third.num_cells, third.worst) == (1, 0.5)
    assert last.regret is None and last.num_cells == 0
