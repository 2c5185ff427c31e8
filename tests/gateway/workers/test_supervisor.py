"""Several workers as one gateway: its counts, limits, queues and records, and the death of its processes."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import serving
from headway.gateway.relay.request import CHAT
from headway.gateway.relay.request_reader import read_request as read
from headway.records.parquet import load
from keys import ADMIN, bearer, digest
from serving import Reply, answer_text, chat, metric, send, until
from worker_fleet import (
    LONG,
    gateway_with_workers,
    is_alive,
    num_at_engines,
    num_in_flight,
    started_stream,
    wait_until_counts_agree,
    worker_pids,
)

pytest.importorskip("httptools")
FREE, FEW = bearer("free"), bearer("few")
FEW_A_MINUTE = 6


@pytest.fixture(scope="module")
def front(engines: list[serving.Process], tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Process]:
    keys = [digest("free"), {"sha256": digest("few"), "requests_per_minute": FEW_A_MINUTE}]
    settings = {"api_keys": keys, "admin_keys": [digest("root")], "batches": {}}
    path = serving.fleet_file(
        tmp_path_factory.mktemp("front"),
        [each.url for each in engines],
        gateway=settings,
        policies={"routing": "session-affinity", "admission": {"name": "queue-manager", "interval_s": 0.05}},
    )
    made = gateway_with_workers(path, 4)
    with serving.closing(made):
        serving.all_up(made, 2)
        yield made


def _status(front: serving.Process, path: str = "", headers: dict[str, str] | None = None, **options: Any) -> int:
    reply = send(front, path, headers=headers) if path else chat(front, headers=headers, **options)
    reply.close()
    return reply.status


# Counts.


def test_counts_agree_with_the_engines_however_clients_leave(
    front: serving.Process, engines: list[serving.Process]
) -> None:
    before = metric(front, "headway_requests_total")
    num_clients, num_each = 10, 6

    def one(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(num_each):
            kind = rng.random()
            if kind < 0.3:
                assert chat(front, headers=FREE, max_tokens=rng.randint(1, 20)).json()["choices"]
                continue
            reply = chat(front, headers=FREE, stream=True, max_tokens=60)
            events = reply.events()
            for _ in range(rng.randint(0, 40) if kind < 0.8 else 1000):
                if next(events, None) is None:
                    break
            reply.close()

    threads = [threading.Thread(target=one, args=(seed,)) for seed in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until_counts_agree(front, engines, 0)
    assert metric(front, "headway_requests_total") - before == num_clients * num_each
    streams = [started_stream(front, FREE) for _ in range(9)]
    wait_until_counts_agree(front, engines, 9)
    for reply, _ in streams[:4]:
        reply.close()
    wait_until_counts_agree(front, engines, 5)
    for reply, _ in streams[4:]:
        reply.close()
    wait_until_counts_agree(front, engines, 0)


def test_a_killed_worker_ends_only_its_own_streams(front: serving.Process, engines: list[serving.Process]) -> None:
    """Its requests are no longer in flight, another one takes its place, and the others' streams go on."""
    streams = [started_stream(front, FREE, max_tokens=400) for _ in range(12)]
    wait_until_counts_agree(front, engines, 12)
    before = worker_pids(front)
    os.kill(before[0], signal.SIGKILL)
    ended: list[bool] = []

    def finish(events: Iterator[Any]) -> None:
        came = [None]
        with suppress(http.client.HTTPException, OSError):
            came += events
        ended.append(came[-1] == "[DONE]")

    threads = [threading.Thread(target=finish, args=(events,)) for _, events in streams]
    for thread in threads:
        thread.start()
    until(lambda: len(worker_pids(front)) == 4 and before[0] not in worker_pids(front))
    for _ in range(12):  # those that come to its socket are served
        assert chat(front, headers=FREE, max_tokens=2).json()["choices"]
    for thread in threads:
        thread.join()
    for reply, _ in streams:
        reply.close()
    assert len(ended) == 12 and any(ended)
    wait_until_counts_agree(front, engines, 0)
    assert send(front, "/health").json()["up"] == 2


