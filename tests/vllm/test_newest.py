"""vLLM's newest release on the package index is one that somebody has looked at."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from headway.vllm.settings import VERSIONS

WITHOUT: dict[str, str] = {}
"""Releases that `headway.vllm` refuses, and why."""


@pytest.mark.newest
def test_the_newest_release_is_covered_or_its_refusal_has_a_reason() -> None:
    command = [sys.executable, "-m", "pip", "index", "versions", "vllm", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no package index can be reached")
    newest = re.match(r"vllm \((\d+\.\d+)", done.stdout)
    assert newest is not None and newest[1] in {*VERSIONS, *WITHOUT}, done.stdout.splitlines()[0]
