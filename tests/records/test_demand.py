"""Demand by minute from the records of gateways: killed, ended, started again in the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.control.live import Live
from headway.control.recorder import Recorder
from headway.core.errors import HeadwayError
from headway.core.record import Outcome, ReplicaRecord
from headway.gateway.telemetry.recording import Recording
from headway.records import demand, parts
from headway.records.parts import Rows
from headway.workload.readers import run_parts

REPLICA = ReplicaRecord(0, "pool", "m", "h100", "", 1, 2.0, 700.0, 1000, 8, ((0.0, 9.0),))
START_S = 6_000_000.0
"""A whole minute."""


def run(folder: Path, started_s: float, arrivals_s: list[float], end_s: float, **changes: Any) -> None:
    """A gateway's run that is killed: it leaves a part. Each request has 60 prompt tokens."""
    number = max(run_parts.numbers(folder), default=0) + 1

    def write(rows: Rows) -> None:
        parts.write(folder, number, rows.tables(), rows.state)

    recording = Recording(enabled=True, write=write)
    recording._started_s = started_s
    nan = float("nan")
    for id, at_s in enumerate(arrivals_s):
        live = Live(id, at_s, 60, 1, **{"model": "m", **changes})
        live.generated_tokens = 5
        recorder: Recorder = recording.recorder
        recorder.segments.write((id, 0, 0, -1, at_s, at_s, at_s + 1, 0, 4, at_s + 2, 0))
        recorder.requests.write((
            id, Outcome.FINISHED, 1, 0, 0, at_s, at_s, at_s + 1, at_s + 1, at_s + 2, 5, 0, nan, 0, -1, nan,
        ))  # fmt: skip
        recording.add(live)
    recording.flush([REPLICA], end_s)


def known_tps(folder: Path, now_s: float, days: float = 1.0) -> list[float]:
    found = demand.read(folder).before(now_s, days)
    assert found is not None and list(found.tps) == [("m", "", 0)]
    return found.tps["m", "", 0].tolist()


def test_a_killed_run_tells_its_demand(tmp_path: Path) -> None:
    run(tmp_path, START_S, [0.0, 1.0, 59.0, 130.0], 180.0)
    assert known_tps(tmp_path, START_S + 185.0) == [3.0, 0.0, 1.0]


def test_an_ended_run_tells_the_same(tmp_path: Path) -> None:
    """Its files have times since the first arrival, here 30 s after the start, from which on demand is known."""
    run(tmp_path, START_S, [30.0, 59.0, 130.0], 180.0)
    parts.finish(tmp_path)
    assert known_tps(tmp_path, START_S + 180.0) == [4.0, 0.0, 1.0]  # 2 in half a minute


def test_minutes_without_a_gateway_are_not_idle(tmp_path: Path) -> None:
    run(tmp_path, START_S, [1.0, 61.0, 62.0], 120.0)
    run(tmp_path, START_S + 240.0, [5.0, 6.0, 7.0, 8.0], 60.0)
    assert known_tps(tmp_path, START_S + 420.0) == pytest.approx([1, 2, 2 + 2 / 3, 3 + 1 / 3, 4, 4, 4])


def test_what_was_kept_outlives_the_records(tmp_path: Path) -> None:
    """Also where the files of runs that have ended lie on top of each other; each request counts once."""
    whole, folder = tmp_path / "whole", tmp_path / "started again"
    for i in range(3):
        run(whole, START_S + 120 * i, [3.0 * i, 70.0], 120.0)
        run(folder, START_S + 120 * i, [3.0 * i, 70.0], 120.0)
        if i != 1:  # the second one is killed
            parts.finish(folder)
        now_s = START_S + 120 * (i + 1)
        demand.keep(folder, demand.read(folder).since(now_s - 86_400))
        assert demand.read(folder) == demand.read(folder)
    assert known_tps(folder, START_S + 360.0) == known_tps(whole, START_S + 360.0)


def test_only_the_last_days_count(tmp_path: Path) -> None:
    run(tmp_path, START_S, [0.0, 3600.0], 7200.0)
    found = known_tps(tmp_path, START_S + 7200.0, days=0.0625)
    assert len(found) == 90 and np.flatnonzero(found).tolist() == [30]
    kept = demand.read(tmp_path).since(START_S + 3600.0)
    assert kept.tokens == {("m", "", 0): {100_060: 60.0}} and kept.covered == ((START_S + 3600.0, START_S + 7200.0),)


def test_regions_and_tiers_are_apart(tmp_path: Path) -> None:
    run(tmp_path, START_S, [0.0], 60.0, region="eu", tier=2)
    run(tmp_path, START_S + 60, [0.0], 60.0, region="us", tier=0)
    found = demand.read(tmp_path).before(START_S + 120.0, 1.0)
    assert found is not None
    assert {key: tps.tolist() for key, tps in found.tps.items()} == {("m", "eu", 2): [1, 0], ("m", "us", 0): [0, 1]}


def test_a_folder_without_records_tells_nothing(tmp_path: Path) -> None:
    assert demand.read(tmp_path / "none").before(START_S, 8.0) is None


@pytest.mark.parametrize("name", ["demand.parquet", "requests.parquet"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PAR1")
    with pytest.raises(HeadwayError, match=f"{name}: cannot be read"):
        demand.read(tmp_path)
