"""A mock engine for measuring gateways: answers at once with prepared bytes, as fast as asyncio can."""

from __future__ import annotations

import asyncio
import sys
from time import monotonic

import httptools
import uvloop

WHOLE = (
    b'{"id":"cmpl-1","object":"chat.completion","created":1,"model":"qwen3-8b","choices":[{"index":0,"finish_reason":'
    b'"stop","message":{"role":"assistant","content":"hello"}}],"usage":{"prompt_tokens":10,"completion_tokens":1,'
    b'"total_tokens":11}}'
)
CHUNK = (
    b'data: {"id":"cmpl-1","object":"chat.completion.chunk","created":1,"model":"qwen3-8b","choices":[{"index":0,'
    b'"delta":{"content":" hello"},"finish_reason":null}]}\n\n'
)


def _head(kind: bytes, rest: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: " + kind + b"\r\n" + rest + b"\r\n\r\n"


def _answer(kind: bytes, body: bytes) -> bytes:
    return _head(kind, b"Content-Length: %d" % len(body)) + body


def _framed(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


class Mock(asyncio.Protocol):
    """One connection."""

    num_chunks, interval_s = 100, 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._body = b"", b""

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        body, self._body = self._body, b""
        if self._url.endswith(b"/completions"):
            if b'"stream":true' in body.replace(b" ", b""):
                self._transport.write(_head(b"text/event-stream", b"Transfer-Encoding: chunked"))
                if self.interval_s:
                    self._next(monotonic(), 0)
                else:
                    for i in range(self.num_chunks):
                        asyncio.get_running_loop().call_soon(self._write, i == self.num_chunks - 1)
            else:
                self._transport.write(_answer(b"application/json", WHOLE))
        elif self._url == b"/v1/models":
            self._transport.write(_answer(b"application/json", b'{"object":"list","data":[{"id":"qwen3-8b"}]}'))
        else:
            self._transport.write(_answer(b"text/plain", b""))

    def _write(self, is_last: bool) -> None:
        self._transport.write(_framed(CHUNK) + (_framed(b"data: [DONE]\n\n") + b"0\r\n\r\n" if is_last else b""))

    def _next(self, start_s: float, k: int) -> None:
        """Chunk k, at its time; none for who is gone."""
        if self._transport.is_closing():
            return
        self._write(k == self.num_chunks - 1)
        if k < self.num_chunks - 1:
            wait_s = start_s + (k + 1) * self.interval_s - monotonic()
            asyncio.get_running_loop().call_later(max(wait_s, 0), self._next, start_s, k + 1)


async def main(port: int, num_chunks: int, interval_s: float) -> None:
    """Serve until killed."""
    Mock.num_chunks, Mock.interval_s = num_chunks, interval_s
    server = await asyncio.get_running_loop().create_server(Mock, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
