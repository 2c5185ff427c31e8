"""An engine that answers as a test tells it, in the event loop of the test or a thread of its own; parts of answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b'data: {"id":"c","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"so"}}]}\n\n'
WELL = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
GOOD_WHOLE = (
    b'{"id":"c","created":1,"model":"m","choices":[{"index":0,"message":{"content":"fine"},"finish_reason":"stop"}]}'
)
_PIECE_BYTES = 1 << 16
_MOST_HEAD_BYTES = 1 << 20


def framed(body: bytes) -> bytes:
    """A chunk in HTTP's chunked encoding."""
    return b"%x\r\n%s\r\n" % (len(body), body)


def chunk(text: str, id: str = "c", token: int | None = None, **more: Any) -> dict[str, Any]:
    """A chunk of a chat's stream."""
    choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    if token is not None:
        choice["token_ids"] = [token]
    return {"id": id, "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice], **more}


def event(value: Any) -> bytes:
    """An event of a stream, framed. A value that is no bytes is sent as JSON."""
    return framed(b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n")


DONE = event(b"[DONE]") + b"0\r\n\r\n"


def whole(body: bytes = GOOD_WHOLE) -> bytes:
    """A valid response."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


class Exchange:
    """A request as an engine sees it, and the way back to its client."""

    def __init__(self, head: bytes, body: bytes, reader: asyncio.StreamReader, writer: Any) -> None:
        self.head, self.body = head, body
        first, *lines = head.decode("latin-1").split("\r\n")
        self.method, self.path = first.split(" ")[:2]
        pairs = [line.partition(":") for line in lines if line]
        self.headers = {name.lower(): value.strip() for name, _, value in pairs}
        self._reader, self._writer = reader, writer

    def fields(self, name: str) -> list[str]:
        """The values of all headers of this name."""
        lines = [line.partition(":") for line in self.head.decode("latin-1").split("\r\n")]
        return [value.strip() for each, _, value in lines if each.lower() == name]

    def json(self) -> Any:
        return json.loads(self.body) if self.body else {}

    def send(self, data: bytes) -> None:
        """Send bytes of the response."""
        self._writer.write(data)

    async def drain(self) -> None:
        """Wait until the client reads."""
        await self._writer.drain()

    def answer(self, value: Any, status: int = 200, content_type: str = "application/json") -> None:
        """Send a whole response. A body that is no bytes is sent as JSON."""
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        head = f"HTTP/1.1 {status} Status\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
        self.send(head.encode() + body)

    def chat(self, model: str) -> None:
        """Answer a chat with one word."""
        choice = {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        self.answer(
            {"id": "c", "object": "chat.completion", "created": 1, "model": model, "choices": [choice], "usage": usage}
        )

    def close(self) -> None:
        """Close the connection once all is sent."""
        self._writer.close()

    def abort(self) -> None:
        """Reset the connection."""
        self._writer.transport.abort()

    @property
    def is_closed(self) -> bool:
        return self._writer.is_closing()

    async def left(self) -> None:
        """Wait until the client has closed the connection."""
        with suppress(OSError):
            await self._reader.read()


async def read_request(
    reader: asyncio.StreamReader, writer: Any, begun: Callable[[bytes], None] = lambda head: None
) -> Exchange:
    """The next request of a connection. `begun` is told its head."""
    head = await reader.readuntil(b"\r\n\r\n")
    begun(head)
    exchange = Exchange(head, b"", reader, writer)
    if "content-length" in exchange.headers:
        exchange.body = await reader.readexactly(int(exchange.headers["content-length"]))
    elif "transfer-encoding" in exchange.headers:  # as Envoy sends bodies in its full-duplex mode
        while size := int(await reader.readline(), 16):
            exchange.body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    return exchange


class ScriptedEngine:
    """An engine whose health checks succeed. A completion gets the pieces `reply`, and then `then` happens.

    Those who inherit answer otherwise by `get` and `complete`.
    """

    def __init__(self, reply: bytes | Sequence[bytes] = whole(), then: str = "keep") -> None:
        self.reply = reply
        self.then = then
        """"keep", "close" or "reset" the connection, or "stall" until the client closes it."""
        self.keeps_alive = True
        """A connection may have more than one health check."""
        self.num_open = 0
        """Completions in progress."""
        self.num_sent = 0
        """Bytes of the present answer that were sent."""
        self.request = b""
        """The last completion as it came, head and body."""
        self.heads: list[bytes] = []
        """Of all requests, health checks included."""
        self.bodies: list[dict[str, Any]] = []
        """Of completions."""
        self.keeps_bodies = True
        self.kept: dict[str, bytes] = {}
        """Further paths that can be read, with their answers."""
        self.num_prompt_tokens: int | None = None
        """What /tokenize counts; None: there is no such path."""
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread: threading.Thread | None = None

    # What it answers.

    async def get(self, exchange: Exchange) -> None:
        """Answer what is no completion."""
        if not self.keeps_alive:
            exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            exchange.close()
        elif not exchange.path.startswith("/v1/responses/"):
            exchange.answer({"data": []})
        elif found := self.kept.get(exchange.path):
            exchange.answer(found)
        else:
            exchange.answer({}, 404)

    async def complete(self, exchange: Exchange) -> None:
        """Answer a completion."""
        for piece in (self.reply,) if isinstance(self.reply, bytes) else self.reply:
            for begin in range(0, len(piece), _PIECE_BYTES):
                exchange.send(part := piece[begin : begin + _PIECE_BYTES])
                await exchange.drain()
                self.num_sent += len(part)
            await asyncio.sleep(0)
        if self.then == "stall":
            await exchange.left()
        if self.then == "reset":
            exchange.abort()
        elif self.then != "keep":
            exchange.close()

    # Its connections.

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Start the server in this event loop; returns its URL."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=_MOST_HEAD_BYTES)
        self.port = int(self._server.sockets[0].getsockname()[1])
        self.url = f"http://{host}:{self.port}"
        return self.url

    async def stop(self) -> None:
        """Stop the server: no connection is accepted, and those that are open break."""
        self._server.close()
        for writer in list(self._writers):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while not writer.is_closing():
                await self._answer(await read_request(reader, writer, self._begun))
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return
        finally:
            self._writers.discard(writer)
            writer.close()

    def _begun(self, head: bytes) -> None:
        if head.startswith(b"POST"):
            self.request, self.num_sent = head, 0

    async def _answer(self, exchange: Exchange) -> None:
        if self.keeps_bodies:
            self.heads.append(exchange.head)
        if exchange.method == "GET":
            await self.get(exchange)
        elif exchange.path == "/tokenize" and self.num_prompt_tokens is not None:
            exchange.answer({"count": self.num_prompt_tokens})
        else:
            self.request = exchange.head + exchange.body
            if self.keeps_bodies:
                self.bodies.append(exchange.json())
            self.num_open += 1
            try:
                await self.complete(exchange)
            finally:
                self.num_open -= 1

    # In a thread of its own.

    def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Start the server in a thread."""
        listening: Future[str] = Future()

        async def serve() -> None:
            self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
            try:
                listening.set_result(await self.listen(host, port))
            except OSError as error:
                listening.set_exception(error)
                return
            await self._end.wait()
            for _ in range(3):  # a connection may have been accepted as the server closed
                await self.stop()
                await asyncio.sleep(0.01)

        self._thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
        self._thread.start()
        listening.result()

    def close(self) -> None:
        """Stop the server of the thread, and the thread."""
        if self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join()


async def opened(gate: threading.Event) -> None:
    """Wait until the test opens the gate."""
    while not gate.is_set():
        await asyncio.sleep(0.005)


E = TypeVar("E", bound=ScriptedEngine)


@contextmanager
def running(engine: E) -> Iterator[E]:
    """The engine in a thread, until the test has ended."""
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


def started(reply: bytes = b"", then: str = "close") -> ScriptedEngine:
    """An engine in a thread, none of whose connections has more than one request."""
    made = ScriptedEngine(reply, then)
    made.keeps_alive = made.keeps_bodies = False
    made.start()
    return made


class GatedEngine(ScriptedEngine):
    """Answers at once, but for streams: the first token comes at once, the rest once the gate is open."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.start(host, port)

    async def get(self, exchange: Exchange) -> None:
        exchange.answer({"object": "list", "data": [{"id": "qwen3-8b"}]} if exchange.path == "/v1/models" else {})

    async def complete(self, exchange: Exchange) -> None:
        if not exchange.json().get("stream"):
            exchange.answer({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})
            return
        exchange.send(OK + framed(CHUNK))
        await opened(self.gate)
        exchange.send(framed(CHUNK) + DONE)
