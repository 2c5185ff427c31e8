"""Each script of measurements can be imported: none is run by the tests, so a module that has moved would go unseen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPORT_EACH = """
import importlib.util, sys
from pathlib import Path
for name in sys.argv[1:]:
    before, known = sys.path[:], set(sys.modules)
    sys.path.insert(0, str(Path(name).parent))
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        print(name, error.name)
    sys.path[:] = before
    for new in set(sys.modules) - known:  # the next script finds the modules of its own folders
        if {"bench", "tests"} & set(Path(getattr(sys.modules[new], "__file__", None) or "").parts):
            del sys.modules[new]
"""
NOT_INSTALLED = {"torch", "vllm"}
"""What the scripts that say so need beside Headway."""


@pytest.mark.ci
def test_each_script_of_measurements_can_be_imported() -> None:
    scripts = [str(path) for folder in ("bench", "papers/bench") for path in sorted((ROOT / folder).glob("*.py"))]
    assert len(scripts) > 30
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", IMPORT_EACH, *scripts]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    missing = [line for line in done.stdout.splitlines() if line.split()[-1] not in NOT_INSTALLED]
    assert not missing
