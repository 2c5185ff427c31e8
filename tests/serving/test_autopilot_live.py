"""An autopilot in front of two real llama.cpp engines and six emulated ones: advice by what they served, and a change
that is killed while it is tried and kept in the end. Nothing here depends on how fast they are."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.serving.test_autopilot import HALF, routing_of, staged

import serving
from engines import LLAMA, NO_LLAMA
from headway.autopilot.staging import Staging
from headway.records import parts
from keys import ADMIN, digest
from serving import MODEL, chat, send, until

pytest.importorskip("httptools")
pytestmark = [pytest.mark.ci, pytest.mark.skipif(NO_LLAMA, reason="pip install xllamacpp gguf")]
NUM_EMULATED, NUM_REQUESTS = 6, 340
ANSWERS = ("advice is withheld", "no change is distinguishable", "cannot be told within", "not to add")


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[list[serving.Process], list[serving.Process]]]:
    real, emulated = [LLAMA.start() for _ in range(2)], [serving.emulator() for _ in range(NUM_EMULATED)]
    with serving.closing(*real, *emulated):
        yield real, emulated


@pytest.fixture
def fleet(engines: tuple[list[serving.Process], list[serving.Process]], tmp_path: Path) -> Path:
    """The step times of the real engines are not known: they are served, and no rehearsal has them."""
    real, emulated = engines
    (tmp_path / "own.py").write_text(HALF)
    pools = [
        {
            "name": "emulated",
            "model": MODEL,
            "gpu": "h100",
            "engine": "vllm-0.15",
            "endpoints": [each.url for each in emulated],
        },
        {"name": "real", "model": "tiny-llama", "engine": "llama.cpp", "endpoints": [each.url for each in real]},
    ]
    data = {
        "fleet": pools,
        "slo": {"e2e_s": 60},
        "policies": {"routing": "round-robin"},
        "autopilot": {"allow": ["routing"], "at": None},
        "gateway": {"admin_keys": [digest("root")], "records_period_s": 0.5, "scrape_period_s": 0.5},
    }
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@contextmanager
def served(path: Path) -> Iterator[serving.Process]:
    beside = ("--records", str(path.with_name("records")), "--decisions", str(path.with_name("log.jsonl")))
    with serving.up(serving.gateway(path, "--autopilot", *beside), NUM_EMULATED + 2) as front:
        errors = front.process.stderr
        assert errors is not None
        threading.Thread(target=errors.read, daemon=True).start()  # those of the planted policy are long
        yield front


@contextmanager
def clients(front: serving.Process) -> Iterator[None]:
    """Three for the emulated engines, and one for the real ones."""
    is_over = threading.Event()

    def ask(model: str) -> None:
        while not is_over.is_set():
            with suppress(OSError):
                chat(front, max_tokens=2, model=model).text()

    threads = [threading.Thread(target=ask, args=(model,)) for model in (MODEL, MODEL, MODEL, "tiny-llama")]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        is_over.set()
        for each in threads:
            each.join()


def state(front: serving.Process) -> Any:
    return send(front, "/autopilot", headers=ADMIN).json()


def num_recorded(path: Path, model: str) -> int:
    try:
        found = parts.load(path.with_name("records"))[0]
    except Exception:  # nothing is written yet
        return 0
    return int((found.workload["model"] == found.models.index(model)).sum()) if model in found.models else 0


def test_advice_by_what_real_and_emulated_engines_served_is_an_answer(fleet: Path) -> None:
    before = fleet.read_text()
    with served(fleet) as front:
        with clients(front):
            until(lambda: num_recorded(fleet, MODEL) >= NUM_REQUESTS, 300.0)
        assert num_recorded(fleet, "tiny-llama") > 0
        send(front, "/autopilot/now", b"", ADMIN).close()
        until(lambda: state(front)["reason"] or state(front)["stage"] != "idle", 500.0)
        found = state(front)
    assert "looks for a change" in fleet.with_name("log.jsonl").read_text()
    assert found["stage"] == "staged" or any(each in found["reason"] for each in ANSWERS), found
    assert fleet.read_text() == before


def test_a_change_that_serves_all_engines_better_is_kept_after_a_kill_9(fleet: Path) -> None:
    data = yaml.safe_load(fleet.read_text())
    fleet.write_text(yaml.safe_dump(data | {"policies": {"routing": "own:Half"}}))
    staged(fleet, Staging(0.1, 0.7, 0.0, 60), "least-loaded", time.time())
    before = fleet.read_text()
    with served(fleet) as killed:
        assert state(killed)["stage"] == "staged"
        killed.kill()
    assert fleet.read_text() == before
    with served(fleet) as front:
        with clients(front):
            until(lambda: state(front)["past"], 300.0)
        found = state(front)
        for model in (MODEL, "tiny-llama"):
            assert all("choices" in chat(front, max_tokens=1, model=model).json() for _ in range(4))
    assert found["stage"] == "promoted" and found["gain"] > 0.3
    assert routing_of(fleet) == "least-loaded"
    log = [json.loads(line) for line in fleet.with_name("log.jsonl").read_text().splitlines()]
    assert any(line["what"] == "reloaded" for line in log)
