"""The cache of rehearsals, and the keys of its results."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from headway.planning.rehearsals import RehearsalCache, content_key


def test_a_result_is_simulated_once(tmp_path: Path) -> None:
    cache, calls = RehearsalCache(tmp_path), []
    for _ in range(2):
        assert cache.get("a", float, lambda: calls.append(1) or 2.5) == 2.5
    assert len(calls) == cache.num_found == 1
    assert RehearsalCache(tmp_path).find("a", float) == 2.5
    assert RehearsalCache(tmp_path, fresh=True).find("a", float) is None


def test_without_a_folder_nothing_is_kept() -> None:
    cache = RehearsalCache(None)
    cache.keep("a", 1.0)
    assert cache.find("a", float) is None and cache.notes == []


@pytest.mark.parametrize("content", [b"", b"{", b'{"key": "b", "result": 1.0}', b'{"key": "a", "result": "text"}'])
def test_invalid_files_are_ignored_with_a_note(tmp_path: Path, content: bytes) -> None:
    cache = RehearsalCache(tmp_path)
    (tmp_path / "a.json").write_bytes(content)
    assert cache.find("a", float) is None and cache.num_found == 0
    assert cache.notes == [f"{tmp_path / 'a.json'}: not a result that Headway wrote; ignored, and simulated anew"]
    assert cache.get("a", float, lambda: 3.0) == 3.0
    assert cache.find("a", float) == 3.0


def test_infinity_is_null_in_a_file(tmp_path: Path) -> None:
    cache = RehearsalCache(tmp_path)
    cache.keep("a", {"latency": inf})
    assert cache.find("a", dict[str, float | None]) == {"latency": None}


def test_a_key_covers_facts_files_and_digests(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("1")
    keys = [content_key([1]), content_key([2]), content_key([1], [file]), content_key([1], digests=[b"x"])]
    assert len(set(keys)) == 4 and content_key([1], [file]) == keys[2]
    file.write_text("22")
    assert content_key([1], [file]) != keys[2]
