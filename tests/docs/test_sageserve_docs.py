"""The scenario of docs/sageserve.md runs as printed, on a fiftieth of its load."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headway.config.strict_yaml import parse
from headway.scenario import assemble, run

PAGE = Path(__file__).parents[2] / "docs" / "sageserve.md"


@pytest.mark.ci
def test_the_scenario_runs_as_printed() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    document, places = parse(block, "mine.yaml")
    document["workload"]["scale"] /= 50
    done = run(assemble(document, places, Path()))
    assert not done.summary.num_rejected and done.summary.gpu_hours >= 3 * 2 * 4  # three regions keep two instances
