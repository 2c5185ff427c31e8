"""The commands of the README and of the pages for three kinds of readers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from document_commands import ROOT, bash_blocks, files_in, run_blocks
from headway.report.page import library_name


@pytest.mark.parametrize(
    ("page", "written"),
    [
        ("docs/for-operators.md", {"fleet.yaml", "day/requests.parquet", "day.html", "demand.parquet", "month.yaml"}),
        ("docs/for-platforms.md", {"plan.yaml", "plan.html", "manifests/kustomization.yaml", "manifests/planned.yaml"}),
        ("docs/for-researchers.md", {"mine.py", "mine.html", "grid.yaml", "arena.html"}),
    ],
)
@pytest.mark.ci
def test_every_command_of_a_page_for_readers_runs(page: str, written: set[str], tmp_path: Path) -> None:
    run_blocks(bash_blocks(page), tmp_path, Path(sys.executable).parent)
    assert written | {library_name()} <= files_in(tmp_path)


@pytest.mark.ci
def test_the_answer_on_the_page_of_fleet_plans_is_the_one_that_its_command_prints(tmp_path: Path) -> None:
    page = (ROOT / "docs/plan-fleet.md").read_text(encoding="utf-8")
    run_blocks(bash_blocks("docs/plan-fleet.md"), tmp_path, Path(sys.executable).parent)
    plan = (tmp_path / "fleet.yaml").read_text(encoding="utf-8").splitlines()
    shown = page.split("```text\n")[1].split("```")[0]
    assert shown.split() == " ".join(line[2:] for line in plan if line.startswith("# ")).split()
