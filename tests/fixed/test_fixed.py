"""Records, metrics and plans of a fixed set of scenarios are the same bytes as when `digests.json` was written.

A change that is meant to change results needs new digests: `python tests/fixed/digests.py --update`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cases import CASES
from digests import EXPECTED, differences, environment, run

STORED = json.loads(EXPECTED.read_text(encoding="utf-8"))
HERE = environment()


def test_every_case_has_digests() -> None:
    assert list(STORED["cases"]) == list(CASES)


@pytest.mark.sampled(6)
@pytest.mark.skipif(
    STORED["environment"] != HERE,
    reason=f"digests are of other libraries or arithmetic: {STORED['environment']}, here {HERE}",
)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", CASES)
def test_outputs_are_unchanged(name: str, tmp_path: Path) -> None:
    changed = differences(STORED["cases"][name], run(CASES[name], tmp_path))
    assert not changed, "\n".join([f"{name}: output files changed", *changed])
