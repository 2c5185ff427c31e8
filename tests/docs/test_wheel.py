"""The commands of the README from an installed wheel, in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

import engines
from documented import ROOT
from readme import run_readme


def test_every_command_of_the_readme_runs_from_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an environment of its own, with the extras that the README's commands need and no other package."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("HEADWAY_PURE", "1")  # compiling takes longer than all commands together
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


def _pip(python: Path, *arguments: str) -> None:
    done = subprocess.run(
        [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], capture_output=True, text=True
    )
    if "No matching distribution" in done.stderr or "Could not find a version" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
