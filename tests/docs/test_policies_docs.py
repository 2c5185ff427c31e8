"""The documentation of policies is current, and what it shows runs."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from headway.policies import ADMISSIONS, CASCADES, MIGRATIONS, ORDERINGS, ROUTERS, SCALERS, resolve
from headway.testing import (
    check_admission,
    check_cascade,
    check_migration,
    check_ordering,
    check_router,
    check_scaler,
)

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "my_router.py"
TUTORIAL = (ROOT / "docs" / "write-a-policy.md").read_text(encoding="utf-8")


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where pickle looks for its classes
    spec.loader.exec_module(module)
    return module


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TUTORIAL, re.DOTALL)


@pytest.mark.ci
def test_the_list_of_policies_is_current() -> None:
    page = load(ROOT / "docs" / "generate_policies.py").page()
    assert (ROOT / "docs" / "policies.md").read_text(encoding="utf-8") == page, "run `python docs/generate_policies.py`"
    assert all(f"| `{name}`" in page for name in (*ROUTERS, *ORDERINGS, *MIGRATIONS, *ADMISSIONS, *CASCADES, *SCALERS))


def test_the_tutorial_shows_the_example() -> None:
    assert EXAMPLE.read_text(encoding="utf-8") in blocks("python")


@pytest.mark.ci
def test_the_example_passes_the_conformance_checks() -> None:
    check_router(load(EXAMPLE).LongPromptsApart)


def test_the_tutorial_s_own_test_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    load(EXAMPLE)
    (block,) = (block for block in blocks("python") if "check_router(" in block)
    names: dict[str, Any] = {}
    exec(block, names)
    names["test_my_router"]()


@pytest.mark.parametrize(
    ("verb", "name", "check"),
    [
        ("taken_blocks", "MostFreeBlocks", check_router),
        ("bounds", "LeastProduct", check_router),
        ("rank", "ShortPromptsFirst", check_ordering),
        ("at_phase", "AnswerWhereFewest", check_migration),
        ("release", "BatchWhenIdle", check_admission),
        ("accept", "TwiceAtMost", check_cascade),
        ("scale", "OneForEachHundred", check_scaler),
    ],
)
def test_the_tutorial_s_other_policies_pass_the_conformance_checks(verb: str, name: str, check: Any) -> None:
    (block,) = (block for block in blocks("python") if f"def {verb}" in block)
    module = ModuleType(f"tutorial_{verb}")
    exec(block, module.__dict__)
    sys.modules[module.__name__] = module  # where pickle looks for its classes
    check(getattr(module, name))


def test_the_tutorial_s_scenario_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    (block,) = blocks("yaml")
    choices = [resolve.router(spec) for spec in yaml.safe_load(block)["policies"]["routing"]]
    assert [str(c) for c in choices] == [
        "my_router:LongPromptsApart(long_prompt_tokens=4000)",
        "least-loaded",
    ]


def test_registering_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = (block for block in blocks("python") if block.startswith("ROUTERS"))
    (line,) = re.findall(r'^    "(.+)": (\w+),$', block, re.MULTILINE)
    name, class_name = line
    monkeypatch.setitem(ROUTERS, name, getattr(load(EXAMPLE), class_name))
    assert type(resolve.router({"name": name, "long_prompt_tokens": 9})()).__name__ == class_name


@pytest.mark.ci
def test_the_tutorial_s_command_runs() -> None:
    (command,) = blocks("bash")
    words = shlex.split(command)
    assert words[0] == "headway"
    start = [sys.executable, "-c", "import sys; from headway.cli import main; sys.exit(main())", *words[1:]]
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(start, cwd=EXAMPLE.parent, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "LongPromptsApart" in done.stdout and "least-loaded" in done.stdout
