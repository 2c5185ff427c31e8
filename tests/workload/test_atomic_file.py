"""Files appear whole or not at all."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from headway.core.errors import HeadwayError
from headway.workload.atomic_file import open_atomic, write_text


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "sub" / "a.txt"
    write_text(target, "old")
    with pytest.raises(ZeroDivisionError), open_atomic(target) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert target.read_text() == "old"
    assert [path.name for path in target.parent.iterdir()] == ["a.txt"]


def test_written_file_has_default_permissions(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "x")
    (tmp_path / "b").write_text("x")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == stat.S_IMODE((tmp_path / "b").stat().st_mode)


def test_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadwayError, match="cannot be written"):
        write_text(tmp_path / "file" / "below", "x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(HeadwayError, match="cannot be written"):
        write_text(tmp_path / "folder", "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