def test_the_scheduler_moves_a_workers_streams(front: serving.Process, engines: list[serving.Process]) -> None:
    streams = [started_stream(front, {**FREE, "x-session-id": f"moves-{i}"}, max_tokens=300) for i in range(6)]
    assert send(front, "/workers/0/drain", b"", ADMIN).json()["status"] == "draining"
    until(lambda: send(front, "/workers/0", headers=ADMIN).json()["empty"])
    until(lambda: num_at_engines(engines[:1]) == 0)
    whole = answer_text(list(chat(front, headers=FREE, stream=True, max_tokens=300, ignore_eos=True).events()))
    for _, events in streams:
        rest = list(events)
        assert rest[-1] == "[DONE]" and whole.endswith(answer_text(rest))
    assert send(front, "/workers/0/undrain", b"", ADMIN).json()["status"] == "up"
    wait_until_counts_agree(front, engines, 0)


# Limits and queues.


def test_a_keys_limit_holds_over_all_workers(front: serving.Process) -> None:
    began_s = time.monotonic()
    statuses = [_status(front, headers=FEW, max_tokens=1) for _ in range(30)]
    most = FEW_A_MINUTE + (time.monotonic() - began_s) * FEW_A_MINUTE / 60
    assert FEW_A_MINUTE <= statuses.count(200) <= most and statuses.count(429) == 30 - statuses.count(200)
    assert _status(front, headers={"Authorization": "Bearer nobody"}) == 401
    assert _status(front, headers=FREE, max_tokens=1) == 200


def test_a_session_stays_at_one_replica_over_all_workers(
    front: serving.Process, engines: list[serving.Process]
) -> None:
    """An open stream of each session keeps its replica busy, so that the next session begins at the other one."""
    wait_until_counts_agree(front, engines, 0)
    places = {}
    streams = []
    for i in range(4):
        headers = {**FREE, "x-session-id": f"session {i}"}
        streams.append(started_stream(front, headers))
        places[i] = streams[-1][0].headers["x-headway-replica"]
        wait_until_counts_agree(front, engines, i + 1)
    for i, place in places.items():
        headers = {**FREE, "x-session-id": f"session {i}"}
        replies = [chat(front, headers=headers, max_tokens=1) for _ in range(8)]
        assert all(reply.json()["choices"] for reply in replies)
        assert {reply.headers["x-headway-replica"] for reply in replies} == {place}
    assert sorted(places.values()) == ["pool/0", "pool/0", "pool/1", "pool/1"]
    for reply, _ in streams:
        reply.close()
    wait_until_counts_agree(front, engines, 0)


def test_workers_do_not_load_numpy(front: serving.Process) -> None:
    """It would take a quarter of a worker's memory and of its start."""
    assert _status(front, headers=FREE, max_tokens=2) == 200
    for pid in worker_pids(front):
        loaded = Path(f"/proc/{pid}/maps").read_text()
        assert "httptools" in loaded and "numpy" not in loaded


def test_sessions_and_prefixes_have_the_same_numbers_in_every_process() -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "ab" * 2000}]}).encode()
    script = f"""
from headway.gateway.relay.request import CHAT
from headway.gateway.relay.request_reader import read_request
made = read_request(CHAT, {body!r}, {{"x-session-id": "me"}})
print(made.features(0.0).session_id, [segment.id for segment in made.prefix()])"""
    outputs = [subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout for _ in range(2)]
    made = read(CHAT, body, {"x-session-id": "me"})
    here = f"{made.features(0.0).session_id} {[segment.id for segment in made.prefix()]}\n".encode()
    assert outputs == [here, here] and len(made.prefix()) == 3


