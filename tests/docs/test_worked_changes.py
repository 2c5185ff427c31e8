"""The worked examples of pages on changing Headway: their diffs fit the source, and the tests that they name pass."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("httptools")
ROOT = Path(__file__).parents[2]
Change = tuple[str, str, str]
"""A file, some of its lines, and what they become."""


def changes(page: str) -> list[Change]:
    """Those of the page's diffs, in which `@@` stands between places of one file."""
    found = []
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for name, body in re.findall(r"^```diff\n--- (\S+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        for place in body.split("@@\n"):
            lines = place.splitlines(keepends=True)
            before, after = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
            found.append((name, before, after))
    return found


def apply(root: Path, change: Change) -> None:
    name, before, after = change
    text = (root / name).read_text(encoding="utf-8")
    before, after = before.removesuffix("\n"), after.removesuffix("\n")  # a line may go on
    assert text.count(before) == 1, f"{name} has these lines {text.count(before)} times, not once: {before}"
    (root / name).write_text(text.replace(before, after), encoding="utf-8")


def run_tests(root: Path, page: str) -> subprocess.CompletedProcess[str]:
    """Run the page's last command in a copy of the repository."""
    command = re.findall(r"^```bash\n(.*?)^```$", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL | re.M)
    program, *words = shlex.split(command[-1])
    return subprocess.run(
        [sys.executable, "-m", program, *words, "-p", "no:cacheprovider", "-m", "not long and not ci and not newest"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for folder in (
        "src/headway",
        "scripts",
        "tests/support",
        "tests/perf",
        "tests/calibration",
        "tests/gateway/relay",
        "tests/sim",
    ):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for file in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


@pytest.mark.parametrize("page", ["add-a-step-time-term.md", "change-the-failover.md"])
def test_the_changes_of_a_page_fit_the_source(page: str) -> None:
    for name, before, _ in changes(page):
        assert (ROOT / name).read_text(encoding="utf-8").count(before.removesuffix("\n")) == 1, (name, before)


@pytest.mark.ci
def test_the_term_of_the_page_is_fitted(copy: Path) -> None:
    for change in changes("add-a-step-time-term.md"):
        apply(copy, change)
    done = run_tests(copy, "add-a-step-time-term.md")
    assert done.returncode == 0, done.stdout


@pytest.mark.ci
def test_the_failover_of_the_page_needs_its_row_of_the_table(copy: Path) -> None:
    code, row = changes("change-the-failover.md")
    apply(copy, code)
    alone = run_tests(copy, "change-the-failover.md")
    assert alone.returncode == 1 and "test_every_state_has_the_step_of_the_first_row_that_fits" in alone.stdout
    apply(copy, row)
    done = run_tests(copy, "change-the-failover.md")
    assert done.returncode == 0, done.stdout
