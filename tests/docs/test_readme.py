"""The commands of the README and of the pages for three kinds of readers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from documented import bash_blocks, files_in, run_blocks
from headway.report.page import library_name


@pytest.mark.parametrize(
    ("page", "written"),
    [
        ("docs/for-operators.md", {"fleet.yaml", "day/requests.parquet", "day.html", "plan.yaml", "answer8.json"}),
        ("docs/for-platforms.md", {"plan.yaml", "plan.html", "manifests/kustomization.yaml", "manifests/planned.yaml"}),
        ("docs/for-researchers.md", {"mine.py", "mine.html", "grid.yaml", "arena.html"}),
    ],
)
def test_every_command_of_a_page_for_readers_runs(page: str, written: set[str], tmp_path: Path) -> None:
    run_blocks(bash_blocks(page), tmp_path, Path(sys.executable).parent)
    assert written | {library_name()} <= files_in(tmp_path)
