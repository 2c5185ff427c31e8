"""Pages of other hosts, and the access log, with one worker and with two."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import serving
from keys import bearer, digest
from serving import MODEL, chat, send

pytest.importorskip("httptools")

PAGE = "https://chat.example.com"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.fixture(scope="module", params=[1, 2])
def front(
    request: pytest.FixtureRequest, engines: list[serving.Process], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[serving.Process, Path]]:
    folder = tmp_path_factory.mktemp("fleet")
    settings = {"api_keys": [digest("free")], "cors": {"origins": [PAGE], "methods": ["GET", "POST"]}}
    path, log = serving.fleet_file(folder, [engines[0].url], gateway=settings), folder / "access.jsonl"
    with serving.up(
        serving.gateway(path, "--workers", str(request.param), "--access-log", str(log), "--log-format", "json"), 1
    ) as made:
        yield made, log


# Cross-origin resource sharing.


def test_a_preflight_needs_no_key(front: tuple[serving.Process, Path]) -> None:
    for path in ("/v1/chat/completions", "/v1/models"):
        reply = send(front[0], path, headers={"origin": PAGE, **PREFLIGHT}, method="OPTIONS")
        assert reply.status == 200 and reply.headers["access-control-allow-origin"] == PAGE
        assert reply.headers["access-control-allow-methods"] == "GET, POST"
        assert "authorization" in reply.headers["access-control-allow-headers"]
        reply.close()
    for wrong in (
        {"origin": "https://evil.example.com", **PREFLIGHT},
        {"origin": PAGE, "access-control-request-method": "DELETE"},
    ):
        reply = send(front[0], "/v1/models", headers=wrong, method="OPTIONS")
        assert reply.status == 400
        reply.close()


def test_answers_streams_and_errors_name_the_page(front: tuple[serving.Process, Path]) -> None:
    page = {"origin": PAGE}
    replies = [
        chat(front[0], headers={**page, **bearer("free")}, max_tokens=2),
        chat(front[0], headers={**page, **bearer("free")}, max_tokens=2, stream=True),
        chat(front[0], headers={**page, **bearer("wrong")}, max_tokens=2),
        send(front[0], "/v1/models", headers=page),
    ]
    assert [reply.status for reply in replies] == [200, 200, 401, 200]
    for reply in replies:
        assert reply.headers["access-control-allow-origin"] == PAGE and "Origin" in reply.headers["vary"]
        assert "x-request-id" in reply.headers["access-control-expose-headers"]
        reply.text()


def test_other_pages_are_not_named(front: tuple[serving.Process, Path]) -> None:
    for headers in ({"origin": "https://evil.example.com"}, {}):
        reply = chat(front[0], headers={**headers, **bearer("free")}, max_tokens=2)
        assert reply.status == 200 and "access-control-allow-origin" not in reply.headers
        reply.json()


def test_listed_pages_may_ask_a_gateway_without_keys(engines: list[serving.Process], tmp_path: Path) -> None:
    with serving.up(
        serving.gateway(serving.fleet_file(tmp_path, [engines[0].url], gateway={"cors": {"origins": [PAGE]}})), 1
    ) as made:
        replies = [
            chat(made, headers={"origin": PAGE}, max_tokens=1),
            chat(made, headers={"origin": "https://evil.example.com"}, max_tokens=1),
            send(made, "/v1/models", headers={"origin": PAGE, **PREFLIGHT}, method="OPTIONS"),
        ]
        assert [reply.status for reply in replies] == [200, 403, 200]
        for reply in replies:
            reply.close()


def test_without_the_setting_nothing_is_answered(engines: list[serving.Process], tmp_path: Path) -> None:
    with serving.up(
        serving.gateway(serving.fleet_file(tmp_path, [engines[0].url], gateway={"api_keys": [digest("free")]})), 1
    ) as made:
        reply = send(made, "/v1/chat/completions", headers={"origin": PAGE, **PREFLIGHT}, method="OPTIONS")
        assert reply.status == 405 and "access-control-allow-origin" not in reply.headers
        reply.close()


# The access log.


def _lines(log: Path, request_id: str) -> list[Any]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line for line in lines if line["request_id"] == request_id]


def test_each_request_is_one_line_without_its_text(front: tuple[serving.Process, Path]) -> None:
    made, log = front
    secret = "the moon is a secret"
    reply = chat(made, secret, headers={**bearer("free"), "x-request-id": "whole"}, max_tokens=6)
    usage = reply.json()["usage"]
    list(chat(made, secret, headers={**bearer("free"), "x-request-id": "stream"}, max_tokens=6, stream=True).events())
    chat(made, secret, headers={**bearer("wrong"), "x-request-id": "refused"}).json()
    bad = {"model": MODEL, "messages": [], "stream": "yes"}
    send(made, "/v1/chat/completions", bad, {**bearer("free"), "x-request-id": "bad"}).close()
    serving.until(lambda: all(_lines(log, id) for id in ("whole", "stream", "refused", "bad")))
    for id in ("whole", "stream"):
        (line,) = _lines(log, id)
        assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", 200)
        assert (line["key"], line["model"], line["replica"]) == (digest("free")[:12], MODEL, "pool/0")
        assert (line["prompt_tokens"], line["output_tokens"]) == (usage["prompt_tokens"], 6)
        assert 0 < line["duration_s"] < 20 and line["time"].endswith("Z")
    assert 0 < _lines(log, "stream")[0]["ttft_s"] <= _lines(log, "stream")[0]["duration_s"]
    (line,) = _lines(log, "refused")
    assert (line["status"], line["key"], line["replica"]) == (401, digest("wrong")[:12], None)
    assert _lines(log, "bad")[0]["status"] == 400
    assert secret not in log.read_text() and "Bearer" not in log.read_text()


def test_other_endpoints_and_clients_that_leave_are_logged(front: tuple[serving.Process, Path]) -> None:
    made, log = front
    send(made, "/v1/models?who=me").json()
    reply = chat(
        made, headers={**bearer("free"), "x-request-id": "left"}, stream=True, max_tokens=4000, ignore_eos=True
    )
    next(reply.events())
    reply.close()
    serving.until(lambda: bool(_lines(log, "left")))
    assert _lines(log, "left")[0]["output_tokens"] < 4000
    paths = {json.loads(line)["path"] for line in log.read_text().splitlines()}
    assert "/v1/models" in paths and "who=me" not in log.read_text()


def test_a_renamed_log_is_begun_anew(front: tuple[serving.Process, Path]) -> None:
    made, log = front
    log.rename(log.with_suffix(".1"))
    chat(made, headers={**bearer("free"), "x-request-id": "after"}, max_tokens=1).json()
    serving.until(lambda: log.exists() and bool(_lines(log, "after")))


def test_an_access_log_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    path = serving.fleet_file(tmp_path, ["http://127.0.0.1:9"])
    made = serving.gateway(path, "--access-log", "/proc/nothing/log")
    assert made.process.wait(serving.PATIENCE_S) == 2
    assert made.process.stderr is not None
    log = made.process.stderr.read().decode()
    made.close()
    assert "/proc/nothing/log: cannot be written" in log and "Traceback" not in log


# The gateway's own log.


def test_the_log_has_a_level_and_may_be_json(engines: list[serving.Process], tmp_path: Path) -> None:
    path = serving.fleet_file(tmp_path, [engines[0].url])
    for level, is_told in (("info", True), ("warning", False)):
        with serving.up(serving.gateway(path, "--log-format", "json", "--log-level", level), 1) as made:
            lines = [json.loads(line) for line in made.stop().splitlines()]
        assert is_told == any("is up" in line["message"] and line["level"] == "info" for line in lines)
