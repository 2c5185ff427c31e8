"""The ends of streams: engines that go on after [DONE] or beyond `max_tokens`, streams that break at their limit."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("httptools")

from headway.gateway.settings import Api
from headway.gateway.upstream.engine import EngineEndpoint
from in_memory import run, streaming
from relay_alone import KeepingWriter, OrderedScheduler, chat_request, engine, relay_of
from scripted import OK, Exchange, chunk, event


def _relayed(engines: list[EngineEndpoint], **options: Any) -> KeepingWriter:
    async def story() -> KeepingWriter:
        relay, writer, _ = relay_of(chat_request(stream=True, **options), OrderedScheduler(engines))
        await relay.run()
        return writer

    return run(story())  # type: ignore[no-any-return]


def test_events_after_done_are_dropped() -> None:
    async def serve(exchange: Exchange) -> None:
        exchange.send(OK + event(chunk("so")) + event(b"[DONE]") + event(chunk("much")) + event(b"[DONE]"))
        exchange.send(event(chunk("more")) + b"0\r\n\r\n")

    writer = _relayed([engine(0, serve)])
    assert writer.text() == "so" and writer.events().count("[DONE]") == 1 and writer.events()[-1] == "[DONE]"


@pytest.mark.parametrize(("api", "num"), [("vllm", 10), ("openai", 36)])
@pytest.mark.parametrize("wants_usage", [False, True])
def test_an_engine_that_never_ends_is_stopped(api: Api, num: int, wants_usage: bool) -> None:
    """Exactly at `max_tokens` where tokens are counted; where chunks are, a token may be two."""
    closed: list[bool] = []

    async def serve(exchange: Exchange) -> None:
        exchange.send(OK)
        for k in range(200):
            exchange.send(event(chunk("x", token=k if api == "vllm" else None)))
        await exchange.left()
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


@pytest.mark.parametrize("num_silent", [0, 1, 2])
@pytest.mark.parametrize("breaks", [1, 2])
def test_an_answer_that_is_continued_after_its_reasoning_has_all_of_its_tokens(num_silent: int, breaks: int) -> None:
    """Tokens without text are generated again, and count once; also if the second engine breaks among them."""
    bodies: list[Any] = []
    silent = [_reply("", 7 + k) for k in range(num_silent)]
    first = chunk("", token=6, prompt_token_ids=[1, 2])
    first["choices"][0]["delta"] = {"reasoning": "so"}
    rest = [_reply("</think>" if k == 0 else f" w{k}", 20 + k) for k in range(6 - num_silent - 1)]
    rest[-1]["choices"][0]["finish_reason"] = "length"
    told = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}
    engines = [
        engine(0, streaming(first, *(chunk("", token=7 + k) for k in range(num_silent)), end=None)),
        *[
            engine(each, streaming(*silent[:1], {"error": {"message": "broken", "code": 500}}))
            for each in range(1, breaks)
        ],
        engine(breaks, streaming(*silent, *rest, told, bodies=bodies)),
    ]
    writer = _relayed(engines, max_tokens=6, return_token_ids=True, stream_options={"include_usage": True})
    assert (bodies[0]["prompt"], bodies[0]["max_tokens"]) == ([1, 2, 6], 5)
    choices = [each["choices"][0] for each in writer.events() if each != "[DONE]" and each["choices"]]
    assert [choice["finish_reason"] for choice in choices if choice.get("finish_reason")] == ["length"]
    ids = [id for choice in choices for id in choice.get("token_ids") or ()]
    assert ids == [6, *range(7, 7 + num_silent), *range(20, 25 - num_silent)]
    assert writer.text() == "".join(f" w{k}" for k in range(1, 5 - num_silent))
    (usage,) = [each["usage"] for each in writer.events() if each != "[DONE]" and each.get("usage")]
    assert usage["completion_tokens"] == 6


def _reply(text: str, token: int) -> dict[str, Any]:
    return {"id": "d", "choices": [{"index": 0, "text": text, "token_ids": [token], "finish_reason": None}]}


def test_an_answer_that_ends_beyond_its_limit_has_a_finish_reason() -> None:
    """The chunk that is not passed on had it."""
    last = chunk("x", token=3)
    last["choices"][0]["finish_reason"] = "stop"
    last["choices"][0]["token_ids"] = [3, 4]
    writer = _relayed([engine(0, streaming(chunk("w", token=1), chunk("w", token=2), last))], max_tokens=3)
    reasons = [each["choices"][0].get("finish_reason") for each in writer.events() if each != "[DONE]"]
    assert [reason for reason in reasons if reason] == ["length"] and writer.text() == "ww"
