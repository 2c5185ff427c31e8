"""Who may ask for how much, and who may change the fleet."""

from __future__ import annotations

import datetime
import http.client
import random
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("httptools")

import serving
from headway import serving as composition
from headway.core.errors import HeadwayError
from headway.gateway.errors import ApiError
from headway.gateway.server.auth import ApiKeys, TokenBucket
from headway.gateway.settings import Key
from serving import ask, chat, metric, said, until

ADMIN = {"Authorization": "Bearer root"}


def _sum(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# Buckets.


@given(st.floats(1, 1e4), st.lists(st.tuples(st.floats(0, 30), st.floats(0, 500)), max_size=40))
def test_over_any_time_no_more_is_taken_than_a_full_bucket_and_what_flows_in(
    per_minute: float, asked: list[tuple[float, float]]
) -> None:
    """And who waits as long as it is told to is served."""
    bucket, now, taken = TokenBucket(per_minute, 0.0), 0.0, []
    for pause_s, amount in asked:
        now += pause_s
        wait_s = bucket.wait_s(amount, now)
        if wait_s > 0:
            assert bucket.wait_s(amount, now + wait_s * 0.5) > 0
            now += wait_s * (1 + 1e-9) + 1e-9
            assert bucket.wait_s(amount, now) == pytest.approx(0.0, abs=1e-6)
        if amount <= per_minute:
            bucket.withdraw(amount, now)
            taken.append((now, amount))
    for i, (start_s, _) in enumerate(taken):
        so_far = 0.0
        for end_s, amount in taken[i:]:
            so_far += amount
            assert so_far <= per_minute * (1 + (end_s - start_s) / 60) * (1 + 1e-6) + 1e-3


def test_what_was_not_used_is_given_back_and_debts_are_paid() -> None:
    now = 0.0
    keys = ApiKeys([Key(sha256=_sum("k"), tokens_per_minute=600)], lambda: now)
    caller = keys.authenticate({"authorization": "Bearer k"})
    caller.reserve(500)
    with pytest.raises(ApiError) as told:
        caller.reserve(200)
    assert (told.value.status, told.value.retry_after_s) == (429, 10)  # 100 are missing, and 10 come a second
    caller.settle(500, 100)
    caller.reserve(200)
    caller.settle(200, 900)  # more than anybody had foreseen
    with pytest.raises(ApiError) as told:
        caller.reserve(1)
    assert told.value.retry_after_s == 41  # 400 owed, and 1
    now = 41.0
    caller.reserve(1)


def test_keys_expire_after_their_last_day() -> None:
    today = datetime.datetime.now(datetime.UTC).date()
    day = datetime.timedelta(days=1)
    keys = ApiKeys([Key(sha256=_sum("old"), expires=today - day), Key(sha256=_sum("new"), expires=today + day)], float)
    keys.authenticate({"authorization": "Bearer new"})
    with pytest.raises(ApiError, match="expired"):
        keys.authenticate({"authorization": "Bearer old"})


def test_keys_come_as_openais_or_as_anthropics_clients_send_them_and_go_no_further() -> None:
    keys = ApiKeys([_sum("k")], float)
    for headers in ({"authorization": "Bearer k", "a": "b"}, {"x-api-key": "k", "a": "b"}):
        assert keys.authenticate(headers).owner == _sum("k") and headers == {"a": "b"}
    for wrong in ({}, {"authorization": "k"}, {"x-api-key": ""}, {"x-api-key": "j"}):
        with pytest.raises(ApiError):
            keys.authenticate(dict(wrong))


# In front of engines.


@pytest.fixture(scope="module")
def engines() -> Iterator[list[serving.Process]]:
    made = [serving.emulator(), serving.emulator()]
    with serving.closing(*made):
        yield made


@pytest.fixture(scope="module")
def front(engines: list[serving.Process], tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Process]:
    keys: list[Any] = [
        _sum("free"),
        {"sha256": _sum("few"), "requests_per_minute": 2},
        {"sha256": _sum("short"), "tokens_per_minute": 60},
        {"sha256": _sum("patient"), "tier": 3},
        {"sha256": _sum("late"), "expires": "2020-01-01"},
    ]
    gateway = {"api_keys": keys, "admin_keys": [_sum("root")], "body_timeout_s": 0.5}
    path = serving.fleet_file(tmp_path_factory.mktemp("fleet"), [engines[0].url], gateway=gateway)
    made = serving.gateway(path)
    with serving.closing(made):
        serving.all_up(made, 1)
        yield made


def test_each_key_has_limits_of_its_own(front: serving.Process) -> None:
    replies = [chat(front, headers=_bearer("few"), max_tokens=1) for _ in range(3)]
    told = [(reply.status, reply.headers.get("retry-after")) for reply in replies]
    error = replies[2].json()["error"]
    assert told == [(200, None), (200, None), (429, "30")]
    assert error["type"] == "rate_limit_error" and error["code"] == "rate_limit_exceeded"
    assert chat(front, headers=_bearer("free"), max_tokens=1).json()["usage"]
    for reply in replies[:2]:
        reply.json()


def test_tokens_count_as_used_not_as_asked_for(front: serving.Process) -> None:
    """One request may take 60 at most and takes 5: then others fit; 40 at once do not."""
    for _ in range(3):
        assert chat(front, "a", headers=_bearer("short"), max_tokens=3).json()["usage"]["completion_tokens"] == 3
    reply = chat(front, "a", headers=_bearer("short"), max_tokens=59)
    assert reply.status == 429 and "tokens per minute" in reply.json()["error"]["message"]
    assert chat(front, "a", headers=_bearer("short"), max_tokens=3).json()["usage"]


def test_a_key_has_a_most_urgent_tier(front: serving.Process) -> None:
    for tier in (0, 2, 7):
        chat(front, headers=_bearer("patient"), max_tokens=1, priority=tier).json()
    page = ask(front, "/metrics").text()
    finished = 'headway_requests_total{{model="qwen3-8b",pool="pool",tier="{}",outcome="finished"}}'
    assert f"{finished.format(3)} 2" in page and f"{finished.format(7)} 1" in page
    assert finished.format(2) not in page


def test_expired_and_admin_keys_do_not_serve(front: serving.Process) -> None:
    assert chat(front, headers=_bearer("late")).json()["error"]["code"] == "expired_api_key"
    assert chat(front, headers=ADMIN).json()["error"]["code"] == "invalid_api_key"


def test_a_body_that_does_not_come_is_not_waited_for(front: serving.Process) -> None:
    with socket.create_connection(("127.0.0.1", front.port), timeout=serving.PATIENCE_S) as made:
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer free\r\nContent-Length: 99\r\n\r\n"
        )
        made.sendall(head + b'{"model"')
        assert made.recv(4096).startswith(b"HTTP/1.1 408")


