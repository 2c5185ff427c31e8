"""Local processes as replicas: scaling, restarts, failed starts, and the end of the gateway."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import processes
import serving
from gateway_in_process import Inside
from headway import records
from headway.core.errors import HeadwayError
from processes import running
from serving import chat, metric, until

pytest.importorskip("httptools")
RUNNING = "vllm:num_requests_running"
BUSY = {"name": "target-utilization", "kv_use": None, "in_flight": 2, "interval_s": 0.2, "stabilization_s": 1}


def _front(folder: Path, pool: dict[str, Any], *options: str, **changes: Any) -> serving.Process:
    return serving.gateway(serving.fleet_file(folder, [], pool=pool, **changes), *options)


@pytest.mark.ci
def test_processes_scale_with_the_load(tmp_path: Path) -> None:
    pool = processes.pool(4, max_replicas=3)
    first, last = pool["processes"]["ports"]
    policies = {"scaling": BUSY, "ordering_at": "gateway"}
    front = _front(tmp_path, pool, "--records", str(tmp_path / "records"), policies=policies)
    with serving.closing(front):
        serving.all_up(front, 1)
        assert list(running(first, last)) == [first]
        streams = [chat(front, ignore_eos=True, max_tokens=20_000, stream=True) for _ in range(6)]
        serving.all_up(front, 3)
        assert len(running(first, last)) == 3, "three are wanted, and nothing is started twice while they are pending"
        logged: dict[str, list[Any]] = {}
        threads = []
        for word in ("one", "other"):
            reply = chat(front, word, ignore_eos=True, max_tokens=600, stream=True)
            where = reply.headers["x-headway-replica"]
            assert where in ("pool/1", "pool/2")
            read = lambda reply=reply, word=word: logged.update({word: list(reply.events())})  # noqa: E731
            threads.append(threading.Thread(target=read))
            threads[-1].start()
        for stream in streams:
            stream.close()
        until(lambda: len(running(first, last)) == 1)
        for thread in threads:
            thread.join(60)
        left = SimpleNamespace(port=next(iter(running(first, last))))
        for word, events in logged.items():
            alone = chat(left, word, ignore_eos=True, max_tokens=600).json()["choices"][0]["message"]["content"]
            assert serving.answer_text(events).split() == alone.split() and len(alone.split()) == 600
        until(lambda: serving.send(front, "/health").json() == {"status": "ok", "up": 1, "replicas": 1})
        assert chat(front, max_tokens=3).json()["usage"]["completion_tokens"] == 3
        until(lambda: metric(front, "headway_requests_in_flight") == 0)
        front.stop()
        until(lambda: not running(first, last))
    ran, _ = records.load(tmp_path / "records")
    assert [replica.origin for replica in ran.replicas] == ["initial", "new", "new"]
    for replica in ran.replicas:
        (start_s, end_s), (down_s, up_s) = replica.up[0], replica.down[0]
        assert start_s == down_s < up_s < end_s, "paid for from the start on, and of use once it was up"
    assert ran.requests["moves"].sum() >= 1, "one of the two had to leave"
    ends = sorted(replica.up[0][1] for replica in ran.replicas)
    assert ends[1] < ends[2], "two were given back"


def test_a_killed_engine_is_replaced_and_its_stream_continues(tmp_path: Path) -> None:
    pool = processes.pool(3, replicas=2)
    first, last = pool["processes"]["ports"]
    front = _front(tmp_path, pool, policies={"scaling": {**BUSY, "stabilization_s": 60}})
    with serving.closing(front):
        serving.all_up(front, 2)
        before = running(first, last)
        reply = chat(front, ignore_eos=True, max_tokens=500, stream=True)
        stream = reply.events()
        events = [next(stream) for _ in range(5)]
        there = next(pid for port, pid in before.items() if metric(SimpleNamespace(port=port), RUNNING))
        os.kill(there, signal.SIGKILL)
        events += list(stream)
        assert len(serving.answer_text(events).split()) == 500
        until(lambda: serving.send(front, "/health").json() == {"status": "ok", "up": 2, "replicas": 2})
        now = running(first, last)
        assert len(now) == 2 and len(set(now.values()) & set(before.values())) == 1
        assert f"{reply.headers['x-headway-replica']} has ended; it is restarted" in front.stop()
        until(lambda: not running(first, last))


def test_engines_do_not_outlive_a_gateway_that_is_killed(tmp_path: Path) -> None:
    pool = processes.pool(2, replicas=2)
    first, last = pool["processes"]["ports"]
    front = _front(tmp_path, pool)
    with serving.closing(front):
        serving.all_up(front, 2)
        killed = set(running(first, last).values())
        front.kill()
        again = _front(tmp_path, pool)
        with serving.closing(again):
            serving.all_up(again, 2)
            left = running(first, last)
            assert len(left) == 2 and not set(left.values()) & killed


STUBBORN = """
import http.server, json, os, pathlib, signal, subprocess, sys
folder, port = pathlib.Path(sys.argv[1]), int(sys.argv[2])
with open(folder / "starts", "a") as file:
    file.write("x")
