"""A gateway on a full disk, and one that is killed: what is left of its records and decisions."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

import serving
from headway import records
from serving import chat, until

pytest.importorskip("httptools")


@pytest.mark.ci
def test_records_and_decisions_go_on_after_a_full_disk_and_outlast_a_kill(tmp_path: Path) -> None:
    """No client notices; what is lost is what ended since the last part, and what the log counts as dropped."""
    engine = serving.emulator()
    path = serving.fleet_file(tmp_path, [engine.url], gateway={"records_period_s": 0.1})
    ran, decisions = tmp_path / "records", tmp_path / "decisions.jsonl"
    front = serving.gateway(path, "--records", str(ran), "--decisions", str(decisions))

    def num_recorded() -> int:
        return len(records.load(ran)[0].workload["arrival_s"]) if list((ran / "parts").glob("0*")) else 0

    def send_requests(num: int) -> None:
        for _ in range(num):
            assert chat(front, max_tokens=2).json()["usage"]["completion_tokens"] == 2

    with serving.closing(engine, front):
        serving.all_up(front, 1)
        send_requests(3)
        until(lambda: num_recorded() == 3 and decisions.stat().st_size > 0)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.prlimit(front.process.pid, resource.RLIMIT_FSIZE, (0, hard))
        send_requests(5)
        front.wait_for("records cannot be written", "decisions are dropped until it can")
        assert num_recorded() == 3
        resource.prlimit(front.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        front.wait_for("records are written again; those of 0 requests are lost", "is written again")
        send_requests(2)
        until(lambda: num_recorded() == 10)
        front.process.kill()
        front.process.wait()
        lines = [json.loads(line) for line in decisions.read_text().splitlines()]
        assert sum(1 if line["what"] == "placed" else line["num"] for line in lines) >= 8
        earlier = decisions.read_text()
        with serving.up(serving.gateway(path, "--records", str(ran), "--decisions", str(decisions)), 1) as again:
            assert chat(again, max_tokens=2).json()["usage"]["completion_tokens"] == 2
            assert "wrote 11 requests" in again.stop()
        both = decisions.read_text()
        assert both.startswith(earlier) and '"what":"placed"' in both.removeprefix(earlier)
    assert len(records.load(ran)[0].workload["arrival_s"]) == 11 and not (ran / "parts").exists()
