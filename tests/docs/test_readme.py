"""The commands of the README and of the pages for three kinds of readers; the README's from an installed wheel, too."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import engines
from documented import ROOT, bash_blocks, files_in, run_blocks
from headway.report.page import library_name

BLOCKS = bash_blocks("README.md")
WRITTEN = {
    "out/requests.csv", "out/plan.yaml", "chat.yaml", "out/chat.html", f"out/{library_name()}", "out/chat.json",
}  # fmt: skip
"""Files that the blocks write without a real engine."""


def run_readme(folder: Path, programs: Path) -> None:
    """Run all blocks, and check what they leave behind."""
    assert len(BLOCKS) >= 5
    blocks = [block for block in BLOCKS if "tiny_llama" not in block or not engines.NO_LLAMA]
    done = run_blocks(blocks, folder, programs)
    made, expected = files_in(folder), set(WRITTEN)
    if len(blocks) == len(BLOCKS):
        recorded = {name for name in made if re.fullmatch(r"ran/\w+\.parquet", name)}
        expected |= {"fleet.yaml", "ask.py", "ran/decisions.jsonl", *recorded}
        words = re.search("^([A-J][a-j]{2}){1000}$", done.stdout, re.MULTILINE)
        assert "ran/requests.parquet" in recorded and words is not None
        assert " is down: " in done.stderr, "one engine was killed, and the answer has its 1,000 words"
    assert made == expected


def test_every_command_of_the_readme_runs(tmp_path: Path) -> None:
    run_readme(tmp_path, Path(sys.executable).parent)


def test_every_command_of_the_readme_runs_from_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an environment of its own, with the extras that the README's commands need and no other package."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(source)], check=True)
    _pip(Path(sys.executable), "wheel", "--no-deps", "-w", str(tmp_path), str(source))
    (wheel,) = tmp_path.glob("headway-*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    clients = [] if engines.NO_LLAMA else ["openai", "xllamacpp", "gguf"]
    _pip(python, "install", "-c", str(ROOT / "constraints.txt"), f"{wheel}[gateway,plan]", *clients)
    (tmp_path / "work").mkdir()
    run_readme(tmp_path / "work", python.parent)


@pytest.mark.parametrize(
    ("page", "written"),
    [
        ("docs/for-operators.md", {"fleet.yaml", "day/requests.parquet", "day.html", "plan.yaml", "answer8.json"}),
        ("docs/for-platforms.md", {"plan.yaml", "plan.html", "manifests/kustomization.yaml", "manifests/planned.yaml"}),
        ("docs/for-researchers.md", {"mine.py", "mine.html"}),
    ],
)
def test_every_command_of_a_page_for_readers_runs(page: str, written: set[str], tmp_path: Path) -> None:
    run_blocks(bash_blocks(page), tmp_path, Path(sys.executable).parent)
    assert written | {library_name()} <= files_in(tmp_path)


def _pip(python: Path, *arguments: str) -> None:
    done = subprocess.run(
        [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], capture_output=True, text=True
    )
    if "No matching distribution" in done.stderr or "Could not find a version" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
