"""Engines in memory that stream scripted events, and an event loop for one test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

from in_memory import Serve
from scripted import Exchange

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def run(story: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(10):
            return await story

    return asyncio.run(limited())


def chunk(text: str, id: str = "c", token: int | None = None, **more: Any) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    if token is not None:
        choice["token_ids"] = [token]
    return {"id": id, "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice], **more}


def event(value: Any) -> bytes:
    data = b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


DONE = event(b"[DONE]") + b"0\r\n\r\n"


def streaming(*events: Any, end: bytes | None = DONE, bodies: list[Any] | None = None) -> Serve:
    """Streams these events, each read by itself; without `end`, the connection is closed."""

    async def serve(exchange: Exchange) -> None:
        if bodies is not None:
            bodies.append(json.loads(exchange.body))
        exchange.send(HEAD)
        for each in events:
            exchange.send(event(each))
            await asyncio.sleep(0)
        if end is None:
            await asyncio.sleep(0)
            exchange.close()
        else:
            exchange.send(end)

    return serve


def answering(body: Any, status: int = 200) -> Serve:
    async def serve(exchange: Exchange) -> None:
        exchange.answer(body if isinstance(body, bytes) else json.dumps(body).encode(), status)

    return serve
