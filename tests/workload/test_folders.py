"""A folder of records is its requests.parquet, for every reader of a trace."""

from __future__ import annotations

from pathlib import Path

import pytest

import headway as hw
from headway.cli import main
from headway.planning.scaling.demand import with_demand
from headway.records import parquet
from headway.workload.generate import generate
from headway.workload.read import detect, read
from headway.workload.spec import WorkloadSpec

FLEET = [{"model": "llama-3.1-8b", "gpu": "h100"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("records") / "day"
    served = {"prompt_tokens": 50, "output_tokens": 5, "arrivals": 5, "num_requests": 20}
    parquet.save(hw.simulate({"workload": served, "fleet": FLEET}).records, made, {})
    return made


def test_a_folder_is_its_requests(folder: Path) -> None:
    file = folder / "requests.parquet"
    assert read(folder).arrival_s.tolist() == read(file).arrival_s.tolist()
    assert detect(folder) == detect(file) == "headway-parquet"
    for spec in ({"trace": str(folder)}, {"trace": {"path": str(folder), "limit": 9}}):
        named = {"trace": str(file)} if isinstance(spec["trace"], str) else {"trace": {"path": str(file), "limit": 9}}
        rows = [hw.load({"workload": each, "fleet": FLEET}).spec.workload for each in (spec, named)]
        one, other = (generate(each, 0, Path()).arrival_s.tolist() for each in rows)
        assert one == other
    arrivals = {"kind": "replay", "path": str(folder)}
    synthetic = {"prompt_tokens": 5, "output_tokens": 5, "arrivals": arrivals}
    assert isinstance(hw.load({"workload": synthetic, "fleet": FLEET}).spec.workload, WorkloadSpec)
    found = with_demand({"fleet": FLEET}, str(folder), 1.0)["workload"]
    assert (
        generate(hw.load({"workload": found, "fleet": FLEET}).spec.workload, 0, Path()).arrival_s.tolist()
        == read(folder).arrival_s.tolist()
    )


@pytest.mark.parametrize(
    "command",
    [
        "workload describe {}",
        "simulate --trace {} --model llama-3.1-8b --gpu h100",
        "simulate --workload {} --model llama-3.1-8b --gpu h100",
    ],
)
def test_commands_take_a_folder(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for each in (folder, folder / "requests.parquet"):
        assert main(command.format(each).split()) == 0
        outputs.append(capsys.readouterr().out.replace(str(each), ""))
    assert outputs[0].split() == outputs[1].split()


def test_a_folder_without_records_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(hw.HeadwayError, match=r"is a folder without requests.parquet; expected a file, or the folder"):
        read(tmp_path)
    (tmp_path / "parts").mkdir()
    with pytest.raises(hw.HeadwayError, match=r"no request has been recorded yet"):
        read(tmp_path)