if (folder / "starts").stat().st_size < 3:
    sys.exit(f"start {(folder / 'starts').stat().st_size} fails")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", str(port)])
(folder / "environment.json").write_text(json.dumps(dict(os.environ)))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        data = b'{"data": [{"id": "x"}]}'
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_a_failed_start_is_repeated_and_an_engine_that_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all its children; and it has seen nothing of the gateway's environment that it was not to see."""
    monkeypatch.setenv("SOME_SECRET", "hush")
    monkeypatch.setenv("TOLD", "yes")
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    (tmp_path / "logs").mkdir()
    how = {
        "command": [sys.executable, str(tmp_path / "stubborn.py"), str(tmp_path), "{port}"],
        "env": {"CUDA_VISIBLE_DEVICES": "{gpus}"},
        "keep_env": ["TOLD"],
        "stop_s": 0.3,
        "log": "logs",
    }
    pool = processes.pool(1, processes=how, tp=2, api="openai")
    first, last = pool["processes"]["ports"]
    front = _front(tmp_path, pool)
    with serving.closing(front):
        serving.all_up(front, 1)
        assert (tmp_path / "starts").read_text() == "xxx"
        assert len(running(first, last)) == 1
        seen = json.loads((tmp_path / "environment.json").read_text())
        assert seen["CUDA_VISIBLE_DEVICES"] == "0,1" and seen["TOLD"] == "yes" and "SOME_SECRET" not in seen
        written = front.stop()
        assert "pool/0 has ended; it is restarted" in written and "pool/1 has ended" in written
        assert not running(first, last)
    log = (tmp_path / "logs" / f"pool-{first}.log").read_text()
    assert "start 1 fails" in log and "ended with status 1" in log and "start 2 fails" in log


