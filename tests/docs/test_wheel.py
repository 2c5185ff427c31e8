"""The commands of the README, from an installed wheel in an environment of its own where a package index is."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import engines
from documented import ROOT
from readme import run_readme


@pytest.mark.ci
def test_every_command_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a wheel with the extras that the commands need and no other package; without an index, from here."""
    (tmp_path / "work").mkdir()
    run_readme(tmp_path / "work", _installed(tmp_path, monkeypatch) or Path(sys.executable).parent)


def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path | None:
    """The programs of an environment with the wheel; None: no package index can be reached."""
    here = os.environ.get("PYTHONPATH")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("HEADWAY_PURE", "1")  # compiling takes longer than all commands together
    monkeypatch.setenv("PIP_NO_COMPILE", "1")  # most of what is installed is never imported
    source, programs = tmp_path / "source", tmp_path / "venv" / "bin"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(source)], check=True)
    clients = [] if engines.NO_LLAMA else ["openai", "xllamacpp", "gguf"]
    if _pip("wheel", "--no-deps", "-w", str(tmp_path), str(source)):
        (wheel,) = tmp_path.glob("headway-*.whl")
        venv.create(tmp_path / "venv")
        wanted = ["-c", str(ROOT / "constraints.txt"), f"{wheel}[gateway,plan]", *clients]
        if _pip("--python", str(programs / "python"), "install", *wanted):
            return programs
    if here is not None:
        monkeypatch.setenv("PYTHONPATH", here)
    return None


def _pip(*arguments: str) -> bool:
    """Whether a package index can be reached."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if "No matching distribution" in done.stderr or "Could not find a version" in done.stderr:
        return False
    assert done.returncode == 0, done.stderr
    return True
