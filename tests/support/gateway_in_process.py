"""A gateway inside the test's own process, with engines that send scripted bytes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import serving
from headway import serving as composition
from headway.gateway.gateway import Gateway
from headway.gateway.server.app import application
from headway.gateway.telemetry.recording import Recording
from scripted import ScriptedEngine

HANG_S = 60.0


class Reply:
    """The response that a client got."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.is_whole = False

    async def send(self, message: Any) -> None:
        """ASGI's `send`."""
        assert not self.is_whole, "a message after the end of the response"
        if message["type"] == "http.response.start":
            assert not self.status, "a second start"
            self.status = message["status"]
            self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
        else:
            assert self.status, "a body before the start"
            self.body += message.get("body", b"")
            self.is_whole = not message.get("more_body", False)

    def events(self) -> list[Any]:
        """The data of each event; "[DONE]" as such."""
        payloads = [part[6:] for part in self.body.split(b"\n\n") if part.startswith(b"data: ")]
        return ["[DONE]" if payload == b"[DONE]" else json.loads(payload) for payload in payloads]

    def error(self) -> dict[str, Any]:
        """OpenAI's error object, which must be the whole body."""
        body = json.loads(self.body)
        assert set(body) == {"error"} and {"message", "type", "param", "code"} <= set(body["error"])
        return body["error"]  # type: ignore[no-any-return]


async def send_request(
    app: Any,
    path: str,
    body: Any,
    send: Any,
    headers: Any = (),
    gone: asyncio.Event | None = None,
    method: str = "POST",
) -> None:
    """Send a request to an ASGI application, whose messages `send` takes. A body that is no bytes is sent as JSON.

    The client disconnects when `gone` is set.
    """
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = False

    async def receive() -> Any:
        nonlocal sent
        if sent:
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}
        sent = True
        return {"type": "http.request", "body": raw, "more_body": False}

    pairs = [(name.encode(), value if isinstance(value, bytes) else value.encode()) for name, value in headers]
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": pairs,
        "query_string": b"",
        "root_path": "",
        "app": app,
        "http_version": "1.1",
        "scheme": "http",
        "server": ("h", 1),
        "client": ("c", 1),
    }
    await app(scope, receive, send)


class Inside:
    """A gateway and scripted engines, in an event loop that runs during the calls of the test."""

    def __init__(
        self,
        folder: Path,
        num_engines: int = 1,
        write: Callable[..., Path] = serving.fleet_file,
        engine: type[ScriptedEngine] = ScriptedEngine,
        **sections: Any,
    ) -> None:
        self.runner = asyncio.Runner()
        self.faults: list[str] = []
        """Unhandled exceptions and logged errors."""
        self.runner.get_loop().set_exception_handler(lambda loop, context: self.faults.append(str(context)))
        self._log = _Errors(self.faults)
        logging.getLogger().addHandler(self._log)
        self.engines: list[Any] = [engine() for _ in range(num_engines)]
        self.urls = [self.runner.run(engine.listen()) for engine in self.engines]
        path = write(folder, self.urls, **sections)
        self.app = application(self._make(path), lambda gateway: None)
        self._life = self.app.router.lifespan_context(self.app)
        self.run(self._life.__aenter__())
        self.run(self.until(lambda: self.gateway.num_up == num_engines))

    def _make(self, path: Path) -> Any:
        def make() -> Gateway:
            self.gateway = Gateway(composition.load(path)[1], Recording(enabled=False))
            return self.gateway

        return make

    def run(self, what: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end, with a time limit."""

        async def soon() -> Any:
            async with asyncio.timeout(HANG_S):
                return await what

        return self.runner.run(soon())

    async def until(self, true: Any) -> None:
        """Wait until a condition holds."""
        while not true():
            await asyncio.sleep(0.001)

    async def post(
        self,
        body: Any,
        path: str = "/v1/chat/completions",
        headers: Any = (),
        gone: asyncio.Event | None = None,
        method: str = "POST",
    ) -> Reply:
        """Send a request. The client disconnects when `gone` is set."""
        reply = Reply()
        await send_request(self.app, path, body, reply.send, headers, gone, method)
        return reply

    def chat(self, stream: bool = False, headers: Any = (), **options: Any) -> Reply:
        """Send a chat of one message."""
        messages = [{"role": "user", "content": "hello there"}]
        body = {"model": serving.MODEL, "messages": messages, "stream": stream, **options}
        return self.run(self.post(body, headers=headers))  # type: ignore[no-any-return]

    @property
    def num_in_flight(self) -> int:
        """Requests in flight by the gateway's count."""
        return sum(replica.num_in_flight for replica in self.gateway.replicas)

    def close(self) -> None:
        """Stop the gateway and the engines."""
        self.run(self._life.__aexit__(None, None, None))
        for engine in self.engines:
            self.run(engine.stop())
        logging.getLogger().removeHandler(self._log)
        self.runner.close()


class _Errors(logging.Handler):
    """Keeps logged errors."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._faults = faults

    def emit(self, record: logging.LogRecord) -> None:
        self._faults.append(self.format(record))