def test_failed_starts_leave_no_records_and_a_bounded_number_of_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempts go on as long as the gateway runs."""
    monkeypatch.setattr("headway.gateway.fleet.processes.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("headway.gateway.fleet.processes.LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr("headway.gateway.fleet.membership.MAX_FAILED_STARTS", 3)
    starts = tmp_path / "starts"
    how = {"command": ["sh", "-c", f"echo {{port}} >> {starts}; exit 1"]}

    def write(folder: Path, urls: list[str], **sections: Any) -> Path:
        return serving.fleet_file(folder, [], pool=processes.pool(1, processes=how), **sections)

    inside = Inside(tmp_path, 0, write)
    try:
        inside.run(inside.until(lambda: starts.exists() and len(starts.read_text().split()) > 12))
        gateway = inside.gateway
        assert len(gateway.replicas) == len(gateway.driver.replicas) <= 6
        assert [replica.id for replica in gateway.replicas] == list(range(len(gateway.replicas)))
        assert len(gateway.fleet.records()) <= 1, "at most the present attempt"
    finally:
        inside.close()


def test_an_engine_that_is_not_healthy_in_time_is_restarted(tmp_path: Path) -> None:
    how = {"command": [sys.executable, "-c", "import time; time.sleep(1000)", "{port}"], "ready_s": 0.3}
    pool = processes.pool(1, processes=how)
    front = _front(tmp_path, pool, gateway={"hold_s": 0.2})
    first, last = pool["processes"]["ports"]
    pids = set[int]()

    def restarted() -> bool:
        pids.update(running(first, last).values())
        return len(pids) > 1

    with serving.closing(front):
        until(restarted)
        assert serving.send(front, "/health").json()["up"] == 0
        refused = [chat(front, max_tokens=most) for most in (2, 10**9)]
        assert [(reply.status, reply.json()["error"]["code"]) for reply in refused] == [
            (503, "no_capacity"),
            (400, "context_length_exceeded"),
        ]
        assert "pool/0 was not up after 0.3 s; it is restarted" in front.stop()
        assert not running(first, last)


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        ({"processes": {"ports": [9002, 9001]}}, "processes.ports: 9002 to 9001; expected the lower one first"),
        ({"processes": {"ports": [9001, 9002]}, "replicas": 3}, "replicas: 3; expected 2 at most"),
        ({"processes": {"ports": [9001, 9002]}, "max_replicas": 3}, "max_replicas: 3; expected 2 at most"),
        ({"processes": {"command": ["sleep", "9"]}}, "has no {port}"),
        ({"processes": {"command": ["no-such-engine", "{port}"]}}, "there is no such program here"),
        ({"processes": {"log": "nowhere"}}, "nowhere is no folder"),
        ({"processes": {"prot": 1}}, "unknown key 'prot'; did you mean 'ports'?"),
        ({"endpoints": ["http://127.0.0.1:1"]}, "the pool has `endpoints`, too"),
    ],
)
def test_a_pool_that_cannot_be_started_is_refused(tmp_path: Path, pool: dict[str, Any], words: str) -> None:
    from headway import serving as composition

    path = serving.fleet_file(tmp_path, [], pool=processes.pool(2, **pool))
    with pytest.raises(HeadwayError) as error:
        composition.load(path)
    assert words in str(error.value) and str(path) in str(error.value)


FLAWED = """
import pathlib, subprocess, sys
if not pathlib.Path(sys.argv[1]).exists():
    sys.exit("something is missing")
sys.exit(subprocess.call(sys.argv[2:]))
"""


def test_a_failed_replica_is_reported_and_does_not_block_scaling(
    tmp_path: Path,
) -> None:
    """Two GPUs: one pool does not start, the other takes its GPU while it needs it, and then gives it back."""
    (tmp_path / "flawed.py").write_text(FLAWED)
    key = tmp_path / "what is missing"
    good = processes.pool(2, name="good")
    first, last = good["processes"]["ports"]
    bad = processes.pool(2, name="bad", model="llama-3.1-8b")
    command = ["llama-3.1-8b" if word == "qwen3-8b" else word for word in bad["processes"]["command"]]
    bad["processes"]["command"] = [sys.executable, str(tmp_path / "flawed.py"), str(key), *command]
    bad["processes"] |= {"tries": 2, "ports": [last + 1, last + 2]}
    path = serving.fleet_file(
        tmp_path,
        [],
        pool=good,
        policies={"scaling": BUSY, "ordering_at": "gateway"},
        gateway={"admin_keys": [hashlib.sha256(b"key").hexdigest()]},
    )
    made = yaml.safe_load(path.read_text())
    made["fleet"].append({**made["fleet"][0], **{name: value for name, value in bad.items() if name != "endpoints"}})
    made["gpu_limits"] = [{"gpu": "h100", "count": 2}]
    path.write_text(yaml.safe_dump(made))
    front = serving.gateway(path)

    def failed() -> list[Any]:
        found: list[Any] = serving.send(front, "/workers", headers={"authorization": "Bearer key"}).json()["failed"]
        return found

    with serving.closing(front):
        serving.all_up(front, 1)
        streams = [chat(front, ignore_eos=True, max_tokens=20_000, stream=True) for _ in range(6)]
        until(failed)
        assert failed() == [{"pool": "bad", "replicas": 1, "why": "has ended"}]
        assert metric(front, "headway_replicas_failed") == 1
        serving.all_up(front, 2)
        assert set(running(first, last)) == {first, last}, "the good one has both GPUs"
        for stream in streams:
            stream.close()
        until(lambda: len(running(first, last)) == 1)
        key.touch()
        serving.all_up(front, 2)
        assert chat(front, model="llama-3.1-8b", max_tokens=3).json()["usage"]["completion_tokens"] == 3
        assert failed() == [] and metric(front, "headway_replicas_failed") == 0
        written = front.stop()
        assert "bad: 2 starts have failed (has ended): the replica counts as failed" in written
