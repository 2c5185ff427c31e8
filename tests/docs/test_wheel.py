"""The commands of the README, from a release's wheel in an environment of its own where a package index is."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

import engines
import headway
from document_commands import ROOT
from readme import run_readme
from released import make_release


@pytest.mark.ci
def test_every_command_of_the_readme_runs(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the wheels, with the extras that the commands need and no other package."""
    dist, suffix = make_release(tmp_path_factory), f"{headway.__version__}-py3-none-any.whl"
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("PIP_NO_COMPILE", "1")  # most of what is installed is never imported
    venv.create(tmp_path / "venv")
    programs = tmp_path / "venv" / "bin"
    clients = [] if engines.NO_LLAMA else ["openai", "xllamacpp", "gguf"]
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "--quiet", "--disable-pip-version-check"]
    wheels = [f"{dist}/headway-{suffix}[calibrate,gateway,plan]", f"{dist}/headway_papers-{suffix}"]
    wanted = ["-c", str(ROOT / "constraints.txt"), *wheels, *clients]
    subprocess.run([*pip, "install", *wanted], check=True)
    (tmp_path / "work").mkdir()
    run_readme(tmp_path / "work", programs)
