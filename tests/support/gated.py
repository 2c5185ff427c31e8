"""An engine in a thread of this process whose streams begin, and go on when they are told to."""

from __future__ import annotations

import threading

from scripted import CHUNK, OK, Exchange, ScriptedEngine, framed, opened

MODEL = "qwen3-8b"
_ANSWER = {"object": "chat.completion", "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}


class GatedEngine(ScriptedEngine):
    """Answers at once, but for streams: the first token comes at once, the rest once the gate is open."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.start(host, port)

    async def get(self, exchange: Exchange) -> None:
        exchange.answer({"object": "list", "data": [{"id": MODEL}]} if exchange.path == "/v1/models" else {})

    async def complete(self, exchange: Exchange) -> None:
        if not exchange.json().get("stream"):
            exchange.answer(_ANSWER)
            return
        exchange.send(OK + framed(CHUNK))
        await opened(self.gate)
        exchange.send(framed(CHUNK) + framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")
