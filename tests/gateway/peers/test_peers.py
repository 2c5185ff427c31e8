"""Three gateways of one fleet, with a real PostgreSQL: one is killed, and the store goes away and comes back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import postgres
import serving
from keys import bearer, digest
from serving import answer_text, chat, metric, send, until

pytest.importorskip("httptools")
asyncpg = pytest.importorskip("asyncpg")
pytestmark = pytest.mark.skipif(bool(postgres.missing()), reason=postgres.missing())

ENDLESS = {"stream": True, "max_tokens": 20_000, "ignore_eos": True, "temperature": 0}
"""Streams that last longer than any test: what they say is compared with the beginning of one."""
NUM_COMPARED = 400
"""Tokens."""


@pytest.fixture(scope="module")
def store(database: postgres.Server) -> postgres.Server:
    return database


@pytest.fixture(scope="module")
def engines() -> Iterator[list[serving.Process]]:
    made = [serving.emulator("--speed", "4") for _ in range(3)]
    with serving.closing(*made):
        yield made


@contextmanager
def gateways_on(store_url: str, engines: list[serving.Process], folder: Path) -> Iterator[list[serving.Process]]:
    """Three, which know of each other; the third one has workers."""
    peers = {"store": store_url, "lease_s": 1.0}
    path = serving.fleet_file(
        folder, [each.url for each in engines], gateway={"peers": peers}, policies={"routing": "least-loaded"}
    )
    made = [serving.gateway(path), serving.gateway(path), serving.gateway(path, "--workers", "2")]
    with serving.closing(*made):
        for each in made:
            serving.all_up(each, 3)
            know_each_other(each, 2)
        yield made


@pytest.fixture(scope="module")
def gateways(
    store: postgres.Server, engines: list[serving.Process], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[serving.Process]]:
    with gateways_on(store.url, engines, tmp_path_factory.mktemp("fleet")) as made:
        yield made


def know_each_other(gateway: serving.Process, num: int) -> None:
    until(lambda: health(gateway) == ("up", num))


def health(gateway: serving.Process) -> tuple[str, int]:
    found = send(gateway, "/health").json()
    return found["peer_store"], found["peers"]


def elsewhere(gateway: serving.Process) -> float:
    """Requests of the other gateways, as this one has heard."""
    return metric(gateway, "headway_peer_requests_in_flight")


def num_parts(store_url: str) -> int:
    """Parts of streams that the store has."""

    async def count() -> int:
        connection = await asyncpg.connect(store_url)
        try:
            return await connection.fetchval("SELECT count(*) FROM headway_streams")
        finally:
            await connection.close()

    return asyncio.run(count())


Begun = tuple[serving.Reply, Iterator[Any]]


def begin(gateway: serving.Process, headers: dict[str, str] | None = None) -> Begun:
    """A stream that has brought an event, and its further ones."""
    reply = chat(gateway, headers=headers, **ENDLESS)
    events = reply.events()
    next(events)
    return reply, events


def test_gateways_spread_over_replicas_what_they_place_together(
    gateways: list[serving.Process], engines: list[serving.Process]
) -> None:
    """Each alone would choose the first replica, which is the least loaded by its own counts."""
    streams = []
    for num, gateway in enumerate(gateways):
        until(lambda: elsewhere(gateway) == num)  # noqa: B023
        streams.append(begin(gateway)[0])
    until(lambda: [metric(engine, "vllm:num_requests_running") for engine in engines] == [1, 1, 1])
    for stream in streams:
        stream.close()
    until(lambda: all(elsewhere(gateway) == 0 for gateway in gateways))


def test_gateways_go_on_alone_while_the_store_is_away_and_agree_when_it_is_back(
    gateways: list[serving.Process], store: postgres.Server
) -> None:
    first, second, _ = gateways
    stream, events = begin(first)
    until(lambda: elsewhere(second) == 1)
    store.stop()
    until(lambda: all(health(gateway) == ("away", 0) for gateway in gateways))
    assert elsewhere(second) == 0 and metric(second, "headway_peer_store_up") == 0
    assert chat(second, max_tokens=3).json()["usage"]["completion_tokens"] == 3
    store.start()
    for gateway in gateways:
        know_each_other(gateway, 2)
    until(lambda: elsewhere(second) == 1)
    assert len(list(islice(events, 10))) == 10
    stream.close()
    until(lambda: elsewhere(second) == 0)
    first.wait_for("goes on alone", "shares its state now")


@pytest.mark.parametrize(("ordering", "server"), [("vtc", "database"), ("drr", "valkey")])
def test_a_tenant_that_floods_at_one_gateway_is_held_back_at_another(
    tmp_path: Path, ordering: str, server: str, request: pytest.FixtureRequest
) -> None:
    address = request.getfixturevalue(server).new()
    engine = serving.emulator("--speed", "4")
    keys = [{"sha256": digest(name), "name": name} for name in ("flood", "quiet", "third")]
    path = serving.fleet_file(
        tmp_path,
        [engine.url],
        policies={"ordering": ordering, "ordering_at": "gateway", "window": 1},
        gateway={"api_keys": keys, "peers": {"store": address, "lease_s": 5.0}},
    )
    first, second = serving.gateway(path), serving.gateway(path)
    with serving.closing(engine, first, second):
        for each in (first, second):
            serving.all_up(each, 1)
            know_each_other(each, 1)
        for _ in range(4):
            assert "usage" in chat(first, max_tokens=200, headers=bearer("flood")).json()
        heard = received(second)
        until(lambda: received(second) >= heard + 2)
        running = chat(second, **ENDLESS, headers=bearer("third"))
        until(lambda: metric(second, "headway_requests_in_flight") == 1)
        order: list[str] = []

        def answered(key: str) -> None:
            chat(second, max_tokens=100, headers=bearer(key)).json()
            order.append(key)

        threads = [threading.Thread(target=answered, args=(key,)) for key in ("flood", "quiet")]
        for num, thread in enumerate(threads, 1):
            thread.start()
            until(lambda num=num: metric(second, "headway_requests_held") == num)
        running.close()
        for thread in threads:
            thread.join(20)
        assert order == ["quiet", "flood"]


def received(gateway: serving.Process) -> float:
    """Messages of other gateways."""
    return metric(gateway, 'headway_peer_messages_total{way="received"}')


def test_a_gateway_that_is_killed_takes_only_its_own_requests_and_its_streams_continue_elsewhere(
    engines: list[serving.Process], store: postgres.Server, tmp_path: Path
) -> None:
    store_url = store.create("killed")
    with gateways_on(store_url, engines, tmp_path) as (first, second, third):
        text = answer_text(list(chat(second, **{**ENDLESS, "max_tokens": NUM_COMPARED}).events()))
        doomed, early = begin(first, {"x-request-id": "mine"})
        other, begun = begin(second)
        seen = answer_text(list(islice(early, NUM_COMPARED // 2)))
        until(lambda: elsewhere(third) == 2)
        until(lambda: num_parts(store_url) > 0)
        first.kill()
        doomed.close()
        again = chat(third, headers={"x-request-id": "mine"}, **ENDLESS)
        replayed = int(again.headers["x-headway-replayed-tokens"])
        assert replayed > 0
        found = answer_text(list(islice(again.events(), replayed + NUM_COMPARED)))
        assert found.startswith(text) and seen in found
        assert answer_text(list(islice(begun, NUM_COMPARED))) in found  # the stream of another gateway goes on
        again.close()
        other.close()
        know_each_other(third, 1)
        until(lambda: elsewhere(third) == 0)  # what the first one had at the replicas counts no more
        second.stop()
        know_each_other(third, 0)
