"""A night with processes: `headway serve --autopilot` asks `headway advise` by the records that it wrote itself, tries
the proposal and keeps it, although the gateway is killed in every stage. Two llama.cpp engines serve beside six
emulated ones where they are installed. Every wait is for a state, and advice that a busy machine spoils is asked for
again."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

import serving
from engines import LLAMA, NO_LLAMA
from headway.autopilot.machine import Stage
from headway.cli import main
from headway.records import parts
from headway.serving.autopilot_state import AutopilotFiles
from keys import ADMIN, digest
from serving import send, until

pytest.importorskip("httptools")
pytestmark = pytest.mark.ci
MODEL, OF_EACH = "llama-3.1-8b", 3
PROMPT, OUTPUT_TOKENS = [7 + i for i in range(150)], 12
SLO_S = 0.5
"""An L40S takes 0.35 s for an answer, and an L4 0.85 s."""
CLIENTS, PAUSE_S = 12, 0.6
OWN = """
import time
from pathlib import Path


class Waits:
    \"\"\"Holds no request. It cannot be made while the file `wait` is there.\"\"\"

    interval_s = 1.0

    def __init__(self):
        while Path(__file__).with_name("wait").exists():
            time.sleep(0.05)

    def holds(self, request):
        return False

    def release(self, view):
        return []
"""


def engine(gpu: str) -> serving.Process:
    return serving.Process("-m", "headway", "emulate", "--model", MODEL, "--gpu", gpu, "--port", "0")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Path]:
    """Half of the requests go to L4s, which answer too late; three L40S are enough for all."""
    fast, slow = ([engine(gpu) for _ in range(OF_EACH)] for gpu in ("l40s", "l4"))
    real = [] if NO_LLAMA else [LLAMA.start() for _ in range(2)]
    with serving.closing(*fast, *slow, *real):
        pools: list[dict[str, Any]] = [
            {"name": name, "model": MODEL, "gpu": gpu, "engine": "vllm-0.15", "endpoints": [each.url for each in made]}
            for name, gpu, made in (("fast", "l40s", fast), ("slow", "l4", slow))
        ]
        if real:
            own = {"name": "real", "model": "tiny-llama", "engine": "llama.cpp"}
            pools.append({**own, "endpoints": [each.url for each in real]})
        data = {
            "fleet": pools,
            "slo": {"e2e_s": SLO_S},
            "policies": {"routing": "round-robin", "admission": "own:Waits"},
            "autopilot": {"allow": ["routing"], "at": None, "records_s": 60, "judge_s": 300},
            "gateway": {"admin_keys": [digest("root")], "records_period_s": 0.5, "scrape_period_s": 0.5},
        }
        (tmp_path / "own.py").write_text(OWN)
        path = tmp_path / "fleet.yaml"
        path.write_text("# served since May\n" + yaml.safe_dump(data))
        yield path


class Night:
    """A gateway that is killed and started again, and its clients."""

    def __init__(self, path: Path) -> None:
        self._path, self._is_over, self._num_looks = path, threading.Event(), 0
        self.front = self._started()
        models = [MODEL] * CLIENTS + ([] if NO_LLAMA else ["tiny-llama"])
        self._clients = [threading.Thread(target=self._ask, args=each) for each in enumerate(models)]
        for each in self._clients:
            each.start()

    def _started(self) -> serving.Process:
        beside = [f"--{name}={self._path.with_name(name)}" for name in ("records", "decisions")]
        front = serving.gateway(self._path, "--autopilot", *beside)
        assert front.process.stderr is not None
        threading.Thread(target=front.process.stderr.read, daemon=True).start()
        return front

    def _ask(self, seed: int, model: str) -> None:
        random = Random(seed)
        while not self._is_over.is_set():
            time.sleep(random.expovariate(1 / PAUSE_S))
            body = {"model": model, "prompt": PROMPT, "max_tokens": OUTPUT_TOKENS, "stream": True}
            with suppress(OSError, HTTPException, AssertionError):  # the gateway is down
                send(self.front, "/v1/completions", body).text()

    def end(self) -> None:
        self._is_over.set()
        for each in self._clients:
            each.join()
        self.front.close()

    def state(self) -> Any:
        return send(self.front, "/autopilot", headers=ADMIN).json()

    def look(self) -> None:
        send(self.front, "/autopilot/now", b"", ADMIN).close()
        self._num_looks += 1

    def has_staged(self) -> bool:
        """Whether a change has served a pair of periods. Advice is asked for again once it came to nothing."""
        found = self.state()
        if found["stage"] == "idle" and found["reason"] and self.log().count("looks for a change") == self._num_looks:
            self.look()
        return bool(found["stage"] == "staged" and found["pairs"])

    def log(self) -> str:
        return self._path.with_name("decisions").read_text()

    def on_disk(self) -> Stage:
        return AutopilotFiles(self._path).load().state.stage

    def num_recorded(self) -> int:
        try:
            return len(parts.load(self._path.with_name("records"))[0].workload["arrival_s"])
        except Exception:  # nothing is written yet
            return 0

    def killed_when(self, true: Callable[[], Any]) -> Stage:
        """Kill the gateway once this holds, and start it again once that was looked at: the stage on disk."""
        until(true, 400.0)
        self.front.kill()
        return self.on_disk()

    def go_on(self) -> None:
        self.front.close()
        self.front = self._started()
        serving.all_up(self.front, 2 * OF_EACH + (0 if NO_LLAMA else 2))


def test_real_advice_is_promoted_although_the_gateway_is_killed_in_every_stage(
    fleet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, before, wait = AutopilotFiles(fleet), fleet.read_text(), fleet.with_name("wait")
    night = Night(fleet)
    try:
        until(lambda: night.num_recorded() > 500, 400.0)
        night.look()
        assert night.killed_when(lambda: "looks for a change" in night.log()) == "idle"
        assert fleet.read_text() == before
        night.go_on()
        night.look()
        assert night.killed_when(night.has_staged) == "staged"
        assert fleet.read_text() == before
        tried = files.load().state
        assert tried.change is not None and tried.change.predicted.low > 0.2
        night.go_on()

        until(lambda: night.state()["pairs"] > len(tried.gains), 400.0)
        wait.touch()  # a reload takes until it is gone
        assert night.killed_when(lambda: night.on_disk() == "judged") == "judged"
        judged = files.load().state
        assert judged.verdict == "promote" and judged.gains[: len(tried.gains)] == tried.gains
        assert fleet.read_text() in (before, files.path(tried.change.version).read_text())
        wait.unlink()
        night.go_on()
        until(lambda: "is judged: promote" in night.log(), 60.0)  # told again, as the killed gateway may not have

        assert night.killed_when(lambda: night.state()["past"]) == "promoted"
        after = fleet.read_text()
        night.go_on()
        found = night.state()
    finally:
        wait.unlink(missing_ok=True)
        night.end()
    assert found["stage"] == "promoted" and found["gain"] > 0.1 and found["pairs"] == len(judged.gains)
    assert after == fleet.read_text() == files.path(tried.change.version).read_text()
    routing = yaml.safe_load(after)["policies"]["routing"]
    assert after.startswith("# served since May") and found["change"] == f"routing: {routing}"
    told = [line["why"] for line in map(json.loads, night.log().splitlines()) if line["what"] == "autopilot"]
    for stage in ("staged", "judged: promote", "promoted"):
        assert any(f"is {stage}" in each for each in told), told
    capsys.readouterr()
    assert main(["autopilot", "status", str(fleet)]) == 0
    assert capsys.readouterr().out.startswith(f"promoted: {found['change']}\n")
