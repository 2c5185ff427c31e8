"""The workload table: rows, slices, checks, files, transformations."""

from __future__ import annotations

from itertools import starmap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import HeadwayError
from headway.core.request import Request, Segment
from headway.workload.describe import describe
from headway.workload.files import from_parquet, to_csv, to_parquet
from headway.workload.read import read
from headway.workload.table import Prefix, Workload, concat
from headway.workload.transform import retier, scale_rate, window, with_slo

NONE = float("nan")


def plain(num: int, **columns: object) -> Workload:
    base = {"arrival_s": np.arange(num) * 0.5, "prompt_tokens": np.arange(num) + 10}
    base["output_tokens"] = np.full(num, 7)
    return Workload({**base, **{n: np.asarray(c) for n, c in columns.items()}})


def prefixed(rows: list[list[tuple[int, int]]]) -> Prefix:
    flat = [pair for row in rows for pair in row]
    offsets = np.cumsum([0, *(len(row) for row in rows)])
    return Prefix(offsets, np.array([i for i, _ in flat], "i8"), np.array([t for _, t in flat], "i4"))


def full() -> Workload:
    """Three rows that use every column, with and without a value."""
    columns = {
        "arrival_s": [0.1, 0.1, 1 / 3],
        "prompt_tokens": [100, 50, 60],
        "output_tokens": [10, 20, 30],
        "model": [1, 0, 0],
        "tier": [2, 0, 1],
        "reasoning_tokens": [3, 0, 30],
        "region": [0, 0, 0],
        "session_id": [-1, 4, -1],
        "output_id": [9, -1, 11],
        "slo_ttft_s": [1.0, NONE, 2.5],
        "slo_tpot_s": [NONE, NONE, NONE],
        "slo_e2e_s": [1.0, 2.0, 3.0],
        "deadline_s": [NONE, 5.0, NONE],
        "timeout_s": [60.0, NONE, NONE],
        "tenant": [1, 0, 1],
        "lora": [0, 1, 1],
        "quality:big": [0.9, NONE, 0.5],
        "quality:small": [0.1, 0.2, NONE],
        "output_tokens:big": [12, -1, 90],
    }
    prefix = prefixed([[(7, 40), (8, 60)], [], [(7, 40)]])
    arrays = {n: np.asarray(c) for n, c in columns.items()}
    return Workload(arrays, ("a", "b"), ("eu, west",), prefix, ("a note",), ("ann", "bob"), ("", "sql"))


EXPECTED = [
    Request(0, 0.1, 100, 10, "b", 2, 3, "eu, west", None, (Segment(7, 40), Segment(8, 60)), 9,
            1.0, None, 1.0, None, 60.0, (("big", 0.9), ("small", 0.1)), (("big", 12),), "bob", None, ""),
    Request(1, 0.1, 50, 20, "a", 0, 0, "eu, west", 4, (), None,
            None, None, 2.0, 5.0, None, (("small", 0.2),), (), "ann", None, "sql"),
    Request(2, 1 / 3, 60, 30, "a", 1, 30, "eu, west", None, (Segment(7, 40),), 11,
            2.5, None, 3.0, None, None, (("big", 0.5),), (("big", 90),), "bob", None, "sql"),
]  # fmt: skip


def test_rows_fill_every_field_of_a_request_in_its_order() -> None:
    assert list(starmap(Request, full().tuples())) == EXPECTED


def test_rows_leave_out_defaults_at_the_end() -> None:
    made = list(plain(3).tuples())
    assert made == [(0, 0.0, 10, 7), (1, 0.5, 11, 7), (2, 1.0, 12, 7)]
    assert next(plain(3, tier=[0, 1, 2]).tuples(2)) == (2, 1.0, 12, 7, "", 2)


@pytest.mark.parametrize(("start", "stop"), [(0, None), (8191, 8194), (5, 5), (19_990, 99_999), (0, 8192)])
def test_rows_of_a_part_are_those_of_the_whole(start: int, stop: int | None) -> None:
    workload = plain(20_000, slo_ttft_s=np.where(np.arange(20_000) % 3 == 0, NONE, 1.5))
    assert list(starmap(Request, workload.tuples(start, stop))) == list(starmap(Request, workload.tuples()))[start:stop]


