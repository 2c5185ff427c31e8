"""The endpoints for replicas: who may use them, and replicas that are added, drained and removed under load."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httptools")

import serving
from headway.gateway.server.admin import is_address
from keys import ADMIN, bearer, digest
from serving import answer_text, chat, metric, send, until


@pytest.mark.parametrize("url", ["http://a:1", "https://a", "http://[::1]:8000/path"])
def test_an_address_has_a_scheme_and_a_host(url: str) -> None:
    assert is_address(url)


@pytest.mark.parametrize("url", ["", "a:1", "ftp://a", "http://", "http://a:0", "http://a:x", "http://u@a", "http://a?b",
                                 "http://a#b", "http://\u00e4", "http://a\n"])  # fmt: skip
def test_other_urls_are_no_addresses(url: str) -> None:
    assert not is_address(url)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/workers", None),
        ("POST", "/workers", {"pool": "pool", "url": "http://127.0.0.1:9"}),
        ("GET", "/workers/0", None),
        ("DELETE", "/workers/0", None),
        ("POST", "/workers/0/drain", {}),
    ],
)
def test_only_admins_see_and_change_replicas(keyed_front: serving.Process, method: str, path: str, body: Any) -> None:
    for headers in ({}, bearer("free"), {"Authorization": "root"}):
        assert send(keyed_front, path, body, headers, method).json()["error"]["code"] == "invalid_api_key"


def _workers(keyed_front: serving.Process) -> dict[int, dict[str, Any]]:
    return {each["id"]: each for each in send(keyed_front, "/workers", headers=ADMIN).json()["data"]}


def _admin(keyed_front: serving.Process, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    reply = send(keyed_front, path, body, ADMIN, method)
    return reply.status, reply.json()


def test_without_admin_keys_the_endpoints_do_not_exist(engines: list[serving.Process], tmp_path: Path) -> None:
    made = serving.gateway(serving.fleet_file(tmp_path, [engines[0].url]))
    with serving.closing(made):
        assert _admin(made, "GET", "/workers")[0] == 404


def test_a_stream_survives_while_replicas_are_added_drained_and_removed(
    engines: list[serving.Process], tmp_path: Path
) -> None:
    with serving.up(
        serving.gateway(serving.fleet_file(tmp_path, [engines[0].url], gateway={"admin_keys": [digest("root")]})), 1
    ) as made:
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
        assert seen[-1] == "[DONE]" and answer_text(seen).split() == straight.split()
        assert send(made, "/health").json()["replicas"] == 1
        assert _admin(made, "GET", "/workers/1")[0] == 404


def test_a_removed_replica_finishes_its_streams(engines: list[serving.Process], tmp_path: Path) -> None:
    """So does the last replica of the fleet, which may be added again."""
    made = serving.gateway(
        serving.fleet_file(tmp_path, [engines[0].url], gateway={"admin_keys": [digest("root")], "hold_s": 20.0})
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
def test_invalid_requests_are_refused(
    keyed_front: serving.Process, method: str, path: str, body: Any, status: int, words: str
) -> None:
    got, content = _admin(keyed_front, method, path, body)
    assert got == status and words in content["error"]["message"]


def test_a_replica_is_added_once(keyed_front: serving.Process, engines: list[serving.Process]) -> None:
    assert _admin(keyed_front, "POST", "/workers", {"pool": "pool", "url": engines[0].url})[0] == 409
