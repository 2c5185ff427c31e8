"""Series read from CSV, wide and long, and what is refused."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from headway.core.errors import HeadwayError
from headway.workload.series import DemandSeries, read_series

LONG = "model,tier,t_seconds,tokens,rate\n" + "".join(
    f"{model},{tier},{60 * t},{t + 100 * (model == 'B')},{t / 2}\n"
    for t in range(4)
    for model in "AB"
    for tier in ("prod", "dev")
)


def written(folder: Path, text: str, name: str = "series.csv") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def test_wide_with_seconds(tmp_path: Path) -> None:
    a, b = read_series(written(tmp_path, "time_s,a,b\n30,1,4\n40,2,5\n50,3,6.5\n"))
    assert (a.name, a.start_s, a.step_s, a.values.tolist()) == ("a", 30, 10, [1, 2, 3])
    assert (b.name, b.values.tolist()) == ("b", [4, 5, 6.5])


def test_demand_of_a_scaling_plan_is_a_series(tmp_path: Path) -> None:
    """`headway plan scaling --demand` and `headway forecast evaluate` read the same file."""
    (rate,) = read_series(written(tmp_path, "time,rate\n0,1.5\n120,2\n240,2.5\n"))
    assert (rate.name, rate.step_s, rate.values.tolist()) == ("rate", 120, [1.5, 2, 2.5])


def test_dates(tmp_path: Path) -> None:
    text = "Timestamp,x\n2025-07-01 00:00:00,1\n2025-07-01 00:15:00,2\n2025-07-01 00:30:00,3\n"
    (only,) = read_series(written(tmp_path, text))
    assert (only.name, only.step_s, only.start_s) == ("x", 900, 1751328000)


def test_long_has_a_series_for_each_combination_of_keys(tmp_path: Path) -> None:
    found = {each.name: each for each in read_series(written(tmp_path, LONG, "s.csv.gz"), ["tokens"])}
    assert list(found) == ["A prod", "A dev", "B prod", "B dev"]
    assert found["B dev"].values.tolist() == [100, 101, 102, 103]
    both = read_series(written(tmp_path, LONG))
    assert [each.name for each in both][:2] == ["A prod tokens", "A prod rate"]


def test_longer_steps() -> None:
    series = DemandSeries("x", 0, 60, np.arange(7, dtype=float))
    assert series.resampled(180).values.tolist() == [1, 4]
    assert series.resampled(180, "max").values.tolist() == [2, 5]
    assert series.resampled(60).values.tolist() == series.values.tolist()
    for step_s in (90, 30):
        with pytest.raises(HeadwayError, match="a multiple of its own, 60 s"):
            series.resampled(step_s)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("t,a\n0,1\n", "no column of times"),
        ("time_s,a\n", "no rows"),
        ("time_s\n0\n1\n", "no column of numbers"),
        ("time_s,a\n0,1\n", "a: 1 value"),
        ("time_s,a\n0,1\n10,2\n20,3\n40,4\n", "line 5: a: 40 s comes 20 s after"),
        ("time_s,a\n0,1\n10,2\n10,3\n20,4\n", "line 4: a: 10 s comes 0 s after"),
        ("time_s,a\n20,1\n10,2\n0,3\n", "-10 s after"),
        ("time_s,a\n0,1\n10,\n20,3\n", "line 3, column a: nothing"),
        ("time_s,a\n0,1\n10,nan\n20,3\n", "line 3, column a: nothing"),
        ("time_s,a\n0,1\n10,-4\n20,3\n", "line 3, column a: -4"),
        ("time_s,a\nx,1\ny,2\n", "time_s: x; expected seconds"),
        ("time_s,a\n0,1,2\n1\n", "not readable as CSV"),
    ],
)
def test_irregular_series_are_errors(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(HeadwayError, match=expected):
        read_series(written(tmp_path, text))


def test_unknown_names_are_errors(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match="did you mean 'tokens'"):
        read_series(written(tmp_path, LONG), ["token"])
    with pytest.raises(HeadwayError, match="no such file"):
        read_series(tmp_path / "none.csv")


@pytest.mark.skipif("HEADWAY_DATA" not in os.environ, reason="HEADWAY_DATA is not set")
def test_published_demand_as_it_is() -> None:
    folder = Path(os.environ["HEADWAY_DATA"]) / "demand"
    tokens = read_series(folder / "o365_prompt_tokens_per_minute.csv.gz")
    assert [each.name for each in tokens][:2] == ["A prod", "A dev"]
    assert {(len(each), each.step_s) for each in tokens} == {(7 * 1440, 60)}
    rates = read_series(folder / "servegen_rates_10min.csv.gz", ["total_rate_rps"])
    assert {each.step_s for each in rates} == {600} and len(rates) == 5
