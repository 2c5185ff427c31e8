"""What every store of peers does: messages, leases, streams, and what is known of a gateway that leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

pytest.importorskip("httptools")

from headway.gateway.peers.leader import StoreLease
from headway.gateway.peers.store import OVER, PeerStore
from headway.gateway.peers.stores import peer_store

PATIENCE_S = 60.0


@pytest.fixture(params=["database", "valkey"])
def server(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture
def address(server: Any) -> str:
    """A new store."""
    return str(server.new())


class Peer:
    """A gateway's part of the store."""

    def __init__(self, store: PeerStore) -> None:
        self.store, self.heard, self.is_lost = store, asyncio.Queue[str](), asyncio.Event()

    async def connect(self) -> None:
        await self.store.connect(self.heard.put_nowait, self.is_lost.set)

    async def hear(self, num: int) -> list[str]:
        return [await asyncio.wait_for(self.heard.get(), PATIENCE_S) for _ in range(num)]


def play(address: str, story: Callable[..., Awaitable[None]], *names: str) -> None:
    """`story(*peers)` with the gateways `first` and `second`, or these, all of them connected."""

    async def within() -> None:
        async with AsyncExitStack() as left:
            peers = [Peer(peer_store(address, name, PATIENCE_S)) for name in names or ("first", "second")]
            for each in peers:
                left.push_async_callback(each.store.close)
                await each.connect()
            await story(*peers)

    asyncio.run(within())


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await holds():
            await asyncio.sleep(0.01)


def test_a_lease_passes_on_once_it_lapses_or_is_given_up(address: str) -> None:
    async def story(*peers: Peer) -> None:
        first, second = (StoreLease(each.store) for each in peers)
        assert await first.acquire(600.0) and not await second.acquire(600.0)
        assert await first.acquire(600.0), "it renews its own"
        await second.release()
        assert not await second.acquire(600.0), "only its holder gives it up"
        await first.release()
        assert await second.acquire(0.01)
        await until(lambda: first.acquire(600.0))
        assert not await second.acquire(600.0)

    play(address, story)


def test_messages_reach_every_gateway_in_their_order(address: str) -> None:
    sent = [f"{i} é\n" + "x" * 7000 for i in range(20)]

    async def story(first: Peer, second: Peer, third: Peer) -> None:
        await first.store.publish(sent)
        assert await second.hear(20) == await third.hear(20) == sent

    play(address, story, "first", "second", "third")


def test_streams_belong_to_the_gateway_that_sends_them_until_another_one_takes_them(address: str) -> None:
    mine, other = b"\0mine", b"other"

    async def story(first: Peer, second: Peer) -> None:
        await first.store.add_parts([(mine, 1, b"b\0"), (mine, 0, b"\0a"), (other, 0, b""), (other, OVER, b"")])
        parts = [(0, "first", b"\0a"), (1, "first", b"b\0")]
        assert await second.store.parts(mine) == parts
        assert await second.store.parts(other) == [(OVER, "first", b""), (0, "first", b"")]
        await second.store.resume_streams([other])
        await second.store.remove_streams([mine])
        assert await first.store.parts(mine) == parts and len(await first.store.parts(other)) == 2
        await first.store.resume_streams([mine, other])
        assert await first.store.parts(mine) == parts and await first.store.parts(other) == [(0, "first", b"")]
        await first.store.add_parts([(mine, OVER, b"")])
        await second.store.take_stream(mine)
        assert await first.store.parts(mine) == [(number, "second", body) for number, _, body in parts]
        await first.store.remove_streams([mine, other])
        assert len(await first.store.parts(mine)) == 2 and await first.store.parts(other) == []
        await first.store.add_parts([(mine, 1, b"late")])
        await second.store.remove_streams([mine])
        assert await first.store.parts(mine) == [(1, "first", b"late")]
        await first.store.tidy()
        assert len(await first.store.parts(mine)) == 1, "it is not old"

    play(address, story)


def test_a_gateway_is_alive_until_its_connection_is_gone(address: str) -> None:
    async def story(first: Peer, second: Peer) -> None:
        assert await first.store.is_alive("second") and not await first.store.is_alive("third")
        await second.store.close()

        async def is_gone() -> bool:
            return not await first.store.is_alive("second")

        await until(is_gone)
        assert await first.store.is_alive("first") and not first.is_lost.is_set()
        with pytest.raises(OSError):
            await second.store.publish(["x"])
        await second.connect()
        assert await first.store.is_alive("second")

    play(address, story)


def test_a_server_that_ends_is_noticed_and_used_again_when_it_is_back(server: Any, address: str) -> None:
    async def story(first: Peer, second: Peer) -> None:
        server.stop()
        try:
            for each in (first, second):
                await asyncio.wait_for(each.is_lost.wait(), PATIENCE_S)
            store = first.store
            for attempt in (
                store.publish(["x"]),
                store.acquire_lease("l", 1.0),
                store.release_lease("l"),
                store.parts(b"s"),
                store.add_parts([(b"s", 0, b"")]),
                store.take_stream(b"s"),
                store.remove_streams([b"s"]),
                store.resume_streams([b"s"]),
                store.is_alive("second"),
                store.tidy(),
                first.connect(),
            ):
                with pytest.raises(OSError):
                    await attempt
        finally:
            server.start()
        for each in (first, second):
            each.is_lost.clear()
            await each.connect()
        await second.store.publish(["again"])
        assert await first.hear(1) == ["again"] and await second.store.is_alive("first")

    play(address, story)
