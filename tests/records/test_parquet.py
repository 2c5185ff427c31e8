"""Records survive a round trip, and say so when they did not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from headway import records as files
from headway.control.recorder import RareTable
from headway.core.errors import HeadwayError
from headway.core.record import REQUEST_COLUMNS
from headway.metrics.summary import flatten, summarize
from headway.workload.files import from_parquet
from oracle_records import Run

PROVENANCE = {"scenario": "seed: 7\n# é", "seed": 7, "version": "0.1.0"}


def test_round_trip(tmp_path: Path) -> None:
    run = Run(seed=1, trouble=0.05, stop_s=4.0).records
    files.save(run, tmp_path / "new" / "run", PROVENANCE)
    found, provenance = files.load(tmp_path / "new" / "run")
    assert provenance == PROVENANCE
    assert (found.models, found.regions, found.replicas) == (run.models, run.regions, run.replicas)
    assert found.end_s == run.end_s
    for table in ("workload", "segments", "stretches"):
        before, after = getattr(run, table), getattr(found, table)
        assert list(before) == list(after)
        for name, column in before.items():
            assert after[name].dtype == column.dtype, name
            np.testing.assert_array_equal(after[name], column)
    order = np.lexsort((run.requests["request"], run.requests["end_s"]))
    for name, column in run.requests.items():
        np.testing.assert_array_equal(found.requests[name], column[order])
    assert flatten(summarize(found)) == pytest.approx(flatten(summarize(run)))
    assert sorted(p.name for p in (tmp_path / "new" / "run").iterdir()) == [
        "moves.parquet",
        "replicas.parquet",
        "requests.parquet",
        "segments.parquet",
        "stretches.parquet",
    ]


def test_requests_are_a_workload(tmp_path: Path) -> None:
    run = Run(seed=2).records
    files.save(run, tmp_path, PROVENANCE)
    workload = from_parquet(tmp_path / "requests.parquet").validate()
    for name, column in run.workload.items():
        if name not in ("model", "region"):
            np.testing.assert_array_equal(workload.column(name), column)
    names = np.array(run.models)[run.workload["model"]].tolist()
    assert [workload.models[code] for code in workload.column("model")] == names


def test_rows_that_were_not_issued_have_no_outcome(tmp_path: Path) -> None:
    run = Run(seed=3).records
    for name in REQUEST_COLUMNS:
        run.requests[name] = run.requests[name][5:]
    files.save(run, tmp_path, {})
    found, _ = files.load(tmp_path)
    assert sorted(found.requests["request"]) == sorted(run.requests["request"])
    assert found.requests["generated_tokens"].dtype == run.requests["generated_tokens"].dtype
    assert len(found.workload["arrival_s"]) == 60


def test_an_empty_run(tmp_path: Path) -> None:
    run = Run(seed=3, num_requests=0).records
    files.save(run, tmp_path, {})
    found, _ = files.load(tmp_path)
    assert summarize(found).num_requests == 0


def test_unreadable_records_are_named(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match=r"requests\.parquet: no such file"):
        files.load(tmp_path)
    files.save(Run(seed=1).records, tmp_path / "a", {"seed": 1})
    files.save(Run(seed=2).records, tmp_path / "b", {"seed": 2})
    (tmp_path / "b" / "segments.parquet").replace(tmp_path / "a" / "segments.parquet")
    with pytest.raises(HeadwayError, match="not of the same run"):
        files.load(tmp_path / "a")
    whole = (tmp_path / "a" / "stretches.parquet").read_bytes()
    (tmp_path / "a" / "stretches.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(HeadwayError, match=r"stretches\.parquet: cannot be read"):
        files.load(tmp_path / "a")
    parquet.write_table(pa.table({"x": [1]}), tmp_path / "a" / "requests.parquet")
    (tmp_path / "a" / "stretches.parquet").write_bytes(whole)
    with pytest.raises(HeadwayError, match="not the records of a run"):
        files.load(tmp_path / "a")


def test_a_failed_save_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.save(Run(seed=1).records, tmp_path, {"seed": 1})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parquet.ParquetWriter, "write_table", full)
    with pytest.raises(HeadwayError, match="No space left"):
        files.save(Run(seed=2).records, tmp_path, {"seed": 2})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadwayError, match="cannot be written"):
        files.save(Run(seed=2).records, tmp_path / "file", {})


@pytest.mark.parametrize("stop_s", [float("inf"), 4.0])
def test_rows_written_in_groups_are_those_written_at_once(
    stop_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = Run(seed=1, trouble=0.05, stop_s=stop_s).records
    files.save(records, tmp_path / "once", {})
    monkeypatch.setattr("headway.records.parquet._GROUP_ROWS", 7)
    files.save(records, tmp_path / "groups", {})
    assert parquet.ParquetFile(tmp_path / "groups" / "requests.parquet").num_row_groups > 3
    for path in (tmp_path / "once").iterdir():
        found, expected = parquet.read_table(tmp_path / "groups" / path.name), parquet.read_table(path)
        assert found.schema.equals(expected.schema, check_metadata=True)
        assert repr(found.to_pydict()) == repr(expected.to_pydict())  # NaN is not equal to NaN


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2**40) | st.just(7), st.integers(-1, 2**20) | st.just(7), st.floats() | st.just(0.0)),
        max_size=40,
    ),
    st.integers(1, 9),
)
def test_columns_hold_what_was_written(rows: list[tuple[int, int, float]], every: int) -> None:
    """However often rows are settled, and however large a value comes after small ones, or after the same ones."""
    table = RareTable(("request", "replica", "score"))
    for i, row in enumerate(rows):
        table.write(row)
        if i % every == 0:
            table.flush(0)
    columns = table.columns()
    assert columns["request"].tolist() == [row[0] for row in rows]
    assert columns["replica"].tolist() == [row[1] for row in rows]
    assert repr(columns["score"].tolist()) == repr([row[2] for row in rows])