def test_the_hold_queue_is_ordered_over_all_workers(engines: list[serving.Process], tmp_path: Path) -> None:
    policies = {"routing": "least-loaded", "ordering": "priority", "ordering_at": "gateway", "window": 1}
    path = serving.fleet_file(tmp_path, [engines[0].url], policies=policies)
    log = tmp_path / "decisions.jsonl"
    front = gateway_with_workers(path, 2, "--decisions", str(log))
    with serving.closing(front):
        serving.all_up(front, 1)
        blocker, _ = started_stream(front)
        tiers = [i % 3 for i in range(18)]
        random.Random(5).shuffle(tiers)
        threads = []
        for i, tier in enumerate(tiers):
            options = {"priority": tier, "max_tokens": 2}
            threads.append(threading.Thread(target=lambda options: chat(front, **options).json(), args=(options,)))
            threads[-1].start()
            until(lambda: metric(front, "headway_requests_held") == i + 1)  # noqa: B023
        assert num_in_flight(front) == 1
        blocker.close()
        for thread in threads:
            thread.join()
        assert front.stop() is not None
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    placed = [line["tier"] for line in lines if line["what"] == "placed"][1:]
    assert placed == sorted(tiers)


def test_requests_time_out_at_a_replica_and_in_the_hold_queue(engines: list[serving.Process], tmp_path: Path) -> None:
    """The engine is told to abort, and there is room for the next one."""
    policies = {"ordering_at": "gateway", "window": 1}
    path = serving.fleet_file(tmp_path, [engines[0].url], policies=policies, gateway={"timeout_s": 1.0})
    front = gateway_with_workers(path, 2)
    with serving.closing(front):
        serving.all_up(front, 1)
        _, events = started_stream(front)
        assert _status(front, max_tokens=4000, ignore_eos=True) == 504
        last = list(events)[-2:]
        assert last[0]["error"]["code"] == "timeout" and last[1] == "[DONE]"
        wait_until_counts_agree(front, engines[:1], 0)
        assert _status(front, max_tokens=2) == 200


# Who dies, and who stops.


def test_only_streams_survive_the_scheduler(engines: list[serving.Process], tmp_path: Path) -> None:
    front = gateway_with_workers(serving.fleet_file(tmp_path, [engines[0].url]), 2)
    with serving.closing(front):
        serving.all_up(front, 1)
        streams = [started_stream(front, max_tokens=300) for _ in range(6)]
        workers = worker_pids(front)
        front.kill()
        for _, events in streams:
            assert list(events)[-1] == "[DONE]"
        until(lambda: not any(is_alive(pid) for pid in workers))
        with pytest.raises(OSError):
            chat(front)
        until(lambda: num_at_engines(engines[:1]) == 0)


@pytest.mark.ci
def test_a_stream_survives_its_engine_and_the_scheduler_records_all_requests(tmp_path: Path) -> None:
    engines = [serving.emulator(), serving.emulator()]
    path, ran = serving.fleet_file(tmp_path, [each.url for each in engines]), tmp_path / "ran"
    front = gateway_with_workers(path, 2, "--records", str(ran))
    with serving.closing(front, *engines):
        serving.all_up(front, 2)
        streams = [chat(front, stream=True, max_tokens=150, ignore_eos=True) for _ in range(8)]
        iterators = [reply.events() for reply in streams]
        texts = [answer_text([next(events) for _ in range(5)]) for events in iterators]
        engines[0].kill()
        rests = [list(events) for events in iterators]
        assert all(rest[-1] == "[DONE]" for rest in rests)
        whole = answer_text(list(chat(front, stream=True, max_tokens=150, ignore_eos=True).events()))
        assert {text + answer_text(rest) for text, rest in zip(texts, rests, strict=True)} == {whole}
        assert {reply.headers["x-headway-replica"] for reply in streams} == {"pool/0", "pool/1"}
        until(lambda: num_in_flight(front) == num_at_engines(engines[1:]) == 0)
        front.stop()
    records, _ = load(ran)
    assert len(records.requests["request"]) == len(records.workload["arrival_s"]) == 9
    assert list(records.workload["output_tokens"]) == [150] * 9
    assert (records.workload["arrival_s"][1:] >= records.workload["arrival_s"][:-1]).all()
    assert sorted(records.requests["attempts"])[-1] == 2


