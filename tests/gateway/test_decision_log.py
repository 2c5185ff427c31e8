"""The decision log of a gateway and of a simulation: one line for each decision, with what the policy saw."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import serving
from headway.records.json_lines import BackgroundJsonLines, DroppedLines, JsonLinesFile
from serving import MODEL, chat, metric, send, until

pytest.importorskip("httptools")
ORDER = {"ordering": "priority", "ordering_at": "gateway"}


@pytest.fixture(scope="module")
def engines() -> Iterator[list[serving.Process]]:
    made = [serving.emulator(), serving.emulator()]
    with serving.closing(*made):
        yield made


def fleet(folder: Path, engines: list[serving.Process], **changes: Any) -> Path:
    return serving.fleet_file(folder, [engine.url for engine in engines], **changes)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def headers_of(reply: serving.Reply) -> dict[str, str]:
    reply.json()
    return reply.headers


def test_each_placement_is_a_line_with_what_the_policy_saw(engines: list[serving.Process], tmp_path: Path) -> None:
    path = tmp_path / "log" / "decisions.jsonl"
    file = fleet(tmp_path, engines, policies={"routing": "least-loaded", "window": 1, **ORDER})
    with serving.up(serving.gateway(file, "--decisions", str(path)), 2) as front:
        long = [
            chat(front, max_tokens=30_000, ignore_eos=True, stream=True, headers={"x-request-id": f"long-{i}"})
            for i in range(2)
        ]
        for reply in long:
            next(reply.events())
        waits = threading.Thread(target=lambda: chat(front, max_tokens=2, headers={"x-request-id": "waits"}).json())
        waits.start()
        until(lambda: metric(front, "headway_requests_held") == 1)
        long[1].close()
        waits.join()
        long[0].close()
        front.stop()
    found = {line["request"]: line for line in lines(path)}
    assert list(found) == ["long-0", "long-1", "waits"]
    first, second, last = found.values()
    assert {line["what"] for line in found.values()} == {"placed"}
    assert all(line["model"] == MODEL and line["tier"] == 0 and line["phase"] == "answering" for line in found.values())
    assert [each["in_flight"] for each in first["replicas"]] == [0, 0] and first["held_s"] == 0
    assert [each["replica"] for each in second["replicas"]] == [1 - first["choice"]], "the other has no room"
    assert last["held_s"] > 0 and last["why"] == "no replica has room" and last["choice"] == second["choice"]
    for line in found.values():
        assert line["choice"] in [each["replica"] for each in line["replicas"]]
        assert all(0 <= each["age_s"] < 5 and 0 <= each["kv_share"] <= 1 for each in line["replicas"])
    assert [line["time_s"] for line in found.values()] == sorted(line["time_s"] for line in found.values())


def test_a_retry_has_its_number(tmp_path: Path) -> None:
    path, bad, good = tmp_path / "decisions.jsonl", serving.emulator(), serving.emulator()
    with serving.closing(bad, good):
        front = serving.gateway(
            fleet(tmp_path, [bad, good], policies={"routing": "round-robin"}, gateway={"explain": True}),
            "--decisions",
            str(path),
        )
        with serving.closing(front):
            serving.all_up(front, 2)
            send(bad, "/emulator/failures", [500], method="PUT").text()
            wants = {"x-headway-explain": "1"}
            replies = [
                headers_of(chat(front, max_tokens=2, headers={**wants, "x-request-id": str(i)})) for i in range(2)
            ]
            assert sorted(headers["x-headway-attempts"] for headers in replies) == ["1", "2"]
            assert all(0 <= float(headers["x-headway-held-s"]) < 5 for headers in replies)
            assert [h["x-headway-replica"] for h in replies if h["x-headway-attempts"] == "2"] == ["pool/1"]
            assert "x-headway-attempts" not in headers_of(chat(front, max_tokens=2))
            front.stop()
    again = [line for line in lines(path) if line.get("attempt")]
    assert len(again) == 1 and again[0]["attempt"] == 1
    assert [each["replica"] for each in again[0]["replicas"]] == [1] and again[0]["choice"] == 1


def test_explanations_need_the_setting(engines: list[serving.Process], tmp_path: Path) -> None:
    with serving.up(serving.gateway(fleet(tmp_path, engines)), 2) as front:
        assert "x-headway-attempts" not in headers_of(chat(front, max_tokens=2, headers={"x-headway-explain": "1"}))


@pytest.mark.ci
def test_the_simulator_writes_the_same_lines_and_the_same_metrics(tmp_path: Path) -> None:
    scenario = {
        "workload": {"builtin": "chat", "num_requests": 300, "arrivals": 30},
        "fleet": [{"name": "pool", "model": MODEL, "gpu": "h100", "engine": "vllm-0.15", "replicas": 3}],
        "policies": {"routing": "least-loaded", "window": 8, **ORDER},
        "observe": {"period_s": 0.5, "delay_s": 0.1},
    }
    (tmp_path / "it.yaml").write_text(yaml.safe_dump(scenario))
    headers, plain = (
        subprocess.run(
            [sys.executable, "-m", "headway", "simulate", "it.yaml", "--json", "--no-progress", *more],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for more in (["--decisions", "decisions.jsonl"], [])
    )
    assert json.loads(headers)["results"][0]["metrics"] == json.loads(plain)["results"][0]["metrics"]
    found = lines(tmp_path / "decisions.jsonl")
    assert [line["request"] for line in sorted(found, key=lambda line: int(line["request"]))] == list(
        map(str, range(300))
    )
    held = [line for line in found if line["held_s"] > 0]
    assert held and {line["why"] for line in held} <= {"no replica has room", "others come first"}
    for line in found:
        loads = {each["replica"]: each["in_flight"] for each in line["replicas"]}
        assert loads[line["choice"]] == min(loads.values()), "least-loaded chooses the least loaded"
        assert max(loads.values()) < 8
        ages = [each["age_s"] for each in line["replicas"]]
        assert all(age is None or 0.1 <= age <= 0.6 + 1e-9 for age in ages)


def test_a_long_log_is_at_most_two_files(tmp_path: Path) -> None:
    file = JsonLinesFile(tmp_path / "log", max_bytes=100)
    for num in range(50):
        file.write(DroppedLines(num))
    file.close()
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"log", "log.1"} and all(0 < size <= 100 for size in sizes.values())
    kept = [line["num"] for name in ("log.1", "log") for line in lines(tmp_path / name)]
    assert kept == list(range(50 - len(kept), 50)), "the newest, in order"


def test_lines_that_the_disk_is_too_slow_for_are_counted(tmp_path: Path) -> None:
    class Slow(JsonLinesFile):
        may_write = threading.Event()

        def write(self, line: Any) -> None:
            self.may_write.wait(serving.PATIENCE_S)
            super().write(line)

    file = Slow(tmp_path / "log")
    behind = BackgroundJsonLines(file, max_queued=10)
    for num in range(200):
        behind.write(DroppedLines(num))
    file.may_write.set()
    behind.close()
    found = [line["num"] for line in lines(tmp_path / "log")]
    assert found[:10] == list(range(10))
    missing = found[-1]
    assert len(found) - 1 + missing == 200 and missing >= 180
