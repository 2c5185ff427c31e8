"""Records that are written as the run goes: in parts, of several runs, with a full disk, and after a kill."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from full_disk import full_disk
from headway import records
from headway.control.live import Live
from headway.control.recorder import Recorder
from headway.core.errors import HeadwayError
from headway.core.record import Outcome, ReplicaRecord
from headway.forecast.recorded_hours import recorded_began_s
from headway.gateway.telemetry.recording import Recording
from headway.records import __main__ as joining
from headway.records import part_writer, parts
from headway.records.part_writer import PartWriter
from headway.records.parts import Rows
from headway.workload.files import from_parquet
from headway.workload.read import read
from headway.workload.readers import run_parts
from serving import until

REPLICA = ReplicaRecord(0, "pool", "m", "h100", "", 1, 2.0, 700.0, 1000, 8, ((0.0, 9.0),))


class Run:
    """A gateway's recording with requests that end at once."""

    def __init__(self, write: Any = None, started_s: float = 1000.0) -> None:
        self.recording = Recording(enabled=True, write=write)
        self.recording._started_s = started_s

    def ends(self, id: int, arrival_s: float, tenant: str = "", **changes: Any) -> None:
        live = Live(id, arrival_s, 10 + id, 1, model="m", tenant=tenant, **changes)
        live.generated_tokens = 5
        recorder: Recorder = self.recording.recorder
        nan = float("nan")
        end_s = arrival_s + 2.0
        recorder.segments.write((id, 0, 0, -1, arrival_s, arrival_s, arrival_s + 1, 0, 4, end_s, 0))
        recorder.requests.write((
            id, Outcome.FINISHED, 1, 0, 0, arrival_s, arrival_s, arrival_s + 1, arrival_s + 1, end_s, 5, 0,
            nan, 0, -1, nan,
        ))  # fmt: skip
        self.recording.add(live)

    def flush(self, now: float = 50.0) -> None:
        self.recording.flush([REPLICA], now)


