"""Workers that cannot start: the gateway says why, and ends after some tries."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import serving
from headway.gateway.workers.supervisor import MAX_FAILED_STARTS

pytest.importorskip("httptools")

BROKEN = """
import os, sys
if "headway.gateway.workers.worker" in sys.orig_argv:
    {how}
"""
RAISES = """
    from headway.gateway.relay.quarantine import Quarantine
    def fail(self, keep_s):
        raise OSError("there is no room for a quarantine")
    Quarantine.__init__ = fail
"""


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("how", "why"), [("os._exit(9)", "status 9"), (RAISES.strip(), "no room for a quarantine")])
@pytest.mark.parametrize("restarts", ["0", "3"])
def test_a_gateway_whose_workers_cannot_start_ends_with_the_reason(
    how: str, why: str, restarts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN.format(how=how))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    path = serving.fleet_file(tmp_path, ["http://127.0.0.1:9"])
    made = serving.gateway(path, "--workers", "2", "--restarts", restarts)
    try:
        _, written = made.process.communicate(timeout=3 * serving.PATIENCE_S)
    finally:
        made.close()
    assert made.process.returncode == 2
    last = written.decode().strip().splitlines()[-1]
    assert "cannot be started" in last and why in last and f"after {MAX_FAILED_STARTS} tries" in last
