"""Traces as other tools and systems write them: units, block sizes, line ends, encodings, coarse clocks."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.core.errors import HeadwayError
from headway.workload.read import read

ROWS = "arrival_s,prompt_tokens,output_tokens\n0.0,512,20\n1.5,300,10\n"


def lines(path: Path, *requests: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in requests))
    return path


def requests(times: list[float], **more: object) -> list[dict[str, object]]:
    return [{"timestamp": each, "input_length": 1000, "output_length": 20} | more for each in times]


def test_fractions_are_seconds_whole_numbers_milliseconds_and_both_are_said(tmp_path: Path) -> None:
    seconds = read(lines(tmp_path / "a.jsonl", *requests([0.0, 0.5, 2.6])))
    assert seconds.arrival_s[-1] == pytest.approx(2.6) and "taken for seconds" in seconds.notes[0]
    whole = read(lines(tmp_path / "b.jsonl", *requests([0, 500, 2600])))
    assert whole.arrival_s[-1] == pytest.approx(2.6) and "taken for milliseconds" in whole.notes[0]


@pytest.mark.parametrize(("unit", "end_s"), [("s", 2600.0), ("ms", 2.6)])
def test_a_given_unit_is_taken_without_a_note(unit: str, end_s: float, tmp_path: Path) -> None:
    found = read(lines(tmp_path / "a.jsonl", *requests([0, 500, 2600])), timestamp_unit=unit)
    assert found.arrival_s[-1] == pytest.approx(end_s) and not found.notes


def test_an_unknown_unit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match="expected s or ms"):
        read(lines(tmp_path / "a.jsonl", *requests([0])), timestamp_unit="us")


@pytest.mark.parametrize("given", [{"timestamp_unit": "s"}, {"block_tokens": 16}, {"spread_ticks": True}])
def test_an_option_that_a_format_does_not_take_is_refused(given: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(ROWS)
    with pytest.raises(HeadwayError, match=f"{next(iter(given))}: traces of the format headway-csv"):
        read(path, **given)


@pytest.mark.parametrize("size", [2048, 1024, 512, 256, 128, 64, 16])
def test_hash_blocks_have_the_size_that_fits_the_prompts(size: int, tmp_path: Path) -> None:
    """Six blocks are the same in all prompts; the rest of each is its own."""
    prompts = []
    for i, one in enumerate(requests([0, 1000, 2000, 3000], input_length=5000)):
        num = -(-5000 // size)
        shared = min(6, num - 1)
        ids = [*range(shared), *(1000 * (i + 1) + k for k in range(num - shared))]
        prompts.append({**one, "hash_ids": ids})
    found = read(lines(tmp_path / "a.jsonl", *prompts))
    assert found.prefix is not None
    tokens = np.add.reduceat(found.prefix.tokens, found.prefix.offsets[:-1])
    assert tokens.tolist() == [5000] * 4  # no block is dropped, none is cut short
    assert any(f"blocks of {size} tokens" in note for note in found.notes) == (size != 512)


def test_more_ids_than_any_block_size_explains_is_an_error(tmp_path: Path) -> None:
    odd = [{**requests([0])[0], "hash_ids": list(range(7))}, {**requests([1])[0], "hash_ids": list(range(100))}]
    with pytest.raises(HeadwayError, match=r"request 1: 7 hash_ids for 1,000 tokens.*give block_tokens"):
        read(lines(tmp_path / "a.jsonl", *odd))
    assert read(lines(tmp_path / "a.jsonl", *odd), block_tokens=10).prefix is not None


def test_a_clock_that_ticks_is_said_and_can_be_spread(tmp_path: Path) -> None:
    """Mooncake's conversations arrive ten at a time, every 3 s."""
    path = lines(tmp_path / "a.jsonl", *requests([3000 * (i // 10) for i in range(50)]))
    clumps = read(path)
    assert any("10.0 requests at a time, 3 s apart" in note for note in clumps.notes)
    assert len(set(clumps.arrival_s.tolist())) == 5
    spread = read(path, spread_ticks=True)
    assert np.diff(spread.arrival_s) == pytest.approx(np.full(49, 0.3))
    even = read(lines(tmp_path / "b.jsonl", *requests([100 * i for i in range(50)])), spread_ticks=True)
    assert np.diff(even.arrival_s) == pytest.approx(np.full(49, 0.1))  # nothing to spread


@pytest.mark.parametrize(
    "data",
    [
        ROWS.replace("\n", "\r").encode(), ROWS.replace("\n", "\r\n").encode(), ROWS.encode("utf-16"),
        b"\xef\xbb\xbf" + ROWS.encode(), ROWS.replace("\n", "\r\n").encode("utf-16"),
        gzip.compress(ROWS.replace("\n", "\r").encode()), ROWS.strip().encode(),
    ],
    ids=["CR", "CRLF", "UTF-16", "BOM", "UTF-16 with CRLF", "gzip with CR", "no last line end"],
)  # fmt: skip
def test_line_ends_and_encodings_change_nothing(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(data)
    found = read(path)
    assert found.arrival_s.tolist() == [0.0, 1.5] and found.prompt_tokens.tolist() == [512, 300]


def test_a_carriage_return_inside_a_header_is_one_line_of_error(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("arrival_s,prompt\r_tokens,output_tokens\n0.0,512,20\n", newline="")
    with pytest.raises(HeadwayError, match="line 1"):
        read(path)


def test_no_damage_ends_in_a_traceback_or_in_another_unit(tmp_path: Path) -> None:
    """Files with bytes replaced, removed and doubled are read as before, or refused."""
    rng = random.Random(7)
    whole = "".join(json.dumps(each) + "\n" for each in requests([0, 500, 2600], hash_ids=[1, 2]))
    path = tmp_path / "a.any"
    for seed in range(300):
        data = bytearray((ROWS if seed % 2 else whole).encode())
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            change = rng.randrange(3)
            if change == 0:
                data[at] = rng.randrange(256)
            elif change == 1:
                del data[at : at + rng.randrange(1, 9)]
            else:
                data[at:at] = data[at : at + rng.randrange(1, 9)]
            if not data:
                break
        path.write_bytes(bytes(data))
        try:
            found = read(path, skip_bad=bool(seed % 3))
        except HeadwayError as error:
            assert "\n" not in str(error).strip()
        else:
            assert (np.diff(found.arrival_s) >= 0).all()
