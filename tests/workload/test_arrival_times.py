"""Arrival times as people log them: epochs in any unit, ISO 8601, milliseconds, and what cannot be meant."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from headway.cli import main
from headway.core.errors import HeadwayError
from headway.workload.read import read

FIRST = 1_760_000_000.25
"""2025-10-09 08:53:20.25."""
OFFSETS_S = [0.0, 0.5, 2.0]
EXPECTED = pytest.approx(OFFSETS_S, abs=1e-3)


def _csv(folder: Path, arrivals: Sequence[object], column: str = "arrival_s", more: str = "") -> Path:
    path = folder / "trace.csv"
    rows = "".join(f"{arrival},100,20{more and ','}{more}\n" for arrival in arrivals)
    path.write_text(f"{column},prompt_tokens,output_tokens{more and ',deadline_s'}\n{rows}")
    return path


def _iso(form: str) -> list[str]:
    return [datetime.fromtimestamp(FIRST + offset, UTC).strftime(form) for offset in OFFSETS_S]


@pytest.mark.parametrize(
    ("per_s", "unit"), [(1.0, "seconds"), (1e3, "milliseconds"), (1e6, "microseconds"), (1e9, "nanoseconds")]
)
def test_epochs_start_at_0(tmp_path: Path, per_s: float, unit: str) -> None:
    made = read(_csv(tmp_path, [round((FIRST + offset) * per_s, 3) for offset in OFFSETS_S]))
    assert made.arrival_s.tolist() == EXPECTED
    assert made.notes == (
        f"arrival times are {unit} since 1970: shifted to start at 0, which was 2025-10-09 08:53:20+00:00",
    )


@pytest.mark.parametrize("column", ["arrival_s", "timestamp"])
@pytest.mark.parametrize("form", ["%Y-%m-%dT%H:%M:%S.%fZ", "%Y-%m-%d %H:%M:%S.%f", "%Y-%m-%dT%H:%M:%S.%f+00:00"])
def test_iso_8601_is_recognised(tmp_path: Path, form: str, column: str) -> None:
    made = read(_csv(tmp_path, _iso(form), column))
    assert made.arrival_s.tolist() == EXPECTED and "2025-10-09" in made.notes[0]


def test_milliseconds_have_their_own_column(tmp_path: Path) -> None:
    made = read(_csv(tmp_path, [0, 500, 2000], "arrival_ms"))
    assert made.arrival_s.tolist() == OFFSETS_S and not made.notes


def test_deadlines_move_along(tmp_path: Path) -> None:
    made = read(_csv(tmp_path, [(FIRST + offset) * 1e3 for offset in OFFSETS_S], more=str((FIRST + 9) * 1e3)))
    assert made.columns["deadline_s"].tolist() == pytest.approx([9.0] * 3, abs=1e-3)


def test_parquet_may_hold_times(tmp_path: Path) -> None:
    path, times = tmp_path / "trace.parquet", [datetime.fromtimestamp(FIRST + offset, UTC) for offset in OFFSETS_S]
    columns = {"prompt_tokens": [100] * 3, "output_tokens": [20] * 3}
    for arrivals in (pa.array(times, pa.timestamp("us", "UTC")), pa.array([FIRST + offset for offset in OFFSETS_S])):
        parquet.write_table(pa.table({"arrival_s": arrivals, **columns}), path)
        assert read(path).arrival_s.tolist() == EXPECTED


def test_other_times_stay(tmp_path: Path) -> None:
    """A trace may begin late, and its own files are read as they were written."""
    assert read(_csv(tmp_path, [50_000.0, 50_001.0])).arrival_s.tolist() == [50_000.0, 50_001.0]


def test_two_columns_of_times_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,timestamp,prompt_tokens,output_tokens\n0,0,1,1\n")
    with pytest.raises(HeadwayError, match="arrival_s and timestamp: expected one column of arrival times"):
        read(path)


FLEET = ("--model", "llama-3.1-8b", "--gpu", "h100", "--json", "--no-progress")


def test_the_command_prices_the_load_and_not_the_years_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Epochs in seconds made $6.1 million for a million tokens of a fleet that was idle since 1970."""
    trace = _csv(tmp_path, [FIRST + 0.1 * i for i in range(200)])
    assert main(["simulate", "--trace", str(trace), *FLEET]) == 0
    result = json.loads(capsys.readouterr().out)["results"][0]
    assert result["metrics"]["usd_per_million_output_tokens"] < 50
    assert "seconds since 1970: shifted to start at 0" in result["notes"][0]


def test_a_makespan_that_is_absurd_for_the_load_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = _csv(tmp_path, [i * 20_000.0 for i in range(200)])  # milliseconds in a column of seconds
    assert main(["simulate", "--trace", str(trace), *FLEET]) == 2
    output = capsys.readouterr().err
    assert output.startswith("error: workload: 200 requests in 46 days keep the fleet busy for 0.0")
    assert "expected arrival times in seconds" in output and output.count("\n") == 1
    assert main(["simulate", "--trace", str(trace), "--until-s", "4000000", *FLEET]) == 0
