"""Requests to a gateway of this process by its own HTTP protocol, whose calls can be traced."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.server import ServerState

import serving
from gateway_in_process import Inside
from headway.gateway.server.http_protocol import HttpProtocol
from traced_calls import Call, traced


async def _ask(inside: Inside, stream: bool, end: bytes, num: int, key: str) -> tuple[bytes, list[Call]]:
    """Ask one after the other on one connection: the last answer, and the calls during the one that took fewest, as
    what the gateway does periodically may fall into others."""
    config = uvicorn.Config(inside.app, access_log=False, lifespan="off", proxy_headers=False)
    config.load()
    server = await asyncio.get_running_loop().create_server(
        lambda: HttpProtocol(config=config, server_state=ServerState(), app_state={}), "127.0.0.1", 0
    )
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    message = {"model": serving.MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": stream}
    body = json.dumps(message).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Authorization: Bearer %b\r\n" % key.encode() if key else b""
    request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    received, of_each = b"", list[list[Call]]()
    for _ in range(num):
        received = b""
        with traced() as calls:
            writer.write(request)
            while end not in received:
                received += await reader.read(1 << 16)
            await asyncio.sleep(0.02)  # until its task has ended
        of_each.append(calls)
    writer.close()
    server.close()
    return received, min(of_each, key=len)


def traced_answer(
    folder: Path, reply: list[bytes], stream: bool, end: bytes, num: int = 1, key: str = "", **sections: Any
) -> tuple[bytes, list[Call]]:
    """What a client receives of an engine's `reply`, up to `end`, and the calls of Headway's functions meanwhile:
    of the one of `num` requests on one connection that took fewest. With a `key`, the gateway asks for it."""
    keys = {"api_keys": [{"sha256": hashlib.sha256(key.encode()).hexdigest(), "name": "one"}]} if key else {}
    inside = Inside(folder, pool={"api": "openai"}, gateway={"scrape_period_s": 3600.0, **keys}, **sections)
    inside.engines[0].reply = reply
    try:
        answer: tuple[bytes, list[Call]] = inside.run(_ask(inside, stream, end, num, key))
    finally:
        inside.close()
    return answer
