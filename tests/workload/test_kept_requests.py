"""Small files that are read again stay in memory: always the file's content, and nobody changes what others read."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from headway.core.errors import HeadwayError
from headway.workload.files import to_parquet
from headway.workload.read import detect, read
from headway.workload.table import CHUNK_ROWS, FIRST_ROWS, Workload

HEAD = "arrival_s,prompt_tokens,output_tokens\n"


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "day.csv"
    for tokens in range(100, 130):  # within one tick of the file system's clock, and of the same size
        path.write_text(f"{HEAD}0,{tokens},5\n")
        os.utime(path, ns=(tokens, tokens))
        assert read(path).prompt_tokens.tolist() == [tokens]
    path.write_text('{"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": []}\n')
    assert detect(path) == "mooncake"


def test_the_columns_of_one_reader_are_its_own(tmp_path: Path) -> None:
    path = tmp_path / "day.parquet"
    to_parquet(
        Workload({"arrival_s": np.arange(3.0), "prompt_tokens": np.full(3, 9), "output_tokens": np.full(3, 5)}), path
    )
    first = read(path)
    with pytest.raises(ValueError, match="read-only"):
        first.columns["arrival_s"][0] = 7
    del first.columns["prompt_tokens"]
    assert read(path).prompt_tokens.tolist() == [9, 9, 9]
    assert len(read(path, limit=2)) == 2 and len(read(path)) == 3


def test_what_is_known_of_a_table_is_not_taken_over_by_another(tmp_path: Path) -> None:
    path = tmp_path / "day.parquet"
    columns = {"prompt_tokens": np.full(3, 9), "output_tokens": np.full(3, 5), "model": np.array([0, 1, 0])}
    to_parquet(Workload({"arrival_s": np.arange(3.0), **columns}, models=("a", "b")), path)
    rows = read(path)
    assert rows.of_model("a")[1] == [0, 2] and rows.of_model("b")[0].arrival_s.tolist() == [1.0]
    assert list(rows.tuples()) == list(read(path).tuples()) == list(pickle.loads(pickle.dumps(rows)).tuples())
    longer = rows.validate().with_columns({"prompt_tokens": [9, -9, 9]})
    assert [each[2] for each in longer.tuples()] == [9, -9, 9]
    with pytest.raises(HeadwayError, match="row 1, column prompt_tokens"):
        longer.validate()
    assert longer.of_model("b")[0].prompt_tokens.tolist() == [-9]


@pytest.mark.parametrize("num", [0, 1, FIRST_ROWS, FIRST_ROWS + 1, 9 * FIRST_ROWS, 2 * CHUNK_ROWS + 77])
def test_every_row_comes_once(num: int) -> None:
    rows = Workload({"arrival_s": np.arange(num) / 4, "prompt_tokens": np.arange(num), "output_tokens": np.arange(num)})
    found = list(rows.tuples())
    assert [each[0] for each in found] == list(range(num))
    assert [each[1] for each in found] == rows.arrival_s.tolist()
    assert [each[0] for each in rows.tuples(3, num - 2)] == list(range(num))[3 : max(num - 2, 3)]