def test_slices_take_and_concat_agree_on_every_column() -> None:
    workload = full()
    again = concat([workload.slice(0, 1), workload.slice(1, 1), workload.slice(1, 3)])
    assert list(starmap(Request, again.tuples())) == EXPECTED
    assert [rest for _, *rest in workload.take(np.array([2, 0])).tuples()] == [
        [getattr(EXPECTED[i], f) for f in Request.__struct_fields__[1:]] for i in (2, 0)
    ]
    assert len(workload.head(99)) == 3


def test_concat_gives_defaults_to_parts_without_a_column_and_joins_names() -> None:
    one = Workload(plain(1).columns | {"model": np.array([0])}, ("x",))
    two = Workload(plain(2).columns | {"model": np.array([1, 0])}, ("x", "y"))
    joined = concat([plain(1), two, one, full().head(1)])
    rows = list(starmap(Request, joined.tuples()))
    assert [r.model for r in rows] == ["", "y", "x", "x", "b"]
    assert [r.tier for r in rows] == [0, 0, 0, 0, 2]
    assert [r.timeout_s for r in rows] == [None] * 4 + [60.0]
    assert rows[-1].prefix == EXPECTED[0].prefix
    assert rows[-1].region == "eu, west" and rows[0].region == ""


BAD = [
    ("prompt_tokens", 0, "row 1, column prompt_tokens: 0; expected 1 to 10,000,000"),
    ("prompt_tokens", -5, "row 1, column prompt_tokens: -5"),
    ("output_tokens", 10_000_001, "row 1, column output_tokens: 10000001"),
    ("arrival_s", NONE, "row 1, column arrival_s: nan; expected seconds"),
    ("arrival_s", 99.0, "row 2, column arrival_s: 1.0; expected a time not before"),
    ("arrival_s", -1.0, "row 1, column arrival_s: -1.0"),
    ("reasoning_tokens", 8, "row 1, column reasoning_tokens: 8; expected 0 to the row's output_tokens"),
    ("reasoning_tokens", -1, "row 1, column reasoning_tokens"),
    ("tier", -1, "row 1, column tier"),
    ("model", 3, "row 1, column model: 3; expected a code below 0"),
    ("region", -1, "row 1, column region"),
    ("session_id", -2, "row 1, column session_id"),
    ("slo_ttft_s", 0.0, "row 1, column slo_ttft_s: 0.0; expected seconds above 0"),
    ("timeout_s", float("inf"), "row 1, column timeout_s"),
    ("deadline_s", 0.1, "row 1, column deadline_s: 0.1; expected a time not before"),
    ("quality:m", float("inf"), "row 1, column quality:m"),
]


@pytest.mark.parametrize(("column", "value", "message"), BAD)
def test_validate_names_row_and_column(column: str, value: float, message: str) -> None:
    workload = plain(3)
    values = workload.column(column).astype("f8" if column.endswith("_s") or ":" in column else "i8")
    if column in ("model", "region"):
        values[:] = 0
    values[1] = value
    if column in ("model", "region"):
        values[[0, 2]] = value
        message = message.replace("row 1", "row 0")
    with pytest.raises(HeadwayError) as error:
        workload.with_columns({column: values}).validate("f.csv")
    assert str(error.value).startswith("f.csv: ") and message in str(error.value)


def test_validate_refuses_a_prefix_longer_than_its_prompt() -> None:
    columns = plain(2).columns
    assert Workload(columns, prefix=prefixed([[(1, 10)], [(1, 10), (2, 1)]])).validate()
    with pytest.raises(HeadwayError, match="row 1, column prefix: 12; expected no more tokens"):
        Workload(columns, prefix=prefixed([[(1, 10)], [(1, 10), (2, 2)]])).validate()
    with pytest.raises(HeadwayError, match="row 0, column prefix: 0; expected segments of 1"):
        Workload(columns, prefix=prefixed([[(1, 0)], []])).validate()


def test_a_table_needs_its_columns_and_knows_their_names() -> None:
    with pytest.raises(HeadwayError, match="'output_tokens' is missing"):
        Workload({"arrival_s": np.zeros(1), "prompt_tokens": np.ones(1)})
    with pytest.raises(HeadwayError, match=r"unknown workload column 'teir'; did you mean 'tier'\?"):
        plain(1, teir=[0])
    with pytest.raises(HeadwayError, match="differ in length"):
        plain(2, tier=[0])


@pytest.mark.parametrize("name", ["w.parquet", "w.csv", "w.csv.gz"])
def test_files_round_trip(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write = to_parquet if name.endswith("parquet") else to_csv
    write(full(), path)
    again = read(path).validate()
    assert list(starmap(Request, again.tuples())) == EXPECTED
    assert list(tmp_path.iterdir()) == [path]
    write(plain(5), path)
    assert list(starmap(Request, read(path).tuples())) == list(starmap(Request, plain(5).tuples()))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=20))
