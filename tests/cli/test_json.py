"""`--json` of every command: stdout is one JSON document, whatever libraries and policies of one's own print."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import serving
from headway.cli import PAPERS, commands, main

FLEET = "--model llama-3.1-8b --gpu h100 --replicas 2 --engine vllm-0.15"
REQUESTS = "--rate 5 --num-requests 40 --prompt-tokens 100 --output-tokens 20"
LINES = {
    "simulate": "simulate small.yaml",
    "compare": "compare small.yaml --routing random,round-robin",
    "plan capacity": "plan capacity small.yaml --gpus h100 --ttft-p99 2 --no-cache --max-replicas 2 --jobs 2",
    "plan cascade": "plan cascade cascade.yaml --gpus h100:8 --quality 75 --no-cache",
    "plan combos": "plan combos combos.yaml --gpus h800:1:2.8 --sizes 1 --no-cache --profile-requests 50 --jobs 2",
    "plan fleet": "plan fleet trace.csv --have h100:2:3 --tp 1 --seeds 1 --routing random --slo ttft=1 --no-cache "
    "--jobs 1",
    "plan goodput": "plan goodput goodput.yaml trace.csv --profile-requests 50 --no-cache",
    "plan scaling": "plan scaling scaling.yaml --max-late 0.5 --seeds 1 --no-cache --jobs 1",
    "plan tiers": "plan tiers tiers.yaml --tiers 1 --decay 1 --seeds 2",
    "workload describe": "workload describe trace.csv",
    "forecast evaluate": "forecast evaluate demand.csv --methods last-value --only a",
    "forecast demand": "forecast demand trace.csv --growth 1.4",
    "calibrate": "calibrate vllm-1.json vllm-2.json vllm-4.json vllm-8.json --gpu h100 --engine vllm-0.15",
    "validate": "validate vllm-1.json --gpu h100 --engine vllm-0.15",
    "catalog coefficients": "catalog coefficients --gpu h100",
    "catalog engines": "catalog engines",
    "catalog errors": "catalog errors",
    "catalog gpus": "catalog gpus h100",
    "catalog memory": "catalog memory --model llama-3.1-8b --gpu h100",
    "catalog models": "catalog models",
    "discover": "discover http://127.0.0.1:9 --out small.yaml",
    "load": "load {engine} --num-requests 3 --concurrency 1 --prompt-tokens 9 --output-tokens 3 --no-warm-up",
    "advise": "simulate small.yaml --num-requests 300 --out day; advise small.yaml --records day --slo ttft=1,e2e=2"
    " --kinds admission --jobs 1 --no-cache",
    "autopilot status": "autopilot status small.yaml",
    "why": "simulate small.yaml --out whyran; why --records whyran --slowest 1",
    "keys add": "keys --store a.db add quiet",
    "keys change": "keys --store b.db add quiet; keys --store b.db change quiet --requests-per-minute 5",
    "keys list": "keys --store c.db list",
    "keys rotate": "keys --store d.db add quiet; keys --store d.db rotate quiet",
    "keys spend": "keys --store e.db spend",
    "keys revoke": "keys --store f.db add quiet; keys --store f.db revoke quiet",
}
"""A small run of each, after what it needs."""


def with_json(group: click.Group, *before: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from with_json(command, *before, name)
        elif command and any(each.name == "as_json" for each in command.params):
            yield " ".join((*before, name)), command


COMMANDS = {name: each for name, each in with_json(commands) if name.split()[0] not in PAPERS}


def test_every_command_that_prints_json_is_here() -> None:
    assert set(COMMANDS) == set(LINES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the commands read."""
    made = tmp_path_factory.mktemp("json")
    fleet = [{"model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm-0.15", "replicas": 2}]
    workload = {"arrivals": 5, "num_requests": 40, "prompt_tokens": 100, "output_tokens": 20}
    tiers = {"builtin": "ktier", "num_requests": 60, "arrivals": 300, "tiers": [{"tier": 0, "ttft_s": 1}, {"tier": 1}]}
    ordering = {"name": "priority", "preemptive": False}
    steps = {"arrivals": {"kind": "curve", "step_s": 240, "rates": [0.4, 2.0]}, "duration_s": 480}
    scenarios: dict[str, Any] = {
        "small": {"workload": workload, "fleet": fleet},
        "combos": {"workload": {**workload, "arrivals": 20}, "fleet": fleet, "slo": {"ttft_s": 2, "tpot_s": 0.05}},
        "cascade": {
            "workload": {
                "arrivals": 3, "num_requests": 60, "quality": {"trace": 1, "cascade": "llama", "num_requests": 60},
            },
            "fleet": [{"model": "llama-3-70b", "gpu": "h100-80gb-sxm", "tp": 4}],
        },
        "scaling": {
            "workload": {"prompt_tokens": 800, "output_tokens": 120, **steps}, "slo": {"ttft_s": 2},
            "fleet": [{
                "name": "main", "model": "llama-3.1-70b", "gpu": "a100-80gb", "tp": 4, "engine": "vllm-0.15",
                "kv_capacity_tokens": 12000, "max_replicas": 4,
            }],
        },
        "tiers": {"workload": tiers, "fleet": fleet, "policies": {"routing": "freest", "ordering": ordering}},
        "goodput": {
            "workload": {**workload, "arrivals": 20}, "slo": {"ttft_s": 2, "tpot_s": 0.05},
            "combos": [{"name": "one", "aggregated": {"model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm-0.15"}}],
            "policies": {"routing": "cauchy"},
        },
    }  # fmt: skip
    for name, scenario in scenarios.items():
        (made / f"{name}.yaml").write_text(yaml.safe_dump(scenario))
    (made / "small.autopilot").mkdir()
    rows = [f"{i / 4},{100 + i},{10 + i % 7},llama-3.1-8b" for i in range(60)]
    (made / "trace.csv").write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,model", *rows, ""]))
    demand = [f"{900 * i},{5 + i % 4}" for i in range(96 * 3)]
    (made / "demand.csv").write_text("\n".join(["time_s,a", *demand, ""]))
    for rate in (1, 2, 4, 8):
        (made / f"vllm-{rate}.json").write_text(
            json.dumps(
                {
                    "model_id": "meta-llama/Llama-3.1-8B-Instruct",
                    "completed": 40,
                    "duration": 40 / rate,
                    "mean_ttft_ms": 40.0 + rate,
                    "mean_tpot_ms": 9.0 + rate / 4,
                    "total_input_tokens": 40 * 512,
                    "total_output_tokens": 40 * 64,
                    "request_rate": float(rate),
                }
            )
        )
    (made / "mine.py").write_text(MINE)
    return made


