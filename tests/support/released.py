"""A release for tests to use: the one that `HEADWAY_DIST` names, or one made of the last commit."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from document_commands import ROOT


def make_release(factory: pytest.TempPathFactory) -> Path:
    """The folder of a release; without `HEADWAY_DIST`, one without a compiled wheel. Skips without a package index.

    All processes of a test run use the same one.
    """
    if "HEADWAY_DIST" in os.environ:
        return Path(os.environ["HEADWAY_DIST"])
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "release"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "SHA256SUMS").exists():
            _make(folder)
    return folder


def _make(folder: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "release.py"), "--pure", "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "No matching distribution" in done.stderr or "Could not find a version" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
