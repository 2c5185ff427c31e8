"""Python in the documentation that is marked to run does run, and prints what stands below it."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python run\n(.*?)^```$(?:\n\n```text output\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
EXAMPLES = [
    pytest.param(match[1], match[2], id=f"{page.name}:{number}")
    for page in sorted(ROOT.glob("docs/*.md"))
    for number, match in enumerate(BLOCK.finditer(page.read_text(encoding="utf-8")))
]
TREE = re.compile(r"^```text tree\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize(("code", "expected"), EXAMPLES)
def test_examples_run(code: str, expected: str | None) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = StringIO()
    with redirect_stdout(printed):
        exec(compile(code, "<documentation>", "exec"), names)
    assert printed.getvalue() == (expected or "")


def test_the_tree_of_how_it_works_names_files_that_exist() -> None:
    found = TREE.search((ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8"))
    assert found is not None
    folder = package = ROOT / "src" / "headway"
    for entry in found[1].splitlines():
        if not entry.startswith(" "):
            name = entry.split()[0]
            folder = package / name if name.endswith("/") else package
        for name in re.findall(r"\b[\w/]+(?:\.py|/)(?=[\s:;,]|$)", entry):
            assert (folder / name).exists() or (package / name).exists(), f"{folder / name}"