def test_parts_become_what_one_file_would_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests end in another order than they arrive, parts are combined, and the whole is equal to a run in memory."""
    monkeypatch.setattr(part_writer, "_MAX_PARTS", 3)
    writer, whole = PartWriter(tmp_path, {"fleet": "text"}), Run()
    run = Run(writer.write)
    arrivals = [(3, 7.5), (0, 1.0), (1, 2.0), (5, 9.0), (2, 2.0), (4, 8.0), (6, 9.5), (7, 9.75)]
    for i, (id, arrival_s) in enumerate(arrivals):
        for each in (run, whole):
            each.ends(id, arrival_s, "ann" if id % 2 else "bob", quality=(), region="eu" if id == 2 else "")
        if i != 4:
            run.flush()
    run.flush()
    until(lambda: not writer._queue)
    assert len(run_parts.numbers(tmp_path)) <= 4
    early, provenance = records.load(tmp_path)
    assert provenance == {"fleet": "text", "began_s": 1001.0} and len(early.requests["request"]) == 8
    assert writer.finish() == f"wrote 8 requests to {tmp_path}" and not (tmp_path / "parts").exists()
    found, _ = records.load(tmp_path)
    expected = whole.recording.records([REPLICA], 50.0)
    for table in ("workload", "requests", "segments"):
        ours, theirs = getattr(found, table), getattr(expected, table)
        assert ours.keys() == theirs.keys()
        for name in ("prompt_tokens", "arrival_s", "tenant") if table == "workload" else ():
            np.testing.assert_array_equal(ours[name], theirs[name])
    order = np.argsort(expected.requests["request"])
    np.testing.assert_array_equal(
        found.requests["end_s"][np.argsort(found.requests["request"])], expected.requests["end_s"][order]
    )
    assert found.workload["prompt_tokens"].tolist() == list(range(10, 18)) and found.end_s == expected.end_s == 49.0
    assert found.replicas == expected.replicas and set(found.tenants) == {"ann", "bob"}


def test_the_last_seconds_of_a_run_under_way_are_records_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match="no run is under way there"):
        parts.snapshot(tmp_path, tmp_path / "last", 10.0)
    for started_s, arrivals in ((1000.0, [1.0, 4.0]), (1100.0, [2.0, 7.5, 8.0, 9.0])):
        writer = PartWriter(tmp_path / "run", {"fleet": "text"})
        run = Run(writer.write, started_s)
        for id, arrival_s in enumerate(arrivals):
            run.ends(id, arrival_s)
        run.flush()
        writer.close()
    before = run_parts.numbers(tmp_path / "run")
    parts.snapshot(tmp_path / "run", tmp_path / "last", 42.5)  # until 1150, as it is flushed at 50
    found, provenance = records.load(tmp_path / "last")
    assert found.workload["arrival_s"].tolist() == [0.0, 0.5, 1.5]
    assert found.workload["prompt_tokens"].tolist() == [11, 12, 13]
    assert found.requests["end_s"].tolist() == [2.0, 2.5, 3.5]
    assert (provenance["fleet"], provenance[parts.BEGAN_S]) == ("text", 1107.5)
    assert run_parts.numbers(tmp_path / "run") == before


def test_runs_that_were_killed_come_one_after_the_other(tmp_path: Path) -> None:
    """Even if the clock went back meanwhile; a part that was combined and not deleted counts once."""
    for started_s in (1000.0, 2000.0, 1500.0):  # the third run begins before the second one did
        writer = PartWriter(tmp_path, {})
        run = Run(writer.write, started_s)
        for id in range(3):
            run.ends(id, 10.0 + id)
            run.flush(40.0)
        writer.close()
    numbers = run_parts.numbers(tmp_path)
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "parts" / f"{numbers[-1]:06d}", kept)
    tables = run_parts._read(kept)
    parts.combine(tmp_path, numbers[-3:], run_parts._state(tmp_path, tables["requests"]))
    shutil.move(kept, tmp_path / "parts" / f"{numbers[-1]:06d}")
    found = parts.join(tmp_path)
    assert found is not None
    assert found.workload["arrival_s"].tolist() == [0, 1, 2, 1000, 1001, 1002, 1040, 1041, 1042]
    assert sorted(found.requests["replica"].tolist()) == [0] * 3 + [1] * 3 + [2] * 3
    assert [replica.id for replica in found.replicas] == [0, 1, 2] and found.end_s == 1070.0


def test_a_full_disk_loses_a_bounded_number_of_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = PartWriter(tmp_path, {}, max_waiting=5, pause_s=0.02)
    run = Run(writer.write)
    run.ends(0, 1.0)
    run.flush()
    until(lambda: not writer._queue)
    with full_disk():
        for id in range(1, 11):
            run.ends(id, float(id))
            run.flush()
        until(lambda: "cannot be written" in caplog.text)
    until(lambda: not writer._queue)
    run.ends(11, 20.0)
    run.flush()
    assert writer.finish() == f"wrote 7 requests to {tmp_path}; those of 5 are lost, as they could not be written"
    found, _ = records.load(tmp_path)
    assert found.workload["prompt_tokens"].tolist() == [10, 11, 12, 13, 14, 15, 21]
    assert "records are lost" in caplog.text
    assert "records are written again; those of 5 requests are lost" in caplog.text


def test_records_stay_as_parts_without_room_for_the_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = PartWriter(tmp_path, {"fleet": ""})
    run = Run(writer.write)
    run.ends(0, 1.0)
    run.flush()
    until(lambda: not writer._queue)
    with full_disk(), pytest.raises(HeadwayError, match=r"cannot be written .* they stay as parts"):
        writer.finish()
    assert records.load(tmp_path)[0].requests["request"].tolist() == [0]
    assert len(from_parquet(tmp_path / "requests.parquet")) == 1
    assert joining.main([str(tmp_path)]) == 0 and "wrote 1 requests" in capsys.readouterr().out
    assert len(from_parquet(tmp_path / "requests.parquet")) == 1
    assert joining.main([str(tmp_path)]) == 1 and "no parts of records" in capsys.readouterr().err


def written_run(folder: Path, *ids: int, started_s: float = 1000.0) -> PartWriter:
    writer = PartWriter(folder, {"fleet": ""})
    run = Run(writer.write, started_s)
    for id in ids:
        run.ends(id, float(id))
    run.flush()
    until(lambda: not writer._queue)
    return writer


def test_a_run_that_is_under_way_is_the_trace_that_it_will_be(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    with pytest.raises(HeadwayError, match="no request has been recorded yet"):
        read(tmp_path)
    written_run(tmp_path, 0, 1, 2).close()  # killed
    writer = written_run(tmp_path, 3, 5, started_s=2000.0)
    running, begins = [read(path) for path in (tmp_path, tmp_path / "requests.parquet")], recorded_began_s(tmp_path)
    assert read(tmp_path, limit=2).arrival_s.tolist() == [0.0, 1.0]
    writer.finish()
    ended = read(tmp_path)
    assert ended.arrival_s.tolist() == [0.0, 1.0, 2.0, 1003.0, 1005.0]
    for each in running:
        assert each.models == ended.models
        for name in ("arrival_s", "prompt_tokens", "output_tokens", "model", "tier"):
            assert np.array_equal(each.columns[name], ended.columns[name]), name
    assert begins == recorded_began_s(tmp_path) == 1000.0


def test_a_run_does_not_replace_an_earlier_one(tmp_path: Path) -> None:
    written_run(tmp_path, 0, 1, 2).finish()
    later = written_run(tmp_path, 0, 1, started_s=5000.0)
    (earlier,) = tmp_path.glob("ended-*")
    assert earlier.name == "ended-19700101T001640Z"  # 1000 s after the epoch
    assert len(records.load(earlier)[0].requests["request"]) == 3
    assert len(records.load(tmp_path)[0].requests["request"]) == 2, "while the later one runs"
    later.finish()
    assert len(records.load(earlier)[0].requests["request"]) == 3
    assert len(records.load(tmp_path)[0].requests["request"]) == 2
    written_run(tmp_path, 0, started_s=5000.0).finish()
    written_run(tmp_path, 0, started_s=5000.0).finish()
    assert len(list(tmp_path.glob("ended-*"))) == 3 and not (tmp_path / "parts").exists()


def test_one_gateway_at_a_time_writes_to_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = written_run(tmp_path, 0, 1, 2)
    assert joining.main([str(tmp_path)]) == 1
    assert "a gateway that runs writes its records there" in capsys.readouterr().err
    with pytest.raises(HeadwayError, match="a gateway that runs writes its records there"):
        PartWriter(tmp_path, {"fleet": ""})
    assert writer.finish() == f"wrote 3 requests to {tmp_path}"
    assert not list(tmp_path.glob(".*"))
    written_run(tmp_path, 0).finish()


def test_damaged_parts_and_folders_are_errors(tmp_path: Path) -> None:
    (tmp_path / "parts" / "000001").mkdir(parents=True)
    (tmp_path / "parts" / "000001" / "arrivals.parquet").write_bytes(b"x")
    with pytest.raises(HeadwayError, match="cannot be read as a part of records"):
        parts.join(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(HeadwayError, match="records cannot be written"):
        PartWriter(tmp_path / "file", {})


def test_rows_without_requests_are_tables(tmp_path: Path) -> None:
    taken: list[Rows] = []
    run = Run(taken.append)
    run.flush()
    assert {name: table.num_rows for name, table in taken[0].tables().items()} == dict.fromkeys(run_parts.TABLES, 0)
    assert len(Run().recording.records([], 1.0).requests["request"]) == 0


logging.getLogger("headway.records").setLevel(logging.INFO)


def _peak_bytes(folder: Path, num_parts: int, num_rows: int) -> int:
    """What Arrow has allocated at most while so many parts become one."""
    rows: list[Rows] = []
    run = Run(rows.append)
    for number in range(1, num_parts + 1):
        for i in range(num_rows):
            run.ends(number * num_rows + i, float(i), tenant=f"tenant {i % 7}")
        run.flush()
        parts.write(folder, number, rows[-1].tables(), rows[-1].state)
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        parts.combine(folder, list(range(1, num_parts + 1)), rows[-1].state)
    finally:
        pa.set_memory_pool(before)
    joined = parts.join(folder)
    assert joined is not None and len(joined.workload["arrival_s"]) == num_parts * num_rows
    return int(pool.max_memory())


def test_parts_become_one_with_the_memory_of_one(tmp_path: Path) -> None:
    """However many there are, and without threads of Arrow's, which would keep what they once had."""
    few, many = (_peak_bytes(tmp_path / f"{num}", num, 500) for num in (3, 24))
    assert 0 < many < 2 * few
