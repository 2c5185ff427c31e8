"""The example of docs/serve.md runs as it stands, on ports that are free."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("httptools")
PAGE = (Path(__file__).parent.parent / "docs" / "serve.md").read_text(encoding="utf-8")


def _free_ports(num: int) -> list[int]:
    held = [socket.socket() for _ in range(num)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def test_the_example_runs(tmp_path: Path) -> None:
    fleet = re.findall(r"^```yaml\n(fleet:.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[0]
    script = re.findall(r"^```bash\n(headway emulate.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[0]
    for port, free in zip(("8001", "8002", "8080"), _free_ports(3), strict=True):
        fleet, script = fleet.replace(port, str(free)), script.replace(port, str(free))
    (tmp_path / "fleet.yaml").write_text(fleet)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    bash = subprocess.Popen(
        ["bash", "-c", script], cwd=tmp_path, env={**os.environ, "PATH": path}, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert bash.stdout is not None
    try:
        with bash.stdout:
            written = []
            for line in bash.stdout:
                written.append(line.decode())
                if "[DONE]" in written[-1]:
                    break
    finally:
        os.killpg(bash.pid, signal.SIGKILL)
        bash.wait()
    text = "".join(written)
    assert "headway serves fleet on http://127.0.0.1:" in text
    assert sum('"delta"' in line for line in written) >= 10
