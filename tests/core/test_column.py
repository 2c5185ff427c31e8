"""Columns of records, in memory and outside of it."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from headway.core import column
from headway.core.column import Column
from headway.core.errors import HeadwayError
from headway.workload.spill import SpillFile


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> int:
    """Columns leave memory from a few values on."""
    monkeypatch.setattr(column, "SPILL_BYTES", 64)
    return 64


PARTS = {
    "equal": [[7] * 40, [7] * 40],
    "equal at first": [[7] * 40, [7, 8], [9] * 3],
    "different": [list(range(30)), [], list(range(5)), list(range(40))],
    "wider later": [list(range(40)), [1 << 40, 2], [3]],
    "wider while in memory": [[1, 2], [1 << 40], list(range(40))],
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_a_column_outside_of_memory_has_the_same_values(parts: list[list[int]], soon: int) -> None:
    inside, outside = Column(np.dtype(np.int32)), Column(np.dtype(np.int32), SpillFile)
    for part in parts:
        inside.extend(np.array(part, np.int64))
        outside.extend(np.array(part, np.int64))
        assert len(outside._rows) < soon + 8 * len(part), "memory has the latest values only"
    expected, found = inside.values(), outside.values()
    assert found.tolist() == [value for part in parts for value in part]
    assert found.dtype == expected.dtype and found.strides == expected.strides


def test_without_room_for_records_a_run_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    spill = SpillFile()
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(spill, "_file", full)
        with pytest.raises(HeadwayError, match=rf"{tempfile.gettempdir()}: .*No space left"):
            spill.append(bytearray(10))


def test_a_file_that_the_system_does_not_map_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    spill = SpillFile()
    spill.append(bytearray(10))

    def refuse(*_: object, **__: object) -> mmap.mmap:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(HeadwayError, match=rf"{tempfile.gettempdir()}: .*Cannot allocate memory"):
        spill.mapped()
