"""`headway arena` and `headway reproduce` among the commands of Headway."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.cli import main

WORKLOAD = {"arrivals": 5, "num_requests": 40, "prompt_tokens": 100, "output_tokens": 20}
GRID: dict[str, Any] = {
    "fleets": {"pair": {"fleet": [{"model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm-0.15", "replicas": 2}]}},
    "workloads": {"chat": WORKLOAD},
    "loads": [0.5],
    "seeds": 4,
    "num_requests": 40,
    "metric": "ttft_s.mean",
    "policies": {"routing": ["least-loaded"]},
}
POLICY = """
from headway.core.decision import Placement

class Biased:
    def __init__(self, share: float = 1.0) -> None:
        self.share = share

    def route(self, request, view):
        print("a print of one's own")
        return Placement(view.replicas[0].id)
"""


@pytest.mark.parametrize(
    "line",
    [
        "arena play grid.yaml --jobs 1 --cache played",
        "arena search grid.yaml --policy mine:Biased --vary share=0.1:1.0 --trials 1 --jobs 1 --cache searched",
        "reproduce --list",
        "reproduce ktier --list",
    ],
)
def test_stdout_of_json_is_one_document(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(GRID))
    (tmp_path / "mine.py").write_text(POLICY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("headway_papers.arena.capacity.MOST_REQUESTS", 500)
    assert main([*line.split(), "--json"]) == 0
    json.loads(capfd.readouterr().out)


def test_help_lists_the_arenas_commands_with_their_whole_first_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arena", "--help"]) == 0
    listed = capsys.readouterr().out.partition("Commands:")[2]
    assert listed.strip() and "..." not in listed


def test_no_other_command_imports_the_papers() -> None:
    code = """import sys; from headway.cli import main
main("simulate --model llama-3.1-8b --gpu h100 --num-requests 5 --routing round-robin".split()); main(["--help"])
print(any(name.startswith("headway_papers") for name in sys.modules), "importlib.metadata" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False True" and "  reproduce  " in done.stdout
