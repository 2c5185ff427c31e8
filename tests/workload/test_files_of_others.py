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
from headway.workload.generate import generate
from headway.workload.read import FORMATS, detect, read
from headway.workload.spec import TraceSpec, WorkloadSpec

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
        ROWS.replace("\n", "\r").encode(),
        ROWS.replace("\n", "\r\n").encode(),
        ROWS.encode("utf-16"),
        b"\xef\xbb\xbf" + ROWS.encode(),
        ROWS.replace("\n", "\r\n").encode("utf-16"),
        gzip.compress(ROWS.replace("\n", "\r").encode()),
        ROWS.strip().encode(),
    ],
    ids=["CR", "CRLF", "UTF-16", "BOM", "UTF-16 with CRLF", "gzip with CR", "no last line end"],
)
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


CALL = {"input_length": 1000, "output_length": 20}
FORMS = {
    "headway-csv": ROWS,
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50.99,396,109\n",
    "burstgpt": "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,a1,1,GPT-4,472,18,490,Conversation log\n45,,1,ChatGPT,1087,230,1317,API log\n",
    "servegen": "window_start_s,client,input_tokens,reason_tokens,answer_tokens\n0,1,20,30,40\n600,1,5,6,7\n",
    "servegen-batch": "".join(
        json.dumps({"request_id": i, "type": "text", **CALL, "duration": 14000}) + "\n" for i in range(2)
    ),
    "mooncake": "".join(json.dumps(each) + "\n" for each in requests([0, 500, 2600], hash_ids=[1, 2])),
    "bailian": "".join(
        json.dumps({"chat_id": i, "parent_chat_id": i - 1, "timestamp": 1.5 * i, **CALL, "hash_ids": []}) + "\n"
        for i in range(3)
    ),
    "mooncake-agents": "".join(
        json.dumps({"session_id": "s", "timestamp": 900 * i, **CALL, "delay": 10, "hash_ids": [1, 2]}) + "\n"
        for i in range(3)
    ),
    "mooncake-lengths": "timestamp_ms,input_length,output_length\n0,6755,500\n3000,7319,490\n",
}
"""A small file of each format."""


def test_each_format_has_a_small_file() -> None:
    assert set(FORMS) == set(FORMATS) - {"headway-parquet"}


@pytest.mark.parametrize("name", FORMS)
def test_encodings_change_nothing_in_any_format(name: str, tmp_path: Path) -> None:
    path, text = tmp_path / "a.any", FORMS[name]
    path.write_text(text)
    assert detect(path) == name
    plain = read(path)
    for data in (
        text.replace("\n", "\r\n").encode(),
        text.replace("\n", "\r").encode(),
        text.encode("utf-16"),
        text.encode("utf-8-sig"),
        gzip.compress(text.encode()),
        text.strip().encode(),
    ):
        path.write_bytes(data)
        again = read(path)
        assert again.notes == plain.notes and len(again) == len(plain)
        for column, values in plain.columns.items():
            np.testing.assert_array_equal(again.columns[column], values)


def test_no_damage_ends_in_a_traceback_or_in_another_unit(tmp_path: Path) -> None:
    """Files with bytes replaced, removed and doubled are read as before, or refused."""
    path, names = tmp_path / "a.any", list(FORMS)
    for seed in range(400):
        rng = random.Random(seed)
        name = names[seed % len(names)]
        data = bytearray(FORMS[name].encode())
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
            found = read(path, name if seed % 5 == 0 else None, skip_bad=bool(seed % 3))
        except HeadwayError as error:
            assert "\n" not in str(error).strip(), seed
        else:
            assert (np.diff(found.arrival_s) >= 0).all(), seed
            if name == "mooncake" and seed % 5 == 0:
                assert any("taken for" in note for note in found.notes), seed


def test_conversations_of_burstgpt_are_sessions(tmp_path: Path) -> None:
    head = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    sessions = ["a1", "b2", "a1", "", "nan", "b2"]
    path = tmp_path / "b.csv"
    path.write_text(head + "".join(f"{i},{each},1,GPT-4,9,3,12,Log\n" for i, each in enumerate(sessions)))
    found = read(path).columns["session_id"]
    assert found[0] == found[2] >= 0 and found[1] == found[5] >= 0 and found[0] != found[1]
    assert found[3] == found[4] == -1
    path.write_text("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,GPT-4,9,3,12,Log\n")
    assert "session_id" not in read(path).columns


def test_batch_jobs_of_servegen_come_together_and_those_without_answers_are_refused(tmp_path: Path) -> None:
    job = {"request_id": 0, "type": "text", "input_length": 61}
    found = read(
        lines(tmp_path / "d.jsonl", {**job, "output_length": 2370, "duration": 14000}, {**job, "output_length": 9})
    )
    assert list(found.output_tokens) == [2370, 9] and not found.arrival_s.any()
    assert any("no arrival times" in note for note in found.notes)
    with pytest.raises(HeadwayError, match="line 1: no output_length: content-hash traces have no lengths of answers"):
        read(lines(tmp_path / "a.jsonl", {**job, "hash_ids": [1, 2, 3, 4], "img_ids": []}))


def test_options_that_agent_traces_do_not_take_are_refused_in_scenarios_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(FORMS["mooncake-agents"])
    for option in ({"timestamp_unit": "s"}, {"spread_ticks": True}):
        spec = WorkloadSpec(trace=TraceSpec(path="a.jsonl", **option))
        with pytest.raises(HeadwayError, match=f"{next(iter(option))}: traces of the format mooncake-agents say it"):
            generate(spec, 0, tmp_path)


@pytest.mark.parametrize("keys", [{}, {"session_id": "s"}], ids=["requests", "agents"])
@pytest.mark.parametrize("has_last", [True, False])
@pytest.mark.parametrize("size", [1024, 512, 128, 16])
def test_one_search_finds_the_size_of_blocks(
    size: int, has_last: bool, keys: dict[str, object], tmp_path: Path
) -> None:
    """With an id for the last block, which is not full, or without; for requests and for calls of agents."""
    prompts = [3 * size + 5, 2 * size + 1, size + 7]
    rows = [
        {
            "timestamp": 900 * i,
            "input_length": tokens,
            "output_length": 5,
            **keys,
            "hash_ids": list(range(tokens // size + has_last)),
        }
        for i, tokens in enumerate(prompts)
    ]
    found = read(lines(tmp_path / "a.jsonl", *rows))
    assert found.prefix is not None and found.prefix.tokens.max() == size
    assert any(f"blocks of {size} tokens" in note for note in found.notes) == (size != 512)
