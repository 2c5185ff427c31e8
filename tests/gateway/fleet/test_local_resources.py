"""GPUs and ports that local replicas take and release."""

from __future__ import annotations

import asyncio
import socket

import pytest

from headway.core.errors import HeadwayError
from headway.gateway.fleet.local_resources import HOST, Gpus, Ports, free_port


def test_adjacent_gpus_are_taken_first_and_a_request_without_enough_waits() -> None:
    async def story() -> None:
        gpus = Gpus(4)
        one = await gpus.take(1)
        pair = await gpus.take(2)
        assert (one, pair) == ((0,), (2, 3))
        waiting = asyncio.create_task(gpus.take(2))
        await asyncio.sleep(0)
        assert not waiting.done()
        gpus.release(one)
        assert await waiting == (0, 1)

    asyncio.run(story())


def test_a_port_is_taken_once_and_only_if_nothing_listens_there() -> None:
    first = free_port()
    ports = Ports(first, first)
    assert ports.take() == first
    with pytest.raises(HeadwayError, match="no port from"):
        ports.take()
    ports.release(first)
    with socket.create_server((HOST, first)), pytest.raises(HeadwayError, match="is free"):
        ports.take()
    assert ports.take() == first