def test_headers_without_end_are_refused(front: serving.Process) -> None:
    """Whether there are many, or one goes on and on; what fits is served, also twice on one connection."""
    for filler in (b"X-%d: y\r\n", b"%d"):
        with socket.create_connection(("127.0.0.1", front.port), timeout=serving.PATIENCE_S) as made:
            answer = b""
            with suppress(ConnectionError):  # it closes while we go on
                made.sendall(b"GET /version HTTP/1.1\r\nHost: h\r\nX: ")
                for i in range(30_000):
                    made.sendall(filler % i)
            with suppress(ConnectionError):
                answer = made.recv(4096)
            assert answer.startswith(b"HTTP/1.1 431") or not answer
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=serving.PATIENCE_S)
    for _ in range(2):
        connection.request("GET", "/version", headers={"X-Long": "x" * 40_000})
        with connection.getresponse() as answered:
            assert answered.status == 200 and answered.read()
    connection.close()


# The fleet, as it changes.


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/workers", None), ("POST", "/workers", {"pool": "pool", "url": "http://127.0.0.1:9"}),
        ("GET", "/workers/0", None), ("DELETE", "/workers/0", None), ("POST", "/workers/0/drain", {}),
    ],
)  # fmt: skip
def test_only_admins_see_and_change_workers(front: serving.Process, method: str, path: str, body: Any) -> None:
    for headers in ({}, _bearer("free"), {"Authorization": "root"}):
        assert ask(front, path, body, headers, method).json()["error"]["code"] == "invalid_api_key"


