"""Requests that wait, or that are too many: comments, refusals and probes."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httptools")

from gateway_in_process import Inside, Reply, send_request
from headway.gateway.server.probes import ProbeServer
from headway.gateway.upstream.dialects import Load
from scripted import OK, Exchange, framed, whole
from serving import MODEL

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
SAID = b'data: {"id":"c","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"so"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
REFUSAL = b'{"error":{"message":"too long"}}'


def _inside(folder: Path, num: int = 1, **gateway: Any) -> Inside:
    return Inside(folder, num, pool={"api": "openai"}, gateway={"scrape_period_s": 3600.0, **gateway})


async def _after_comments(made: Inside, release: asyncio.Event, body: Any) -> Reply:
    """The reply to a request that is released once its client has got two comments."""
    reply = Reply()
    sending = asyncio.create_task(send_request(made.app, "/v1/chat/completions", body, reply.send))
    await made.until(lambda: reply.body.count(b": waiting\n\n") >= 2)
    release.set()
    await sending
    return reply


@pytest.mark.parametrize("answer", ["well", "refused", "whole", "broken"])
def test_a_stream_that_waits_is_kept_alive(tmp_path: Path, answer: str) -> None:
    made, release = _inside(tmp_path, keep_alive_s=0.02, max_attempts=1), asyncio.Event()
    engine = made.engines[0]
    engine.reply = {
        "well": [OK + framed(SAID) + framed(DONE) + b"0\r\n\r\n"],
        "refused": [b"HTTP/1.1 400 No\r\nContent-Length: %d\r\n\r\n%s" % (len(REFUSAL), REFUSAL)],
        "whole": [whole()],
        "broken": [OK],
    }[answer]
    engine.then = "close" if answer == "broken" else "keep"
    answers = engine.complete

    async def held(exchange: Exchange) -> None:
        await release.wait()
        await answers(exchange)

    engine.complete = held
    reply = made.run(_after_comments(made, release, CHAT))
    assert reply.status == 200 and reply.is_whole and reply.headers["content-type"] == "text/event-stream"
    events = [event for event in reply.body.split(b"\n\n") if event and event != b": waiting"]
    assert events[-1] == b"data: [DONE]"
    if answer == "well":
        assert b"\n\n".join(events) + b"\n\n" == SAID + DONE
    else:
        value = json.loads(events[0][6:])
        assert ("choices" in value) == (answer == "whole") and ("error" in value) == (answer != "whole")
    assert made.num_in_flight == 0
    made.close()


def test_requests_are_shed_while_all_engines_have_queues(tmp_path: Path) -> None:
    made = _inside(tmp_path, 2, max_waiting=3)
    for waiting, status in (((3, 4), 429), ((3, 2), 200), ((0, 9), 200), ((None, 9), 200)):
        for replica, num in zip(made.gateway.replicas, waiting, strict=True):
            replica.update_load(Load(waiting=num))
        reply = made.chat()
        assert reply.status == status
        if status == 429:
            assert reply.error()["code"] == "overloaded" and reply.headers["retry-after"] == "1"
    made.close()


def test_when_all_are_lost_requests_are_refused_at_once(tmp_path: Path) -> None:
    """Those that wait for a replica that starts, or that is suspended, are not."""
    made = _inside(tmp_path, 2)
    driver, replicas = made.gateway.driver, made.gateway.replicas
    service = driver.services[MODEL]
    assert not driver.holds._is_all_lost(service)
    for replica in replicas:
        made.gateway.health.breakers[replica.id].is_lost = True
    assert driver.holds._is_all_lost(service)
    replicas[0].is_starting = True
    assert not driver.holds._is_all_lost(service)
    replicas[0].is_starting = False
    for replica in replicas:
        made.gateway.health.breakers[replica.id].is_open = True
        driver.roster.replica_down(replica)
    reply = made.chat()
    assert reply.status == 503 and reply.error()["code"] == "no_capacity" and "retry-after" in reply.headers
    made.close()


def _get(port: int, path: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_probes_are_answered_on_a_port_apart() -> None:
    """Also while the event loop is busy: they say so."""
    status: tuple[bool, dict[str, Any]] = (True, {"up": 1})
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def story() -> None:
        nonlocal status
        probes = ProbeServer(port, lambda: status, hang_s=3600.0)
        try:
            assert await asyncio.to_thread(_get, port, "/livez") == (200, {"silent_s": pytest.approx(0, abs=60)})
            assert await asyncio.to_thread(_get, port, "/readyz") == (200, {"up": 1})
            assert (await asyncio.to_thread(_get, port, "/v1/models"))[0] == 404
            status = (False, {"up": 0})
            probes._turn()
            assert await asyncio.to_thread(_get, port, "/health") == (503, {"up": 0})
            probes._turn_s = -1e9  # the loop has not turned for long
            assert probes.answer("/livez")[0] == 503
        finally:
            await asyncio.to_thread(probes.close)

    asyncio.run(story())
