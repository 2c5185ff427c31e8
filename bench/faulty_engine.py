"""An engine that fails as it is told to: `python bench/faulty_engine.py [--port N] [--interval-s S]`.

It speaks vLLM's dialect and generates known tokens: the answer's token number k is the id 100+k and the text " wk",
whether it is the first engine of an answer or continues another one's. `PUT /fault` with `{"name": ..., ...}` sets the
fault of all further completions, `{}` ends it; `GET /executions` tells how often each request was begun, by its
X-Request-Id. A prompt that contains POISON ends the process. Health checks and metrics are always well.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from typing import Any

import click

POISON = "poison"
FIRST_ID = 100
MODEL = "qwen3-8b"
NEVER_S = 3600.0


def text_of(num_tokens: int) -> str:
    """The text of an answer."""
    return "".join(f" w{k}" for k in range(num_tokens))


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _whole(body: bytes, status: int = 200, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return b"HTTP/1.1 %d S\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (status, size, body)


def _event(value: Any) -> bytes:
    return _chunked(b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n")


class Answer:
    """One completion to be generated."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.is_chat = "messages" in body
        ids = body.get("prompt") if isinstance(body.get("prompt"), list) else []
        self.first = sum(id >= FIRST_ID for id in ids or ())
        """Tokens of the answer that another engine has generated."""
        self.num = int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)
        self.head = {"id": f"cmpl-{os.getpid()}", "created": 1, "model": MODEL}

    @property
    def is_poison(self) -> bool:
        return POISON in json.dumps(self.body.get("messages") or self.body.get("prompt"))

    def chunk(self, k: int, is_last: bool) -> dict[str, Any]:
        """The event with the answer's token number k."""
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "length" if is_last else None,
            "token_ids": [FIRST_ID + k],
        }
        choice |= {"delta": {"content": f" w{k}"}} if self.is_chat else {"text": f" w{k}"}
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        first = {"prompt_token_ids": [1, 2, 3]} if k == self.first else {}
        return {**self.head, "object": kind, "choices": [choice], **first}

    def usage(self, num: int) -> dict[str, Any]:
        return {"prompt_tokens": 3 + self.first, "completion_tokens": num, "total_tokens": 3 + self.first + num}

    def whole(self) -> bytes:
        """The answer that is not streamed."""
        text = "".join(f" w{k}" for k in range(self.first, self.first + self.num))
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        return json.dumps({**self.head, "choices": [choice], "usage": self.usage(self.num)}).encode()


class FaultyEngine:
    """The server."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._fault: dict[str, Any] = {}
        self._executions: Counter[str] = Counter()
        self._num_gone = 0
        """Streams whose clients left."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode("latin-1").split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path = lines[0].split(" ")[:2]
                if method == "POST":
                    self._executions[headers.get("x-request-id", "")] += 1
                    if not await self._complete(json.loads(body), reader, writer):
                        break
                else:
                    writer.write(self._answer_about(method, path, body))
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    def _answer_about(self, method: str, path: str, body: bytes) -> bytes:
        if path == "/fault" and method == "PUT":
            self._fault = json.loads(body)
        if path == "/executions":
            return _whole(json.dumps(self._executions).encode())
        if path == "/gone":
            return _whole(json.dumps(self._num_gone).encode())
        if path == "/health" and self._fault.get("name") == "sick":
            return _whole(b"{}", 503)
        if path == "/v1/models":
            return _whole(json.dumps({"data": [{"id": MODEL}]}).encode())
        return _whole(b"{}" if path != "/metrics" else b"")

    async def _complete(self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer a completion. False: close the connection."""
        answer, fault = Answer(body), self._fault
        if answer.is_poison:
            await asyncio.sleep(fault.get("delay_s", 0.0))
            os._exit(1)
        match fault.get("name"):
            case "close":
                return False
            case "sick":
                writer.write(_whole(b'{"error": {"message": "sick"}}', 503))
                return True
            case "hang":
                await asyncio.sleep(NEVER_S)
            case "status":
                writer.write(_whole(b'{"error": {"message": "as asked for"}}', int(fault["status"])))
                return True
            case "garbage":
                writer.write(os.urandom(512))
                return False
            case "short":
                writer.write(_whole(answer.whole(), length=1 << 16))
                return False
            case "long":
                writer.write(_whole(answer.whole() + b"x" * 64, length=64))
                return True
        if not body.get("stream"):
            await asyncio.sleep(self._interval_s * answer.num)
            writer.write(_whole(answer.whole()))
            return True
        return await self._stream(answer, fault, reader, writer)

    async def _stream(
        self, answer: Answer, fault: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        name = fault.get("name")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        k, end = answer.first, answer.first + answer.num
        while k < end or name == "endless":
            if reader.at_eof() or writer.is_closing():
                self._num_gone += 1
                return False
            if name in ("stall", "garbage event", "cut", "error event", "no done") and (
                k - answer.first == fault.get("after", 5)
            ):
                if name == "stall":
                    await writer.drain()
                    await asyncio.sleep(NEVER_S)
                if name == "cut":
                    return False
                if name == "error event":
                    writer.write(_event({"error": {"message": "as asked for", "code": 500}}) + _event(b"[DONE]"))
                if name in ("error event", "no done"):
                    writer.write(b"0\r\n\r\n")
                    return True
                writer.write(_event(b'{"choices": [{"delta": '))
            writer.write(_event(answer.chunk(k, k == end - 1 and name != "endless")))
            await writer.drain()
            k += 1
            await asyncio.sleep(self._fault.get("interval_s", self._interval_s))  # until the fault ends
        if (answer.body.get("stream_options") or {}).get("include_usage"):
            writer.write(_event({**answer.head, "choices": [], "usage": answer.usage(answer.num)}))
        writer.write(_event(b"[DONE]"))
        if name == "after done":
            writer.write(_event(answer.chunk(k, False)) + _event(b"[DONE]"))
        writer.write(b"0\r\n\r\n")
        return True


async def run(port: int, interval_s: float) -> None:
    """Serve until killed, and print the address first."""
    server = await asyncio.start_server(FaultyEngine(interval_s).serve, "127.0.0.1", port, limit=1 << 26)
    click.echo(f"listening on http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    await server.serve_forever()


@click.command()
@click.option("--port", default=0)
@click.option("--interval-s", default=0.005, help="Time between two tokens.")
def main(port: int, interval_s: float) -> None:
    asyncio.run(run(port, interval_s))


if __name__ == "__main__":
    main()
