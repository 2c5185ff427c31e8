"""Readers of traces: what they read, and what they say of files that are wrong."""

from __future__ import annotations

import gzip
import os
from itertools import starmap
from pathlib import Path

import numpy as np
import pytest

from headway.core.errors import HeadwayError
from headway.core.request import Request, Segment
from headway.workload.describe import describe
from headway.workload.read import FORMATS, detect, read
from headway.workload.readers import shared
from headway.workload.readers.servegen import WINDOW_S

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:00.0000000,879,55
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
2024-05-10 00:00:01+00:00,76,15
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,276,693,Conversation log
120,ChatGPT,200,0,200,API log
"""
BURST_SESSIONS = """Timestamp,Session ID,Elapsed,Model,Request tokens,Response tokens,Total tokens,Log Type
1.5,a,2.0,ChatGPT,472,18,490,API log
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 250, "input_length": 1024, "output_length": 26, "hash_ids": [46, 47]}
{"timestamp": 250, "input_length": 600, "output_length": 1, "hash_ids": [46, 2351, 9]}
"""
SERVEGEN = """window_start_s,client,input_tokens,reason_tokens,answer_tokens
600,35,79,7714,2045
0,28,1700,457,0
600,12,473,348,73
600,12,5,0,0
"""


def put(folder: Path, text: str | bytes, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def says(path: Path, **options: object) -> str:
    with pytest.raises(HeadwayError) as error:
        read(path, **options)  # type: ignore[arg-type]
    assert str(error.value).startswith(str(path))
    return str(error.value).removeprefix(str(path))


def test_azure_2023_keeps_all_seven_digits(tmp_path: Path) -> None:
    workload = read(put(tmp_path, AZURE))
    assert workload.arrival_s.tolist() == [0.0, 4.314579, 13.31941]
    assert workload.prompt_tokens.tolist() == [374, 396, 879]
    assert workload.output_tokens.tolist() == [44, 109, 55]


def test_azure_2024_has_a_time_zone(tmp_path: Path) -> None:
    assert read(put(tmp_path, AZURE_2024)).arrival_s.tolist() == [0.0, 0.007405, 0.99007]


def test_gzip_windows_lines_a_byte_order_mark_and_no_last_line_end_make_no_difference(tmp_path: Path) -> None:
    expected = list(starmap(Request, read(put(tmp_path, AZURE)).tuples()))
    windows = b"\xef\xbb\xbf" + AZURE.strip().replace("\n", "\r\n").encode()
    assert list(starmap(Request, read(put(tmp_path, windows)).tuples())) == expected
    assert list(starmap(Request, read(put(tmp_path, gzip.compress(windows), "no-suffix")).tuples())) == expected
    spaced = AZURE.replace("\n2023", "\n\n2023")
    assert list(starmap(Request, read(put(tmp_path, spaced)).tuples())) == expected


def test_burstgpt_counts_failures_and_knows_models(tmp_path: Path) -> None:
    workload = read(put(tmp_path, BURST))
    assert workload.arrival_s.tolist() == [0, 40, 113]
    assert [r.model for r in starmap(Request, workload.tuples())] == ["ChatGPT", "ChatGPT", "GPT-4"]
    assert workload.notes == ("1 rows with zero tokens (failed requests) skipped",)
    assert len(read(put(tmp_path, BURST_SESSIONS))) == 1


def test_mooncake_blocks_become_prefix_segments(tmp_path: Path) -> None:
    rows = list(starmap(Request, read(put(tmp_path, MOONCAKE, "trace.jsonl")).tuples()))
    assert [r.arrival_s for r in rows] == [0, 0.25, 0.25]
    assert rows[0].prefix == (Segment(46, 512), Segment(47, 512), Segment(48, 76))
    assert rows[1].prefix == (Segment(46, 512), Segment(47, 512))
    # A block that begins past the prompt's end holds nothing.
    assert rows[2].prefix == (Segment(46, 512), Segment(2351, 88))


def test_servegen_spreads_windows_and_adds_reasoning(tmp_path: Path) -> None:
    workload = read(put(tmp_path, SERVEGEN))
    assert workload.output_tokens.tolist() == [457, 9759, 421]
    assert workload.column("reasoning_tokens").tolist() == [457, 7714, 348]
    assert (workload.arrival_s + 0.5 * WINDOW_S).tolist() == [300, 750, 1050]
    assert any("zero tokens" in note for note in workload.notes)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (AZURE, "azure"),
        (AZURE_2024, "azure"),
        (BURST, "burstgpt"),
        (BURST_SESSIONS, "burstgpt"),
        (MOONCAKE, "mooncake"),
        (SERVEGEN, "servegen"),
        ("timestamp_ms,input_length,output_length,n_hash_blocks\n0,1,2,3\n", "mooncake-lengths"),
        ("arrival_s,prompt_tokens,output_tokens\n0,1,2\n", "headway-csv"),
    ],
)
def test_formats_are_recognised_by_the_first_line(tmp_path: Path, text: str, name: str) -> None:
    path = put(tmp_path, text)
    assert detect(path) == name
    assert len(read(path, name)) == len(read(path))
    assert set(FORMATS) >= {name}


def test_rows_after_the_limit_are_not_checked(tmp_path: Path) -> None:
    assert len(read(put(tmp_path, AZURE), limit=2)) == 2
    broken = put(tmp_path, AZURE + "x,y\n")
    assert len(read(broken, limit=3)) == 3
    assert len(read(broken, limit=3, skip_bad=True)) == 3
    assert len(read(put(tmp_path, MOONCAKE + "{", "m.jsonl"), limit=3)) == 3
    with pytest.raises(HeadwayError, match="limit: 0; expected 1 or more"):
        read(broken, limit=0)


def test_limit_with_skips_counts_good_rows(tmp_path: Path) -> None:
    lines = AZURE.splitlines()
    path = put(tmp_path, "\n".join([lines[0], lines[1], "oops", lines[2], lines[3]]))
    assert read(path, limit=2, skip_bad=True).prompt_tokens.tolist() == [374, 396]


BAD_LINES = [
    ("2023-11-16 18:15:51.0,-3,4", "line 4: column ContextTokens: '-3'; expected a whole number of tokens"),
    ("2023-11-16 18:15:51.0,3,10000001", "line 4: column GeneratedTokens: '10000001'; expected"),
    ("2023-11-16 18:15:51.0,99999999999999999999,1", "line 4: column ContextTokens: '99999999999999999999'"),
    ("2023-11-16 18:15:51.0,nan,1", "line 4: column ContextTokens: 'nan'"),
    ("2023-11-16 18:15:51.0,1.5,1", "line 4: column ContextTokens: '1.5'"),
    ("2023-11-16 18:15:51.0,,1", "line 4: column ContextTokens: ''"),
    ("yesterday,1,1", "line 4: column TIMESTAMP: 'yesterday'; expected a time such as 2023-11-16"),
    ("2023-11-16 18:15:51.0,1", "line 4: 2 columns; expected 3: TIMESTAMP,ContextTokens,GeneratedTokens"),
    ("2023-11-16 18:15:51.0,1,2,3", "line 4: 4 columns; expected 3"),
    ("\xff\xfe", "line 4: "),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path: Path, line: str, message: str) -> None:
    lines = AZURE.splitlines()
    raw = "\n".join([*lines[:3], line, lines[3]]).encode("latin-1")
    path = put(tmp_path, raw)
    text = says(path)
    assert message in text and "--skip-bad" in text
    workload = read(path, skip_bad=True)
    assert workload.arrival_s.tolist() == [0.0, 4.314579, 13.31941]
    assert workload.notes[0].startswith("1 bad lines skipped; the first: line 4: ")


def test_bad_seconds(tmp_path: Path) -> None:
    for cell in ("nan", "inf", "-1", "", "soon"):
        path = put(tmp_path, BURST.replace("\n45,", f"\n{cell},"))
        assert f": line 3: column Timestamp: {cell!r}; expected seconds, 0 or more" in says(path)


def test_the_line_number_is_right_far_into_a_file_of_many_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "BLOCK_BYTES", 1000)
    lines = [f"{i / 8},{i + 1},{i + 2}" for i in range(5000)]
    text = "arrival_s,prompt_tokens,output_tokens\n" + "\n".join(lines) + "\n"
    whole = read(put(tmp_path, text))
    assert whole.prompt_tokens.tolist() == list(range(1, 5001))
    assert read(put(tmp_path, text), limit=777).prompt_tokens.tolist() == list(range(1, 778))
    lines[3210] = "401.25,-1,2"
    bad = put(tmp_path, "arrival_s,prompt_tokens,output_tokens\n" + "\n".join(lines) + "\n")
    assert ": line 3212: column prompt_tokens: '-1'" in says(bad)
    assert len(read(bad, skip_bad=True)) == 4999
    lines[3210] = "0.5,1,2"
    unsorted = put(tmp_path, "arrival_s,prompt_tokens,output_tokens\n" + "\n".join(lines) + "\n")
    assert ": line 3212: column arrival_s: arrives before the line above it" in says(unsorted)


def test_order_is_checked_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "BLOCK_BYTES", 40)
    text = "arrival_s,prompt_tokens,output_tokens\n" + "10,1,1\n" * 3 + "9,1,1\n" + "11,1,1\n" * 9
    assert ": line 5: " in says(put(tmp_path, text))


def test_unsorted_arrivals_say_how_to_sort(tmp_path: Path) -> None:
    lines = AZURE.splitlines()
    path = put(tmp_path, "\n".join([lines[0], lines[3], lines[1], lines[2]]))
    message = says(path)
    assert message.startswith(": line 3: ") and "sort=True (--sort)" in message
    assert read(path, sort=True).prompt_tokens.tolist() == [374, 396, 879]
    mooncake = put(tmp_path, "\n".join(MOONCAKE.splitlines()[::-1]), "m.jsonl")
    assert ": line 3: timestamp: arrives before the line above it; say sort=True (--sort)" in says(mooncake)
    assert read(mooncake, sort=True).arrival_s.tolist() == [0, 0.25, 0.25]


def test_files_that_are_not_there_empty_or_cut_off(tmp_path: Path) -> None:
    assert says(tmp_path / "none.csv") == ": no such file"
    assert "is a folder" in says(tmp_path)
    assert says(put(tmp_path, "")) == ": the file is empty"
    assert says(put(tmp_path, gzip.compress(b""), "e.gz")) == ": the file is empty"
    assert says(put(tmp_path, AZURE.splitlines()[0])) == ": no requests in the file, only a header"
    packed = gzip.compress((AZURE + "2023-11-16 18:16:01.0,1,1\n" * 5000).encode())
    assert "truncated" in says(put(tmp_path, packed[: len(packed) // 2], "cut.csv.gz"))
    assert "truncated" in says(put(tmp_path, packed[:-4], "cut.csv.gz"))
    assert "damaged" in says(put(tmp_path, packed[:-8] + b"\0\0\0\0" + packed[-4:], "bad.csv.gz"))


def test_unknown_formats_and_headers(tmp_path: Path) -> None:
    path = put(tmp_path, "when,what\n1,2\n")
    assert "no known trace format begins with 'when,what'" in says(path)
    assert "unknown trace format 'azur'; did you mean 'azure'?" in says(path, format="azur")
    assert "line 1: the column 'TIMESTAMP' is missing; found when, what" in says(path, format="azure")
    own = put(tmp_path, "arrival_s,prompt_tokens,output_tokens,teir\n0,1,1,1\n")
    assert "unknown column 'teir'; did you mean 'tier'?" in says(own)
    twice = put(tmp_path, "arrival_s,prompt_tokens,prompt_tokens,output_tokens\n0,1,2,3\n")
    assert "line 1: the column 'prompt_tokens' is there 2 times" in says(twice)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"timestamp": 1}', "missing required field `input_length`"),
        ('{"timestamp": 1, "input_length": "x", "output_length": 1}', "Expected `int`, got `str`"),
        ('{"timestamp": 1, "input_length": -1, "output_length": 1}', "input_length: -1; expected 0 to"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [-4]}', "hash_ids: expected ids"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1}', "timestamp: -1"),
        ("{", "Input data was truncated"),
    ],
)
def test_bad_json_lines(tmp_path: Path, line: str, message: str) -> None:
    lines = MOONCAKE.splitlines()
    path = put(tmp_path, "\n".join([lines[0], line, *lines[1:]]), "m.jsonl")
    text = says(path)
    assert text.startswith(": line 2: ") and message in text
    workload = read(path, skip_bad=True)
    assert len(workload) == 3 and "1 bad lines skipped; the first: line 2" in workload.notes[0]


def test_own_csv_rows_are_checked(tmp_path: Path) -> None:
    header = "arrival_s,prompt_tokens,output_tokens,reasoning_tokens,prefix\n"
    assert "row 0, column reasoning_tokens: 9" in says(put(tmp_path, header + "0,5,5,9,\n"))
    assert "row 0, column prompt_tokens: 0" in says(put(tmp_path, header + "0,0,5,0,\n"))
    assert "row 0, column prefix: 6" in says(put(tmp_path, header + "0,5,5,0,1:6\n"))
    assert "expected id:tokens pairs" in says(put(tmp_path, header + "0,5,5,0,1-6\n"))


def test_requests_without_a_region_are_described_as_such(tmp_path: Path) -> None:
    header = "arrival_s,prompt_tokens,output_tokens,region\n"
    assert describe(read(put(tmp_path, header + "0,5,5,\n1,5,5,\n2,5,5,eu\n"))).regions == {"none": 2, "eu": 1}


@pytest.fixture
def traces() -> Path:
    data = os.environ.get("HEADWAY_DATA")
    if not data:
        pytest.skip("HEADWAY_DATA is not set: no real traces to read")
    return Path(data) / "traces"


def test_the_real_azure_conversation_trace(traces: Path) -> None:
    workload = read(traces / "AzureLLMInferenceTrace_conv.csv.gz")
    message = describe(workload)
    assert message.num_requests == 19_366 and message.notes == ()
    assert message.prompt_tokens is not None and message.output_tokens is not None
    # The medians that the Splitwise paper gives for it.
    assert (message.prompt_tokens.p50, message.output_tokens.p50) == (1020, 129)
    assert workload.arrival_s[0] == 0 and 3500 < workload.arrival_s[-1] < 3600


def test_the_real_mooncake_lengths_and_servegen_requests(traces: Path) -> None:
    mooncake = read(traces / "mooncake_conversation_lengths.csv.gz")
    assert len(mooncake) == 12_031 and mooncake.arrival_s[-1] == pytest.approx(3536.999)
    servegen = read(traces / "servegen_reasoning_requests.csv.gz")
    assert len(servegen) == 50_000
    assert (np.diff(servegen.arrival_s) >= 0).all() and servegen.arrival_s[-1] < 86_400
    assert servegen.column("reasoning_tokens").sum() == 56_745_153
