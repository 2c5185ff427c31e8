"""docs/architecture.md: its tree lists the packages, and its steps are those of real calls."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headway.config.scenario import assemble
from headway.config.strict_yaml import parse
from headway.scenario.run import run
from scripted import DONE, OK, chunk, event
from traced_calls import Call, missing_step, traced

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SCENARIO = """
workload: {num_requests: 1, arrivals: 1, prompt_tokens: 500, output_tokens: 20}
fleet: [{model: llama-3.1-8b, gpu: h100, replicas: 2, engine: simulated-0.15}]
"""


def steps(name: str) -> list[Call]:
    """The listed steps: file and function."""
    block = re.search(rf"^```text hops {name}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert block is not None, name
    return [(line.split()[0], line.split()[1]) for line in block[1].splitlines()]


def test_the_tree_lists_every_package() -> None:
    block = re.search(r"^```text tree\nsrc/headway/\n(.*?)^papers/", PAGE, re.DOTALL | re.MULTILINE)
    assert block is not None
    package = ROOT / "src" / "headway"
    listed = set(re.findall(r"^  (\w+)/ ", block[1], re.MULTILINE))
    assert listed == {path.name for path in package.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    gateway = block[1][block[1].index("  gateway/") : block[1].index("  calibration/")]
    listed = set(re.findall(r"^    (\w+)/ ", gateway, re.MULTILINE))
    assert listed == {path.name for path in (package / "gateway").iterdir() if path.is_dir() and any(path.glob("*.py"))}


def test_a_simulated_request_takes_the_listed_steps() -> None:
    scenario = assemble(*parse(SCENARIO, "one.yaml"), Path())
    with traced() as calls:
        run(scenario)
    assert missing_step(steps("simulated"), calls) is None


def test_a_streamed_request_and_its_tokens_take_the_listed_steps(tmp_path: Path) -> None:
    pytest.importorskip("httptools")
    from traced_requests import traced_answer

    reply = [OK + event(chunk("so")), event(chunk(" it")), DONE]
    received, calls = traced_answer(tmp_path, reply, stream=True, end=b"[DONE]")
    assert b" it" in received
    assert missing_step(steps("request"), calls) is None
    sent = calls.index(steps("request")[-1])
    assert missing_step(steps("token"), calls[sent:]) is None
