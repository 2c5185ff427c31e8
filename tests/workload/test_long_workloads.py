"""Long workloads, made in blocks and kept in a file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headway.core.errors import HeadwayError
from headway.workload import arrivals, random_streams, table
from headway.workload.generate import generate
from headway.workload.lengths import Geometric, Lognormal, QuantileTable, Uniform
from headway.workload.spec import WorkloadSpec
from headway.workload.table import Workload

ARRIVALS = [
    "8",
    "{kind: gamma, rate: 8, cv: 2}",
    "{kind: deterministic, rate: 8}",
    "{kind: diurnal, rate: 8}",
    "{kind: curve, rates: [3, 9], step_s: 7}",
    "{kind: bursts, rate: 8, bursts: [{from_s: 3, to_s: 9, factor: 4}]}",
]
LENGTHS = [
    *(
        f"prompt_tokens: {msgspec.json.encode(each).decode()}\noutput_tokens: 7\n"
        for each in (
            Lognormal(mean=300, cv=1.3),
            Uniform(min=1, max=9, step=4),
            Geometric(mean=7),
            QuantileTable((0, 1), (10, 500)),
        )
    ),
    "prompt_tokens: azure-conv\noutput_tokens: azure-conv\nreasoning_tokens: servegen-reasoning\n",
    "prompt_tokens: azure-conv\noutput_tokens: azure-conv\nreasoning_tokens: 9\ncorrelation: 0.6\n",
    "mix: [{share: 2, prompt_tokens: 9, output_tokens: {kind: uniform, min: 1, max: 99}},"
    " {share: 1, prompt_tokens: azure-conv, output_tokens: 7, reasoning_tokens: servegen-reasoning}]\n",
]
PROPERTIES = [
    "slo: {ttft_s: 2, e2e_s: 9}\ntimeout_s: 20\nacceptance: 0.5\n",
    "tiers: [{tier: 0, share: 3}, {tier: 1, ttft_s: 2}]\n"
    "models: {a: 2, b: 1}\nregions: {x: 1, y: 3}\ntenants: {p: 1, q: 1}\n",
]
TEXTS = [
    *(f"arrivals: {arrivals}\n{LENGTHS[0]}" for arrivals in ARRIVALS),
    *(f"arrivals: 8\n{lengths}" for lengths in LENGTHS[1:]),
    *(f"arrivals: 8\n{LENGTHS[1]}{properties}" for properties in PROPERTIES),
]


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (arrivals, random_streams, table):
        monkeypatch.setattr(module, "LONG_ROWS", 50)
        monkeypatch.setattr(module, "BLOCK_ROWS", 37, raising=False)


def made(text: str) -> Workload:
    return generate(msgspec.yaml.decode(text, type=WorkloadSpec), 3)


@pytest.mark.parametrize("length", ["num_requests: 400", "duration_s: 50", "num_requests: 400\nduration_s: 30"])
@pytest.mark.parametrize("text", TEXTS)
def test_blocks_change_no_value(text: str, length: str, request: pytest.FixtureRequest) -> None:
    expected = made(f"{text}{length}\n")
    request.getfixturevalue("short_blocks")
    found = made(f"{text}{length}\n")
    assert len(found) > 37 and list(found.columns) == list(expected.columns)
    for name, column in expected.columns.items():
        assert np.array_equal(found.columns[name], column, equal_nan=column.dtype.kind == "f"), name
        assert found.columns[name].dtype == column.dtype


def test_a_long_table_is_checked_in_blocks(short_blocks: None) -> None:
    arrival_s, ones = np.arange(200.0), np.ones(200, "i4")
    for at in (36, 37, 38, 199):
        late = arrival_s.copy()
        late[at - 1] += 5
        with pytest.raises(HeadwayError, match=rf"row {at}, column arrival_s: {at}.0; expected a time not before"):
            Workload({"arrival_s": late, "prompt_tokens": ones, "output_tokens": ones}).validate("x")
        tokens = ones.copy()
        tokens[at] = 0
        with pytest.raises(HeadwayError, match=rf"row {at}, column prompt_tokens: 0; expected 1 to"):
            Workload({"arrival_s": arrival_s, "prompt_tokens": tokens, "output_tokens": ones}).validate("x")


def test_a_folder_that_cannot_be_written_to_is_named(
    short_blocks: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    monkeypatch.setattr("headway.core.column.SPILL_BYTES", 100)
    with pytest.raises(HeadwayError, match=r"missing: .*expected room, or TMPDIR set elsewhere"):
        made("arrivals: 8\nprompt_tokens: 9\noutput_tokens: azure-conv\nnum_requests: 400\n")
