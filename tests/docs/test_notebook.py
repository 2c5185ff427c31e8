"""The notebook in examples/: it was executed, it is short, and it still runs."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.cli import main

NOTEBOOK = Path(__file__).parents[2] / "examples" / "compare_routers.ipynb"
CELLS: list[dict[str, Any]] = [
    cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"
]


def test_it_is_short_and_executed() -> None:
    lines = [line for cell in CELLS for line in "".join(cell["source"]).splitlines() if line.strip()]
    assert len(lines) < 30
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    shown = json.dumps([cell["outputs"] for cell in CELLS])
    assert "image/svg+xml" in shown and "95% intervals" in shown and '"error"' not in shown


@pytest.mark.slow
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(SVG=lambda path: path))
    monkeypatch.setitem(
        sys.modules, "IPython", SimpleNamespace(display=sys.modules["IPython.display"], version_info=(9, 0))
    )
    names: dict[str, Any] = {"__name__": "notebook"}
    for cell in CELLS:
        code = []
        for line in "".join(cell["source"]).splitlines():
            if line.startswith("!headway"):
                assert main(shlex.split(line.partition("#")[0])[1:]) == 0
            else:
                code.append(line.replace("[10, 20, 30, 40, 50]", "[10, 40]").replace("seeds=5", "seeds=2"))
        exec("\n".join(code), names)
    assert (tmp_path / "out" / "ttft_over_load.svg").read_text().count("<svg") == 1
