"""`headway plan goodput`: the goodputs of a fleet's combos, measured anew with the requests that it got."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from headway.cli import main

FLEET = """\
name: served
workload: {builtin: sharegpt, arrivals: 20, num_requests: 200}
slo: {ttft_s: 2, tpot_s: 0.05}
combos:
  - name: fast   # the first
    prefill: {model: llama-3.1-8b, gpu: h800, engine: vllm-0.15}
    decode: {model: llama-3.1-8b, gpu: a800-pcie, engine: vllm-0.15}
    goodput_rps: 24      # as profiled
  - {name: small, aggregated: {model: llama-3.1-8b, gpu: a800-pcie, engine: vllm-0.15}}
policies: {routing: cauchy}
"""


def _requests(folder: Path, prompt_tokens: int) -> Path:
    rows = "".join(f"{0.5 * i},{prompt_tokens},60\n" for i in range(120))
    file = folder / f"{prompt_tokens}.csv"
    file.write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}")
    return file


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET)
    return file


def _told(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, float]:
    options = ("--profile-requests", "100", "--no-cache", "--no-progress", "--json")
    assert main(["plan", "goodput", *map(str, arguments), *options]) == 0
    return {each["combo"]: each["goodput_rps"] for each in json.loads(capsys.readouterr().out)["combos"]}


def test_longer_prompts_take_goodput_and_the_file_changes_in_nothing_else(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = _told(capsys, fleet, _requests(tmp_path, 3000), "-o", fleet)
    text = fleet.read_text()
    assert f"    goodput_rps: {long['fast']:.4g}      # as profiled\n" in text
    assert f"{{name: small, goodput_rps: {long['small']:.4g}, aggregated:" in text
    same = text.replace(f"{long['fast']:.4g} ", "24 ").replace(f" goodput_rps: {long['small']:.4g},", "")
    assert same == FLEET
    short = _told(capsys, fleet, _requests(tmp_path, 300))
    assert all(short[name] > 2 * long[name] for name in ("fast", "small"))


def test_a_fleet_without_combos_or_slo_is_refused(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = _requests(tmp_path, 300)
    document = yaml.safe_load(FLEET)
    changes = (
        ({"combos": [], "fleet": [{"model": "llama-3.1-8b", "gpu": "h800"}]}, "combos.*expected combos"),
        ({"slo": {}}, "slo.*expected ttft_s"),
    )
    for change, message in changes:
        fleet.write_text(yaml.safe_dump({**document, **change}))
        assert main(["plan", "goodput", str(fleet), str(requests), "--no-progress", "--no-cache"]) == 2
        error = capsys.readouterr().err
        assert re.search(message, error), error
