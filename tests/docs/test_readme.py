"""The commands of the README, from the source tree and from an installed wheel."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import engines

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
WRITTEN = {"out/requests.csv", "out/plan.yaml", "chat.yaml", "out/chat.html", "out/chat.json"}
"""Files that the blocks write without a real engine."""


def run_readme(folder: Path, programs: Path) -> None:
    """Run all blocks in order in an empty folder. Targets of make are only looked up: they set up an environment."""
    assert len(BLOCKS) >= 5
    blocks = [block for block in BLOCKS if "tiny_llama" not in block or not engines.NO_LLAMA]
    script = "\n".join(blocks).replace("make ", f"make -n -C '{ROOT}' ").replace("examples/", f"{ROOT}/examples/")
    for port in ("8001", "8002", "8080"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            script = re.sub(rf"(:|--port |llama.py ){port}\b", rf"\g<1>{free.getsockname()[1]}", script)
    script = "set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n" + script
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    made = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    expected = set(WRITTEN)
    if len(blocks) == len(BLOCKS):
        recorded = {name for name in made if re.fullmatch(r"ran/\w+\.parquet", name)}
        expected |= {"fleet.yaml", "ask.py", "ran/decisions.jsonl", *recorded}
        words = re.search("^([A-J][a-j]{2}){1000}$", done.stdout, re.MULTILINE)
        assert "ran/requests.parquet" in recorded and words is not None
        assert " is down: " in done.stderr, "one engine was killed, and the answer has its 1,000 words"
    assert made == expected


def test_every_command_of_the_readme_runs(tmp_path: Path) -> None:
    run_readme(tmp_path, Path(sys.executable).parent)


def test_every_command_of_the_readme_runs_from_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an environment of its own, with the extras that the README's commands need and no other package."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
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
