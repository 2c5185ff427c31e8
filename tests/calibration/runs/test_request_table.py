"""Tables with a row for each request."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest

from headway import catalog
from headway.calibration.runs.read import is_runs, read
from headway.calibration.serving import TOKEN_ID_S
from headway.calibration.terms import terms_of
from headway.cli import main, measured_fleet
from headway.core.errors import HeadwayError

HEADER = "phase,prompt_tokens,output_tokens,sent_s,ttft_s,e2e_s,temperature,kind,first_use"
ROWS = [
    "slow,100,11,0.0,0.050,0.150,0,open,",
    "slow,300,21,1.0,0.070,0.270,0,open,",
    "alone,100,11,,0.040,0.140,,serial,",
    "alone,100,11,,0.040,0.140,,serial,",
]


def table(path: Path, *rows: str, header: str = HEADER) -> Path:
    path.write_text("\n".join([header, *(rows or ROWS)]) + "\n")
    return path


def test_each_phase_is_a_run(tmp_path: Path) -> None:
    path = table(tmp_path / "requests.csv")
    assert is_runs(path)
    (slow, alone), skipped = read(path)
    assert not skipped
    assert (slow.where, alone.where) == (f"{path}: slow", f"{path}: alone")
    assert (slow.num_requests, slow.prompt_tokens, slow.output_tokens) == (2, 200.0, 16.0)
    assert slow.latencies_s["ttft_mean"] == pytest.approx(0.06)
    assert slow.latencies_s["itl_mean"] == pytest.approx(0.3 / 30)  # over tokens
    assert (slow.is_greedy, alone.is_greedy) == (True, None)
    assert (slow.concurrency, alone.concurrency) == (None, 1)
    assert alone.rate_rps == pytest.approx(2 / 0.28)  # one after the other


def test_packed_milliseconds_and_lines_of_json_are_the_same_run(tmp_path: Path) -> None:
    (plain, _), _ = read(table(tmp_path / "requests.csv"))
    packed = tmp_path / "requests.csv.gz"
    packed.write_bytes(gzip.compress(table(tmp_path / "copy.csv").read_bytes()))
    names = HEADER.split(",")
    objects = [dict(zip(names, row.split(","), strict=True)) for row in ROWS[:2]]
    lines = tmp_path / "requests.jsonl"
    with lines.open("w") as file:
        for each in objects:
            numbers = {name: float(each[name]) for name in names[1:7]}
            numbers["ttft_ms"], numbers["e2e_ms"] = 1e3 * numbers.pop("ttft_s"), 1e3 * numbers.pop("e2e_s")
            file.write(json.dumps({"phase": "slow", **numbers}) + "\n")
    for path in (packed, lines):
        assert is_runs(path)
        found = read(path)[0][0]
        assert found.latencies_s == pytest.approx(plain.latencies_s, nan_ok=True)
        assert (found.num_requests, found.rate_rps) == (plain.num_requests, pytest.approx(plain.rate_rps))


def test_what_failed_and_what_happens_once_is_left_out_and_counted(tmp_path: Path) -> None:
    path = table(
        tmp_path / "requests.csv",
        *ROWS[:2],
        "slow,100,0,2.0,,,0,open,",
        "slow,100,11,3.0,4.0,4.1,0,open,compiles",
        "first,100,11,3.0,4.0,4.1,0,open,compiles",
    )
    (slow,), skipped = read(path)
    assert slow.num_requests == 2
    assert slow.notes == (
        "1 requests failed, and are left out",
        "1 requests show what happens once after a start, and are left out",
    )
    assert skipped == [f"{path}: first: 1 requests show what happens once after a start, and are left out"]


def test_a_run_that_the_engine_spent_on_what_happens_once_is_left_out(tmp_path: Path) -> None:
    path = table(
        tmp_path / "requests.csv",
        *ROWS[:2],
        "stood,100,11,3.0,4.0,4.1,0,open,compiles",
        "stood,100,11,3.1,4.0,4.1,0,open,compiles",
        "stood,100,11,4.2,0.5,0.6,0,open,",
    )
    (slow,), skipped = read(path)
    assert slow.where.endswith("slow")
    assert skipped == [
        f"{path}: stood: 2 requests show what happens once after a start, and are left out;"
        " the rest met an engine that had stood still, which no replay does"
    ]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("slow,many,11,0,0.05,0.15,0,open,", "line 2: prompt_tokens: expected a number, found 'many'"),
        ("slow,,11,0,0.05,0.15,0,open,", "line 2: expected numbers of tokens in prompt_tokens and output_tokens"),
        ("slow,100,11,0,0.05,,0,open,", "line 2: e2e is empty"),
        ("slow,100,11,0,0.25,0.15,0,open,", "line 2: TTFT of 0.25 s and E2E of 0.15 s; expected 0 < TTFT <= E2E"),
    ],
)
def test_a_bad_cell_is_named_with_its_line(row: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match=why):
        read(table(tmp_path / "requests.csv", row))


def test_several_models_are_several_runs(tmp_path: Path) -> None:
    rows = [f"{model},100,11,{i},0.05,0.15" for model in ("llama-3.1-8b", "qwen3-8b") for i in range(3)]
    runs, _ = read(table(tmp_path / "r.csv", *rows, header="model,prompt_tokens,output_tokens,start_s,ttft_s,e2e_s"))
    assert [run.model for run in runs] == ["llama-3.1-8b", "qwen3-8b"]
    assert all(math.isclose(run.rate_rps, 3 / 2.15) for run in runs)


def _predicted_ms(path: Path, capsys: pytest.CaptureFixture[str], latency: str, *options: str) -> float:
    """What `headway validate` predicts for a table of requests."""
    flags = ["--model", "llama-3.1-8b", "--gpu", "h100", "--engine", "vllm-0.25", "--json", "--no-progress"]
    assert main(["validate", str(path), *flags, *options]) == 0
    (found,) = json.loads(capsys.readouterr().out)["experiments"]
    return float(found["errors"][latency]["predicted"])


def test_validate_reads_it_and_greedy_requests_take_no_sampler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{i},100,41,{i / 4},0.05,0.45" for i in range(12)]
    path = table(tmp_path / "r.csv", *rows, header="id,prompt_tokens,output_tokens,start_s,ttft_s,e2e_s")
    assert _predicted_ms(path, capsys, "tpot_mean", "--greedy") < _predicted_ms(path, capsys, "tpot_mean")


def test_prompts_that_were_sent_as_token_ids_are_not_tokenised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{i},4000,41,{i / 4},0.15,0.55" for i in range(12)]
    path = table(tmp_path / "r.csv", *rows, header="id,prompt_tokens,output_tokens,start_s,ttft_s,e2e_s")
    as_text_ms, as_ids_ms = (_predicted_ms(path, capsys, "ttft_mean", *each) for each in ((), ("--token-ids",)))
    saved_ms = 1e3 * 4000 * (catalog.engine("vllm-0.25").tokenize_s_per_token - TOKEN_ID_S)
    assert math.isclose(as_text_ms - as_ids_ms, saved_ms, rel_tol=0.2)


def test_a_fit_to_token_ids_leaves_the_time_to_tokenise_text_alone(tmp_path: Path) -> None:
    rows = [f"{i},4000,41,{i / 4},0.15,0.55" for i in range(12)]
    path = table(tmp_path / "r.csv", *rows, header="id,prompt_tokens,output_tokens,start_s,ttft_s,e2e_s")
    flags = {"model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm-0.25"}

    def terms(**more: bool) -> set[str]:
        ((found,), _) = measured_fleet.found_runs(path, {**flags, **more})
        known, engine = found.coefficients, found.pool.engine
        return {term.name for term in terms_of([found.experiment], known, engine, True, True)}

    assert terms() == {"request_s", "tokenize_s_per_token"}
    assert terms(token_ids=True) == {"request_s"}