def _workers(front: serving.Process) -> dict[int, dict[str, Any]]:
    return {each["id"]: each for each in ask(front, "/workers", headers=ADMIN).json()["data"]}


def _admin(front: serving.Process, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    reply = ask(front, path, body, ADMIN, method)
    return reply.status, reply.json()


def test_without_admin_keys_there_is_nothing_to_see(engines: list[serving.Process], tmp_path: Path) -> None:
    made = serving.gateway(serving.fleet_file(tmp_path, [engines[0].url]))
    with serving.closing(made):
        assert _admin(made, "GET", "/workers")[0] == 404


def test_workers_come_are_drained_and_go_without_a_stream_noticing(
    engines: list[serving.Process], tmp_path: Path
) -> None:
    made = serving.gateway(serving.fleet_file(tmp_path, [engines[0].url], gateway={"admin_keys": [_sum("root")]}))
    with serving.closing(made):
        serving.all_up(made, 1)
        straight = chat(engines[0], max_tokens=400, ignore_eos=True).json()["choices"][0]["message"]["content"]
        reply = chat(made, max_tokens=400, ignore_eos=True, stream=True)
        events = reply.events()
        seen = [next(events) for _ in range(5)]
        status, added = _admin(made, "POST", "/workers", {"pool": "pool", "url": engines[1].url})
        assert status == 201 and added["id"] == 1
        until(lambda: _workers(made)[1]["status"] == "up")
        assert _workers(made)[0]["in_flight"] == 1
        assert _admin(made, "POST", "/workers/0/drain", {})[1]["status"] == "draining"
        until(lambda: _workers(made)[0]["empty"])
        assert _workers(made)[1]["in_flight"] == 1, "the stream has moved"
        assert chat(made, max_tokens=1).json() and metric(engines[0], "vllm:num_requests_running") == 0
        assert _admin(made, "POST", "/workers/0/undrain", {})[1]["status"] == "up"
        assert _admin(made, "DELETE", "/workers/1?force=true")[0] == 202
        until(lambda: set(_workers(made)) == {0})
        seen += list(events)
        assert seen[-1] == "[DONE]" and said(seen).split() == straight.split()
        assert ask(made, "/health").json()["replicas"] == 1
        assert _admin(made, "GET", "/workers/1")[0] == 404


def test_a_worker_that_is_taken_away_ends_what_it_has(engines: list[serving.Process], tmp_path: Path) -> None:
    """Even the last one; and then it may come back."""
    made = serving.gateway(
        serving.fleet_file(tmp_path, [engines[0].url], gateway={"admin_keys": [_sum("root")], "hold_s": 20.0})
    )
    with serving.closing(made):
        serving.all_up(made, 1)
        events = chat(made, max_tokens=100, stream=True).events()
        next(events)
        assert _admin(made, "DELETE", "/workers/0")[1]["status"] == "leaving"
        assert list(events)[-1] == "[DONE]"
        until(lambda: not _workers(made))
        answers: list[Any] = []
        waiting = threading.Thread(target=lambda: answers.append(chat(made, max_tokens=2).json()))
        waiting.start()
        until(lambda: metric(made, "headway_requests_held") == 1)
        assert _admin(made, "POST", "/workers", {"pool": "pool", "url": engines[0].url})[0] == 201
        waiting.join(serving.PATIENCE_S)
        assert answers[0]["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("POST", "/workers", {"pool": "pol", "url": "http://a:1"}, 400, "did you mean 'pool'?"),
        ("POST", "/workers", {"pool": "pool", "url": "ftp://a"}, 400, "expected http://host:port"),
        ("POST", "/workers", {"pool": "pool"}, 400, "url"),
        ("POST", "/workers", {"pool": "pool", "url": None}, 400, "url"),
        ("GET", "/workers/9", None, 404, "no worker 9"),
        ("POST", "/workers/9/drain", {}, 404, "no worker 9"),
    ],
)
def test_mistakes_of_admins_are_told(
    front: serving.Process, method: str, path: str, body: Any, status: int, words: str
) -> None:
    got, told = _admin(front, method, path, body)
    assert got == status and words in told["error"]["message"]