MINE = """
import ctypes, os
from headway.core.decision import Placement

class Biased:
    def __init__(self, share: float = 1.0) -> None:
        self.share = share

    def route(self, request, view):
        print("a print of one's own")
        return Placement(view.replicas[0].id)

class Loud(Biased):
    def route(self, request, view):
        os.write(1, b"a write of a library\\n")
        ctypes.CDLL(None).puts(b"a line of a library in C")
        return super().route(request, view)
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """The address of an engine."""
    with serving.closing(started := serving.emulator("--speed", "20")):
        yield started.url


@pytest.mark.parametrize("name", LINES)
def test_stdout_is_one_document(
    name: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    """Under the file descriptor, too: what a solver in C prints counts."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    *before, line = LINES[name].split(";")
    if "{engine}" in line:
        line = line.format(engine=request.getfixturevalue("engine"))
    for each in before:
        assert main(each.split()) == 0
    capfd.readouterr()
    assert main([*line.split(), "--json"]) == 0
    json.loads(capfd.readouterr().out)


def test_stdout_of_a_process_is_its_own(folder: Path) -> None:
    """Prints of policies and writes of C libraries go to stderr; without `--json` the latter only."""
    command = [sys.executable, "-m", "headway", "simulate", "small.yaml", "--routing", "mine:Loud", "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["results"][0]["num_completed"] == 40
    for line in ("a print of one's own", "a write of a library", "a line of a library in C"):
        assert done.stderr.count(line) >= 40, line
