"""Chats whose prompt an engine renders (llama.cpp), for the engine that continues the answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("httptools")

from headway.gateway.upstream import engine as engine_module
from in_memory import run
from relay_alone import OrderedScheduler, chat_request, engine, relay_of
from scripted import DONE, OK, Exchange, chunk, event


def _text(text: str) -> bytes:
    return event(
        {"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": None}]}
    )


class _Llama:
    """A llama.cpp server in memory: streams some text, then breaks off or ends."""

    def __init__(self, events: list[bytes], rendered: str | None, is_last: bool = False) -> None:
        self._events, self._rendered, self._is_last = events, rendered, is_last
        self.bodies: list[Any] = []
        self.num_rendered = 0

    async def __call__(self, exchange: Exchange) -> None:
        if exchange.path == "/apply-template":
            self.num_rendered += 1
            if self._rendered is not None:
                exchange.answer(json.dumps({"prompt": self._rendered}).encode())
            return  # else it is busy, and does not answer
        self.bodies.append(json.loads(exchange.body))
        exchange.send(OK)
        for each in self._events:
            exchange.send(each)
            await asyncio.sleep(0.01)
        exchange.send(DONE) if self._is_last else exchange.close()


def _relayed(*servers: _Llama) -> tuple[str, list[tuple[str, str]]]:
    """What the client gets of a stream, and the reports about the servers."""

    async def story() -> tuple[str, list[tuple[str, str]]]:
        scheduler = OrderedScheduler([engine(i, each, "llama.cpp") for i, each in enumerate(servers)])
        relay, writer, health = relay_of(chat_request(stream=True), scheduler)
        await relay.run()
        assert writer.events()[-1] == "[DONE]" and not any("error" in each for each in writer.events()[:-1])
        return writer.text(), health.reports

    return run(story())  # type: ignore[no-any-return]


def test_the_prompt_is_known_before_it_is_needed() -> None:
    """The server that continues the answer is too busy to render."""
    first = _Llama([event(chunk(text)) for text in ("one ", "two ", "three ")], "<hi>")
    second = _Llama([_text("four")], None, is_last=True)
    text, reports = _relayed(first, second)
    assert text == "one two three four" and second.num_rendered == 0
    assert second.bodies[0]["prompt"] == "<hi>one two three "
    assert reports == [("pool/0", "broke off the connection"), ("pool/1", "succeeded")]


def test_the_next_server_renders_if_the_first_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    first = _Llama([event(chunk(text)) for text in ("one ", "two ")], None)
    second = _Llama([_text("three")], "<hi>", is_last=True)
    monkeypatch.setattr("headway.gateway.relay.engine_request._RENDER_S", 0.01)
    text, _ = _relayed(first, second)
    assert text == "one two three" and second.num_rendered == 1


def test_slow_rendering_is_no_failure_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_TEMPLATE_TIMEOUT_S", 0.05)

    async def story() -> None:
        slow = engine(0, _Llama([], None), "llama.cpp")
        assert await slow.render_chat({}) is None

    run(story())
