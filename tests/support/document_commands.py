"""Commands of documents, run as readers run them: all blocks of a page, in order, in one folder, on free ports."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def bash_blocks(page: str) -> list[str]:
    """The commands in a page of the repository."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def run_blocks(blocks: Sequence[str], folder: Path, programs: Path) -> subprocess.CompletedProcess[str]:
    """Run blocks with an environment's programs. Targets of make are only looked up: they set up an environment."""
    script = "\n".join(blocks).replace("make ", f"make -n -C '{ROOT}' ").replace("examples/", f"{ROOT}/examples/")
    held = []
    for port in sorted(set(re.findall(r"\b80\d\d\b", script))):
        held.append(socket.socket())
        held[-1].bind(("127.0.0.1", 0))
        script = re.sub(rf"\b{port}\b", str(held[-1].getsockname()[1]), script)
    for each in held:
        each.close()
    script = "set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n" + script
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done


def files_in(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
