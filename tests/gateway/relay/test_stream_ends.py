"""The ends of streams: engines that go on after [DONE] or beyond `max_tokens`, streams that break at their limit."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("httptools")

from headway.gateway.settings import Api
from headway.gateway.upstream.engine import EngineEndpoint
from in_memory import ServerExchange
from relaying import KeepingWriter, OrderedScheduler, chat_request, engine, relay_of
from streams import HEAD, chunk, event, run, streaming


def _relayed(engines: list[EngineEndpoint], **options: Any) -> KeepingWriter:
    async def story() -> KeepingWriter:
        relay, writer, _ = relay_of(chat_request(stream=True, **options), OrderedScheduler(engines))
        await relay.run()
        return writer

    return run(story())  # type: ignore[no-any-return]


def test_events_after_done_are_dropped() -> None:
    async def serve(exchange: ServerExchange) -> None:
        exchange.send(HEAD + event(chunk("so")) + event(b"[DONE]") + event(chunk("much")) + event(b"[DONE]"))
        exchange.send(event(chunk("more")) + b"0\r\n\r\n")

    writer = _relayed([engine(0, serve)])
    assert writer.text() == "so" and writer.events().count("[DONE]") == 1 and writer.events()[-1] == "[DONE]"


@pytest.mark.parametrize(("api", "num"), [("vllm", 10), ("openai", 36)])
@pytest.mark.parametrize("wants_usage", [False, True])
def test_an_engine_that_never_ends_is_stopped(api: Api, num: int, wants_usage: bool) -> None:
    """Exactly at `max_tokens` where tokens are counted; where chunks are, a token may be two."""
    closed: list[bool] = []

    async def serve(exchange: ServerExchange) -> None:
        exchange.send(HEAD)
        for k in range(200):
            exchange.send(event(chunk("x", token=k if api == "vllm" else None)))
        await exchange.wait_closed()
        closed.append(True)

    writer = _relayed([engine(0, serve, api)], max_tokens=10, stream_options={"include_usage": wants_usage})
    assert writer.text() == "x" * num
    *_, last, done = [each for each in writer.events() if each == "[DONE]" or each["choices"]]
    assert last["choices"][0]["finish_reason"] == "length" and done == "[DONE]"
    usages = [each["usage"] for each in writer.events() if each != "[DONE]" and "usage" in each]
    assert [usage["completion_tokens"] for usage in usages] == [10] * wants_usage


def test_a_stream_that_breaks_at_max_tokens_has_a_finish_reason_and_usage() -> None:
    """The engine had generated all tokens, and not told why it stopped."""
    bodies: list[Any] = []
    tokens = [chunk(f"w{k} ", token=k, prompt_token_ids=[1, 2]) for k in range(3)]
    engines = [engine(0, streaming(*tokens, end=None)), engine(1, streaming(bodies=bodies))]
    writer = _relayed(engines, max_tokens=3, stream_options={"include_usage": True})
    assert not bodies and writer.text() == "w0 w1 w2 "
    finish, usage, done = writer.events()[-3:]
    assert finish["choices"] == [{"index": 0, "delta": {}, "finish_reason": "length"}] and done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert {each["id"] for each in writer.events()[:-1]} == {"c"}