def test_csv_keeps_every_bit_of_a_time(tmp_path_factory: pytest.TempPathFactory, times: list[float]) -> None:
    path = tmp_path_factory.mktemp("csv") / "w.csv"
    workload = plain(len(times), arrival_s=np.sort(times))
    to_csv(workload, path)
    assert (read(path).arrival_s == np.sort(times)).all()


def test_parquet_with_a_runs_records_is_a_workload_and_other_columns_are_not(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    columns = {n: pa.array(c) for n, c in plain(2).columns.items()}
    parquet.write_table(pa.table(columns | {"end_s": pa.array([1.0, None])}), tmp_path / "run.parquet")
    assert list(from_parquet(tmp_path / "run.parquet").columns) == list(plain(2).columns)
    parquet.write_table(pa.table(columns | {"teir": pa.array([1, 2])}), tmp_path / "bad.parquet")
    with pytest.raises(HeadwayError, match=r"unknown column 'teir'; did you mean 'tier'"):
        from_parquet(tmp_path / "bad.parquet")
    parquet.write_table(pa.table(columns | {"tier": pa.array(["a", "b"])}), tmp_path / "text.parquet")
    with pytest.raises(HeadwayError, match="column tier: string; expected numbers"):
        from_parquet(tmp_path / "text.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "run.parquet").read_bytes()[:-20])
    with pytest.raises(HeadwayError, match=r"cut\.parquet: not readable as Parquet"):
        from_parquet(tmp_path / "cut.parquet")


def test_nothing_is_left_behind_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.csv"
    path.write_text("before")

    def broken(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("headway.workload.files.arrow_csv.write_csv", broken)
    with pytest.raises(RuntimeError):
        to_csv(plain(3), path)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_scale_rate_and_window_move_deadlines_with_arrivals() -> None:
    workload = plain(10, deadline_s=np.arange(10) * 0.5 + 3)
    double = scale_rate(workload, 2)
    assert double.arrival_s[-1] == 2.25
    assert np.allclose(double.column("deadline_s") - double.arrival_s, 3)
    part = window(workload, 1.0, 3.0)
    assert part.arrival_s.tolist() == [0, 0.5, 1, 1.5] and part.prompt_tokens[0] == 12
    assert np.allclose(part.column("deadline_s") - part.arrival_s, 3)
    with pytest.raises(HeadwayError, match="rate scale"):
        scale_rate(workload, 0)
    with pytest.raises(HeadwayError, match="from_s"):
        window(workload, 3, 1)


def test_retier_follows_the_mix_and_the_seed() -> None:
    workload = plain(50_000)
    tier = retier(workload, {0: 1, 3: 3}, seed=1).column("tier")
    assert set(tier.tolist()) == {0, 3}
    assert abs((tier == 3).mean() - 0.75) < 0.01
    assert (tier == retier(workload, {0: 1, 3: 3}, seed=1).column("tier")).all()
    assert (tier != retier(workload, {0: 1, 3: 3}, seed=2).column("tier")).any()
    with pytest.raises(HeadwayError, match="shares"):
        retier(workload, {0: -1.0, 1: 2.0}, seed=1)


def test_with_slo_touches_only_its_tier() -> None:
    workload = with_slo(plain(3, tier=[0, 1, 0]), ttft_s=9.0)
    rows = list(starmap(Request, with_slo(workload, tier=1, ttft_s=2.0, deadline_after_s=4.0, timeout_s=7.0).tuples()))
    assert [(r.slo_ttft_s, r.deadline_s, r.timeout_s) for r in rows] == [
        (9.0, None, None),
        (2.0, 4.5, 7.0),
        (9.0, None, None),
    ]


def test_describe_against_numbers_worked_out_by_hand() -> None:
    text = describe(full())
    assert text.num_requests == 3 and text.num_sessions == 1
    assert text.tiers == {0: 1, 1: 1, 2: 1} and text.models == {"a": 2, "b": 1}
    assert text.prompt_tokens is not None and text.prompt_tokens.mean == 70
    # The second 7:40 was seen before; 40 of 210 prompt tokens.
    assert text.prefix_share == pytest.approx(40 / 210)
    assert text.rate == pytest.approx(2 / (1 / 3 - 0.1))
    assert describe(plain(1)).rate is None
    assert describe(plain(100)).interarrival_cv == pytest.approx(0)