def test_a_worker_is_added_once(front: serving.Process, engines: list[serving.Process]) -> None:
    assert _admin(front, "POST", "/workers", {"pool": "pool", "url": engines[0].url})[0] == 409


# HTTPS.


def _certificate(folder: Path) -> tuple[Path, Path]:
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def test_connections_are_encrypted_with_a_certificate(engines: list[serving.Process], tmp_path: Path) -> None:
    import ssl
    from urllib.request import urlopen

    certificate, key = _certificate(tmp_path)
    path = serving.fleet_file(tmp_path, [engines[0].url])
    made = serving.gateway(path, "--certfile", str(certificate), "--keyfile", str(key))
    with serving.closing(made):
        context = ssl.create_default_context(cafile=str(certificate))
        with urlopen(f"https://127.0.0.1:{made.port}/version", context=context) as answer:
            assert answer.status == 200
        with pytest.raises(ConnectionError):
            ask(made, "/version")


def test_certificates_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    from headway.gateway.server.web_server import Tls

    certificate, key = _certificate(tmp_path)
    (tmp_path / "other").mkdir()
    other, _ = _certificate(tmp_path / "other")
    Tls(certificate, key).check()
    for tls in (Tls(other, key), Tls(tmp_path / "none.pem"), Tls(certificate), Tls(key, key)):
        with pytest.raises(HeadwayError, match="not a certificate and its key"):
            tls.check()


@pytest.mark.parametrize(
    ("gateway", "words"),
    [
        ({"api_keys": ["secret"]}, "api_keys[0]"),
        ({"api_keys": [{"sha256": "0" * 64, "tiers": 1}]}, "did you mean 'tier'?"),
        ({"api_keys": [{"sha256": "0" * 64, "tokens_per_minute": 0}]}, "tokens_per_minute"),
        ({"batches": {"store": "mysql://a/b"}}, "'mysql' is not a known database"),
        ({"batches": {"store": "postgresql://a:b:c/d"}}, "not a database address"),
        ({"batches": {"store": "postgresql://a/b?user=c"}}, "only sslmode"),
        ({"batches": {"store": "no/such/folder/a.sqlite"}}, "is no folder"),
        ({"batches": {"max_line": 1}}, "did you mean 'max_lines'?"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path: Path, gateway: dict[str, Any], words: str) -> None:
    path = serving.fleet_file(tmp_path, ["http://127.0.0.1:1"], gateway=gateway)
    with pytest.raises(HeadwayError) as told:
        composition.load(path)
    assert words in str(told.value)


_ODD: list[Any] = [None, True, -1, 1e300, "", "\0", "é" * 99, [], [{}], {}, {"a": None}, "24h", "pool", "http://a:1"]


def test_no_odd_body_makes_the_gateway_fail(tmp_path: Path) -> None:
    made = serving.gateway(
        serving.fleet_file(tmp_path, ["http://127.0.0.1:9"], gateway={"admin_keys": [_sum("root")], "batches": {}})
    )
    draw = random.Random(7)
    names = ("input_file_id", "endpoint", "completion_window", "metadata", "pool", "url")
    with serving.closing(made):
        until(lambda: ask(made, "/v1/batches").json().get("object") == "list")
        for path in ("/v1/batches", "/v1/files", "/workers", "/v1/batches/x/cancel", "/workers/0/drain"):
            for _ in range(25):
                odd = {name: draw.choice(_ODD) for name in names if draw.random() < 0.7}
                reply = ask(made, path, odd if draw.random() < 0.9 else draw.choice(_ODD), ADMIN)
                assert reply.status < 500, (path, odd)
                reply.json()
