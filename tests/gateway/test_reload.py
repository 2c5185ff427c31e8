"""The fleet file is read again while its gateway runs, by one process and by several: nothing that streams is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import serving
from keys import ADMIN, bearer, digest
from serving import MODEL, chat, metric, send, until
from worker_fleet import children, num_in_flight, started_stream

pytest.importorskip("httptools")

SETTINGS = {"api_keys": [digest("free")], "admin_keys": [digest("root")], "scrape_period_s": 0.1}


@pytest.fixture(scope="module", params=["1", "2"])
def front(
    request: pytest.FixtureRequest, engines: list[serving.Process], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[serving.Process, Path]]:
    """A gateway in front of one engine, whose file is changed by SIGHUP only, and its file."""
    folder = tmp_path_factory.mktemp("fleet")
    path = serving.fleet_file(folder, [engines[0].url], gateway=SETTINGS)
    options = ("--workers", request.param, "--no-reload", "--decisions", str(folder / "decisions.jsonl"))
    with serving.up(serving.gateway(path, *options), 1) as made:
        yield made, path


def _change(
    path: Path, gateway: dict[str, Any] | None = None, pool: dict[str, Any] | None = None, **sections: Any
) -> None:
    """Write the file anew, with some of its values changed; a section that is None goes."""
    data = yaml.safe_load(path.read_text())
    data["gateway"] |= gateway or {}
    data["fleet"][0] |= pool or {}
    data |= sections
    path.write_text(yaml.safe_dump({name: value for name, value in data.items() if value is not None}))


def _reload(made: serving.Process) -> Any:
    """Ask for a reload by the endpoint; what it answers."""
    return send(made, "/reload", method="POST", headers=ADMIN).json()


def _replica_at(made: serving.Process, engine: serving.Process) -> str:
    """The name of the gateway's replica of this engine."""
    (name,) = [
        each["name"] for each in send(made, "/workers", headers=ADMIN).json()["data"] if each["url"] == engine.url
    ]
    return str(name)


def _ready(made: serving.Process, num: int) -> None:
    until(lambda: send(made, "/health").json() == {"status": "ok", "up": num, "replicas": num})


def test_endpoints_come_and_go_without_a_lost_stream(
    front: tuple[serving.Process, Path], engines: list[serving.Process]
) -> None:
    made, path = front
    _change(path, pool={"endpoints": [each.url for each in engines]})
    assert _reload(made)["changes"] == [f"fleet: pool: {engines[1].url} is added"]
    _ready(made, 2)
    old, new = (_replica_at(made, each) for each in engines)
    streams = [started_stream(made, headers=bearer("free"), max_tokens=150) for _ in range(4)]
    assert {reply.headers["x-headway-replica"] for reply, _ in streams} == {old, new}
    _change(path, pool={"endpoints": [engines[1].url]})
    assert _reload(made)["changes"] == [f"fleet: pool: {engines[0].url} is drained and removed"]
    replies = [chat(made, headers=bearer("free"), max_tokens=2) for _ in range(4)]
    assert {reply.headers["x-headway-replica"] for reply in replies} == {new}
    for reply in replies:
        reply.close()
    for _, events in streams:
        received = list(events)
        assert received[-1] == "[DONE]" and "error" not in received[-2]
    _ready(made, 1)
    _change(path, pool={"endpoints": [engines[0].url]})
    assert len(_reload(made)["changes"]) == 2
    _ready(made, 1)


