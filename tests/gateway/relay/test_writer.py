"""Writers of responses."""

from __future__ import annotations

import asyncio
from typing import Any

from headway.gateway.errors import ApiError
from headway.gateway.relay.writer import AsgiWriter, BufferedWriter, error_response, write_error
from relay_alone import KeepingWriter


def test_asgi_messages_are_sent_in_order_when_drained() -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    async def story() -> None:
        writer = AsgiWriter(receive, send)
        assert not writer.is_full and not writer.has_begun
        writer.start(200, [(b"a", b"b")])
        writer.write(b"so", more=True)
        assert writer.is_full and writer.has_begun and not sent
        await writer.drain()
        writer.write(b"on")
        await writer.drain()
        assert not writer.is_full

    asyncio.run(story())
    assert sent == [
        {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]},
        {"type": "http.response.body", "body": b"so", "more_body": True},
        {"type": "http.response.body", "body": b"on", "more_body": False},
    ]


def test_a_disconnect_is_reported_until_the_writer_is_closed() -> None:
    async def story() -> None:
        messages: asyncio.Queue[Any] = asyncio.Queue()
        disconnects: list[int] = []

        async def send(message: Any) -> None:
            return

        for is_closed in (False, True):
            writer = AsgiWriter(messages.get, send)
            writer.watch(lambda: disconnects.append(1))
            if is_closed:
                writer.close()
            messages.put_nowait({"type": "http.request"})
            messages.put_nowait({"type": "http.disconnect"})
            for _ in range(5):
                await asyncio.sleep(0)
        assert len(disconnects) == 1

    asyncio.run(story())


def test_a_buffered_response_can_be_copied() -> None:
    async def story() -> None:
        buffered, writer = BufferedWriter(), KeepingWriter()
        buffered.start(200, [(b"a", b"b")])
        buffered.write(b"so", more=True)
        buffered.write(b"on")
        await buffered.copy_to(writer)
        assert (writer.status, writer.headers, writer.pieces) == (200, {"a": "b"}, [b"so", b"on"])
        assert writer.is_complete

    asyncio.run(story())


def test_an_error_is_a_whole_response() -> None:
    error = ApiError(429, "too many", "queue_full", retry_after_s=3)
    writer = KeepingWriter()
    asyncio.run(write_error(writer, error, b"r1"))
    assert (writer.status, writer.body, writer.is_complete) == (429, error.json(), True)
    assert (writer.headers["retry-after"], writer.headers["x-request-id"]) == ("3", "r1")
    response = error_response(error)
    assert (response.status_code, response.body, response.headers["retry-after"]) == (429, error.json(), "3")
