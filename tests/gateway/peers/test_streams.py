"""Which streams of other gateways are continued from the store."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("asyncpg")
from msgspec import msgpack

from headway.gateway.peers import streams
from headway.gateway.peers.store import OVER
from headway.gateway.scheduling.stream_copy import StreamCopies, StreamPart

DIGEST = b"mine"


class Store:
    """A store whose gateway `first` counts as connected for some questions more."""

    def __init__(self, num_alive: int, is_over: bool = False) -> None:
        self.num_alive, self.num_asked = num_alive, 0
        self._rows = [(OVER, "first", b"")] if is_over else []
        self._rows.append((0, "first", msgpack.encode(StreamPart(b"data: {}\n\n", 1, [7], [3]))))

    async def parts(self, digest: bytes) -> list[Any]:
        return self._rows

    async def is_alive(self, gateway: str) -> bool:
        self.num_asked += 1
        return self.num_asked <= self.num_alive

    async def take_stream(self, digest: bytes) -> None:
        pass


@pytest.mark.parametrize(
    ("store", "num_asked", "is_restored"),
    [(Store(2), 3, True), (Store(0, is_over=True), 0, True), (Store(99), 4, False)],
)
def test_a_client_that_asks_again_may_be_faster_than_the_news_that_its_gateway_is_gone(
    monkeypatch: pytest.MonkeyPatch, store: Any, num_asked: int, is_restored: bool
) -> None:
    monkeypatch.setattr(streams, "_TRIES", 4)
    monkeypatch.setattr(streams, "_TRY_S", 0.0)
    copies = StreamCopies(lambda: 0.0)
    asyncio.run(streams.StoredStreams(store, copies).restore(DIGEST))
    assert (store.num_asked, copies.has(DIGEST)) == (num_asked, is_restored)