def test_keys_and_limits_change_in_all_workers(front: tuple[serving.Process, Path]) -> None:
    made, path = front
    stream = started_stream(made, headers=bearer("free"), max_tokens=100)
    new = {"sha256": digest("new"), "requests_per_minute": 40}
    _change(path, gateway={"api_keys": [new]})
    assert _reload(made)["changes"] == ["gateway: api_keys changed"]
    for _ in range(8):
        reply, refused = chat(made, headers=bearer("new"), max_tokens=1), chat(made, headers=bearer("free"))
        assert (reply.status, refused.status) == (200, 401)
        reply.close()
        refused.close()
    assert reply.headers["x-ratelimit-limit-requests"] == "40"
    assert list(stream[1])[-1] == "[DONE]"  # of a key that is gone
    _change(path, gateway={"api_keys": [{**new, "requests_per_minute": 10}]})
    _reload(made)
    until(lambda: chat(made, headers=bearer("new"), max_tokens=1).text() and True)
    reply = chat(made, headers=bearer("new"), max_tokens=1)
    assert (
        reply.headers["x-ratelimit-limit-requests"] == "10" and reply.headers["x-ratelimit-remaining-requests"] == "0"
    )
    reply.close()
    _change(path, gateway={"api_keys": [digest("free")]})
    _reload(made)


def test_a_bad_file_changes_nothing_and_says_so(front: tuple[serving.Process, Path]) -> None:
    made, path = front
    text = path.read_text()
    for bad, why in (
        (text.replace("h100", "h1000"), "h1000"),
        ("fleet: [", "expected"),
        (text.replace("api_keys", "api_kesy"), "api_kesy"),
        (text + "seed: 5\n", "restart"),
        (text + "policies: {routing: nearest-neighbour}\n", "nearest-neighbour"),
    ):
        path.write_text(bad)
        reply = send(made, "/reload", method="POST", headers=ADMIN)
        error = reply.json()["error"]
        assert reply.status == 409 and error["code"] == "reload_failed" and why in error["message"], error
        assert metric(made, "headway_reload_failed") == 1
        assert send(made, "/dashboard/data", headers=ADMIN).json()["reload"]["error"] == error["message"]
        assert chat(made, headers=bearer("free"), max_tokens=1).json()["usage"]
    path.unlink()
    made.process.send_signal(signal.SIGHUP)
    until(lambda: metric(made, "headway_reloads_total") >= 6 and "fleet.yaml" in _last_error(made))
    path.write_text(text)
    assert _reload(made)["outcome"] == "unchanged" and metric(made, "headway_reload_failed") == 0


def _last_error(made: serving.Process) -> str:
    return str((send(made, "/dashboard/data", headers=ADMIN).json()["reload"] or {}).get("error"))


