"""Names that clients choose, of any length and in any number: none is kept whole, and few of them become labels."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("httptools")

from ext_proc import Call, Desk, desk, picked
from gateway_in_process import Inside, send_request
from headway.control.decisions import Decision
from headway.gateway.names import MAX_CHARS, OTHER, KnownNames, cut
from headway.gateway.server.access_log import AccessLog
from headway.gateway.telemetry.metrics import MAX_TENANTS
from serving import MODEL, fleet_file

MARK = "overlong"
MOST = 1000
"""Characters of the longest name that anything may keep: a path in the access log."""
_NOT_FOLLOWED = (type, ModuleType, FunctionType, FrameType, asyncio.AbstractEventLoop, asyncio.Task)


def long(number: int = 0) -> str:
    return f"{number}-{MARK * 1000}"


HEADERS = ["x-headway-region", "x-session-id", "x-request-id", "idempotency-key", "x-headway-explain", "traceparent"]
FAIRNESS = "x-gateway-inference-fairness-id"
REWRITE, OBJECTIVE = "x-gateway-model-name-rewrite", "x-gateway-inference-objective"


def kept(root: object) -> Iterator[str | bytes]:
    """Long names that can be reached from an object."""
    seen, left = {id(root)}, [root]
    while left:
        for each in gc.get_referents(left.pop()):
            if id(each) in seen or isinstance(each, _NOT_FOLLOWED):
                continue
            seen.add(id(each))
            if isinstance(each, str | bytes):
                if len(each) > MOST and (MARK if isinstance(each, str) else MARK.encode()) in each:
                    yield each
            else:
                left.append(each)


def labels(page: str) -> list[str]:
    return re.findall(r'"((?:[^"\\]|\\.)*)"', page)


def test_long_names_are_found() -> None:
    """What the other tests rely on."""
    assert list(kept({"a": [(long(),)]})) == [long()] and list(kept(Call.__call__)) == []


def test_names_are_cut_and_stay_apart() -> None:
    assert cut("a" * MAX_CHARS) == "a" * MAX_CHARS
    cuts = {cut(long(number)) for number in range(100)} | {cut(long() + str(number)) for number in range(100)}
    assert len(cuts) == 200 and {len(each) for each in cuts} == {MAX_CHARS} and cut("\ud800" * 500)
    names = KnownNames(3)
    assert [names.known(each) for each in "abcdab"] == ["a", "b", "c", OTHER, "a", "b"]


def test_a_gateway_keeps_no_long_name(tmp_path: Path) -> None:
    inside = Inside(tmp_path, gateway={"explain": True})
    log = tmp_path / "access.jsonl"
    app = AccessLog(inside.app, log)
    statuses = []

    async def ask(number: int, path: str = "/v1/chat/completions", method: str = "POST") -> None:
        sent: list[Any] = []
        fields: dict[str, Any] = {"prompt_cache_key": long(number), "user": long(number), "service_tier": long(number)}
        if number == 1:
            fields["model"] = long()
        body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], **fields}
        headers = [(name, long(number)) for name in HEADERS]

        async def send(message: Any) -> None:
            sent.append(message)

        await send_request(app, path, body, send, headers, method=method)
        statuses.append(sent[0]["status"])

    try:
        inside.engines[0].keeps_bodies = False
        inside.gateway.telemetry.recording.enabled = True
        for number in range(3):
            inside.run(ask(number))
        inside.run(ask(3, "/v1/responses/" + long(), "GET"))
        inside.run(ask(4, "/" + long(), long()))
        assert statuses == [200, 400, 200, 404, 404]
        assert not list(kept(inside.gateway)) and inside.num_in_flight == 0
        regions = {arrival[7] for arrival in inside.gateway.telemetry.recording._arrivals}
        assert {len(each) for each in regions} == {MAX_CHARS}
        page = "\n".join(inside.gateway.metrics.lines())
        assert max(map(len, labels(page))) <= MAX_CHARS
    finally:
        inside.close()
        app._lines.close()
    lines = log.read_text().splitlines()
    assert len(lines) == 5 and max(map(len, lines)) < 2 * MOST


def test_a_picker_keeps_no_long_name_and_few_of_many(tmp_path: Path) -> None:
    """Also while requests are held, each of another tenant."""
    decisions: list[Decision] = []
    num = MAX_TENANTS + 100

    async def held(made: Desk) -> list[Call]:
        calls = []
        for number in range(num):
            call = made.call()
            call.request(headers={FAIRNESS: long(number), OBJECTIVE: long(number), "x-request-id": long(number)})
            calls.append(call)
        async with asyncio.timeout(60):
            while len(made.gateway.driver.requests) < num:
                await asyncio.sleep(0.01)
        return calls

    async def story() -> None:
        async with desk(fleet_file(tmp_path, ["http://127.0.0.1:9001"]), decisions, is_up=False) as made:
            for number in range(2):
                call = made.call()
                call.request(headers={REWRITE: long(number)})
                assert (await picked(call)).status == 400
            calls = await held(made)
            for _ in range(2):
                page = "\n".join(made.gateway.metrics.lines())
                tenants = {each for each in labels(page) if MARK in each}
                assert len(tenants) == MAX_TENANTS and {len(each) for each in tenants} == {MAX_CHARS}
                assert f'tenant="{OTHER}"' in page and len(page) < 2 << 20
                for each in calls:
                    each.end()
                await made.over()
            assert not list(kept(made.gateway)) and not list(kept(decisions)) and not made.gateway.driver.requests

    asyncio.run(story())
