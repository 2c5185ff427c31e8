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


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize(("code", "expected"), EXAMPLES)
def test_examples_run(code: str, expected: str | None) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = StringIO()
    with redirect_stdout(printed):
        exec(compile(code, "<documentation>", "exec"), names)
    assert printed.getvalue() == (expected or "")