def test_streams_drain_at_shutdown_and_connections_are_encrypted(
    engines: list[serving.Process], tmp_path: Path
) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "1"]
    subprocess.run([*map(str, command), "-subj", "/CN=localhost"], check=True, capture_output=True)
    path = serving.fleet_file(tmp_path, [engines[0].url])
    front = gateway_with_workers(path, 2, "--certfile", str(cert), "--keyfile", str(key))
    trusting = ssl.create_default_context(cafile=str(cert))
    trusting.check_hostname = False

    def tls_request(method: str, where: str, body: Any = None) -> Reply:
        connection = http.client.HTTPSConnection("127.0.0.1", front.port, timeout=20, context=trusting)
        connection.request(method, where, None if body is None else json.dumps(body))
        return Reply(connection)

    with serving.closing(front):
        until(lambda: tls_request("GET", "/health").json()["up"] == 1)
        body = {"model": serving.MODEL, "messages": [{"role": "user", "content": "hi"}], **LONG, "max_tokens": 200}
        events = tls_request("POST", CHAT, body).events()
        next(events)
        workers = worker_pids(front)
        front.process.send_signal(signal.SIGTERM)
        assert list(events)[-1] == "[DONE]"
        front.stop()
        assert not any(is_alive(pid) for pid in workers)


# One gateway, to its clients.


def test_openais_client_sees_one_gateway(front: serving.Process) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="free", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [serving.MODEL]
        messages = [{"role": "user", "content": "Tell me a story."}]
        whole = client.chat.completions.create(model=serving.MODEL, messages=messages, max_tokens=20)
        parts = client.chat.completions.create(model=serving.MODEL, messages=messages, max_tokens=20, stream=True)
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        assert text == whole.choices[0].message.content and whole.usage.completion_tokens == 20
        with pytest.raises(openai.NotFoundError, match="model"):
            client.chat.completions.create(model="nothing", messages=messages)
        lines = [
            {
                "custom_id": str(i),
                "method": "POST",
                "url": CHAT,
                "body": {"model": serving.MODEL, "messages": messages, "max_tokens": 2, "user": "x" * 20_000},
            }
            for i in range(100)
        ]
        content = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("lines.jsonl", content), purpose="batch")
        assert client.files.content(file.id).read() == content
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        until(lambda: client.batches.retrieve(batch.id).status == "completed")
        done = client.batches.retrieve(batch.id)
        assert (done.request_counts.completed, done.request_counts.failed) == (100, 0)


@pytest.mark.parametrize("length", [True, False])
def test_bodies_are_proxied_to_the_scheduler_unchanged(front: serving.Process, length: bool) -> None:
    """With a length or in chunks, and answers to HEAD, to mistakes, and to who leaves in the middle."""
    form = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    form += b'--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"a" * 3_000_000
    form += b"\r\n--x--\r\n"
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=20)
    parts = [form[i : i + 70_000] for i in range(0, len(form), 70_000)]
    headers = {**FREE, "content-type": "multipart/form-data; boundary=x"}
    connection.request("POST", "/v1/files", form if length else iter(parts), headers, encode_chunked=not length)
    made = Reply(connection).json()
    assert made["bytes"] == 3_000_000
    where = f"/v1/files/{made['id']}"
    left = http.client.HTTPConnection("127.0.0.1", front.port, timeout=20)
    left.request("GET", f"{where}/content", headers=FREE)
    with left.getresponse() as response:
        assert response.read(1000) == b"a" * 1000
    left.close()
    assert send(front, f"{where}/content", headers=FREE).text() == "a" * 3_000_000
    head = send(front, f"{where}/content", headers=FREE, method="HEAD")
    assert head.headers["content-length"] == "3000000" and head.text() == ""
    assert send(front, where, headers=FREE, method="DELETE").json()["deleted"]
    assert _status(front, where, FREE) == 404 and _status(front, where) == 401
    assert _status(front, "/v1/chat/completions") == 405