def test_policies_change_with_requests_held(front: tuple[serving.Process, Path]) -> None:
    """A window of one holds requests; without it they start, in the new order."""
    made, path = front
    _change(path, policies={"routing": "round-robin", "ordering": "fcfs", "ordering_at": "gateway", "window": 1})
    changes = _reload(made)["changes"]
    assert {"policies: router changed", "policies: ordering changed", "policies: window changed"} <= set(changes)
    streams = [chat(made, headers=bearer("free"), stream=True, max_tokens=400, ignore_eos=True)]
    until(lambda: num_in_flight(made) == 1)
    answered: list[int] = []
    threads = [
        threading.Thread(
            target=lambda: answered.append(
                chat(made, headers=bearer("free"), max_tokens=2).json()["usage"]["completion_tokens"]
            )
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    until(lambda: metric(made, "headway_requests_held") == 3)
    _change(path, policies={"routing": "least-loaded", "ordering": "priority", "ordering_at": "gateway", "window": 8})
    assert "policies: ordering changed" in _reload(made)["changes"]
    for thread in threads:
        thread.join()
    assert answered == [2, 2, 2]
    assert list(streams[0].events())[-1] == "[DONE]"
    _change(path, policies=None)
    _reload(made)
    log = [json.loads(line) for line in (path.parent / "decisions.jsonl").read_text().splitlines()]
    assert any(line["what"] == "reloaded" and "policies: window changed" in line["why"] for line in log)


def test_models_come_and_go(front: tuple[serving.Process, Path], engines: list[serving.Process]) -> None:
    made, path = front
    data = yaml.safe_load(path.read_text())
    pools = [
        *data["fleet"],
        {**data["fleet"][0], "name": "other", "model": "llama-3.1-8b", "endpoints": [engines[1].url]},
    ]
    _change(path, fleet=pools)
    assert _reload(made)["changes"] == [f"fleet: other: {engines[1].url} is added"]
    _ready(made, 2)

    def status_of(model: str) -> int:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        reply = send(made, "/v1/chat/completions", body, bearer("free"))
        reply.close()
        return reply.status

    assert status_of("llama-3.1-8b") == 200 and status_of(MODEL) == 200
    assert {each["id"] for each in send(made, "/v1/models").json()["data"]} >= {"llama-3.1-8b", MODEL}
    _change(path, fleet=pools[:1])
    _reload(made)
    assert status_of("llama-3.1-8b") == 404 and status_of(MODEL) == 200
    assert send(made, "/v1/models/llama-3.1-8b").json()["error"]["code"] == "model_not_found"
    _change(path, fleet=pools)
    _reload(made)
    _ready(made, 2)
    assert status_of("llama-3.1-8b") == 200
    _change(path, fleet=pools[:1])
    _reload(made)
    _ready(made, 1)


def test_a_pool_with_other_properties_gets_new_replicas(front: tuple[serving.Process, Path]) -> None:
    made, path = front
    _, events = started_stream(made, headers=bearer("free"), max_tokens=100)
    _change(path, pool={"gpu": "a100"})
    changes = _reload(made)["changes"]
    assert len(changes) == 2 and "drained" in changes[0] and "added" in changes[1]
    assert chat(made, headers=bearer("free"), max_tokens=2).json()["usage"]
    assert list(events)[-1] == "[DONE]"
    _ready(made, 1)
    _change(path, pool={"gpu": "h100"})
    _reload(made)
    _ready(made, 1)


def test_a_changed_file_is_noticed(engines: list[serving.Process], tmp_path: Path) -> None:
    path = serving.fleet_file(tmp_path, [engines[0].url])
    with serving.up(serving.gateway(path, "--restarts", "3"), 1) as made:
        _change(path, pool={"endpoints": [each.url for each in engines]})
        _ready(made, 2)
        assert metric(made, "headway_reloads_total") == 1
        gateway = children(made.process.pid)[0]
        os.kill(gateway, signal.SIGKILL)  # the next process begins with the changed file
        until(lambda: children(made.process.pid) not in ([], [gateway]))
        serving.all_up(made, 2)
        path.write_text("nothing")
        made.wait_for("was not reloaded", "fleet.yaml")
        assert send(made, "/health").json()["up"] == 2


def test_sighup_reloads_and_ends_nothing(engines: list[serving.Process], tmp_path: Path) -> None:
    path = serving.fleet_file(tmp_path, [engines[0].url])
    with serving.up(serving.gateway(path, "--restarts", "3", "--workers", "2", "--no-reload"), 1) as made:
        _change(path, pool={"endpoints": [each.url for each in engines]})
        time.sleep(0.2)
        assert send(made, "/health").json()["replicas"] == 1
        made.process.send_signal(signal.SIGHUP)
        _ready(made, 2)
        for pid in children(children(made.process.pid)[0]):
            os.kill(pid, signal.SIGHUP)  # workers wait for the scheduler
        assert chat(made, max_tokens=1).json()["usage"]


def test_a_closed_terminal_ends_the_gateway(engines: list[serving.Process], tmp_path: Path) -> None:
    """SIGHUP of a terminal that is gone is no reload."""
    path = serving.fleet_file(tmp_path, [engines[0].url])
    ours, theirs = os.openpty()
    code = (
        "import os, fcntl, signal, termios, sys; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL);"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    command = [sys.executable, "-c", code, "-m", "headway", "serve", str(path), "--port", "0"]
    process = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    os.close(theirs)
    try:
        assert process.stdout is not None
        assert b"headway serves" in process.stdout.readline()
        until(lambda: bool(children(process.pid)))
        (gateway,) = children(process.pid)
        time.sleep(0.5)
        os.close(ours)
        process.wait(serving.PATIENCE_S)
        until(lambda: not os.path.exists(f"/proc/{gateway}"))
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
