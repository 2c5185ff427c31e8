"""An answer that reasons, from engines that break off at any chunk: nothing is lost, repeated, or of the other kind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

pytest.importorskip("httptools")

from headway.gateway.relay.quarantine import Quarantine
from headway.gateway.relay.request import CHAT, COMPLETIONS
from in_memory import Serve, run
from relay_alone import OrderedScheduler, chat_request, engine, relay_of
from scripted import DONE, OK, Exchange, event

PROMPT = [1, 2]
TAG = "</think>"
WORDS = ["so ", "it ", "is "]
ANSWER = ["\n\n", "yes", " it", " is"]
SEQUENCES = {"one": [*WORDS, TAG, *ANSWER], "pieces": [*WORDS, "</", "think", ">", *ANSWER]}
"""The texts of all tokens: the tag is a token, or several."""


class Model:
    """Streams a fixed sequence of tokens, from where the prompt's ids end, as chats and as completions."""

    def __init__(self, texts: list[str]) -> None:
        self.texts, self.ids = texts, list(range(10, 10 + len(texts)))
        whole = "".join(texts)
        self.reasoning, _, self.answer = whole.partition(TAG)

    def _chat(self, start: int, end: int) -> dict[str, str]:
        """The delta of these tokens. What may be the tag's begin is kept back."""

        def parts(num: int) -> tuple[str, str]:
            text = "".join(self.texts[:num])
            reasoning, tag, answer = text.partition(TAG)
            if not tag:
                kept = next((n for n in range(len(TAG) - 1, 0, -1) if text.endswith(TAG[:n])), 0)
                reasoning = text[: len(text) - kept]
            return reasoning, answer

        before, after = parts(start), parts(end)
        new = {"reasoning": after[0][len(before[0]) :], "content": after[1][len(before[1]) :]}
        return {name: text for name, text in new.items() if text}

    def chunks(self, path: str, start: int, size: int) -> Iterator[dict[str, Any]]:
        num = len(self.ids)
        for first in range(start, num, size):
            last = min(first + size, num)
            choice: dict[str, Any] = {"index": 0, "token_ids": self.ids[first:last]}
            choice["finish_reason"] = "stop" if last == num else None
            if path == CHAT:
                choice["delta"] = self._chat(first, last)
            else:
                choice["text"] = "".join(self.texts[first:last])
            chunk = {"id": "c", "created": 1, "model": "m", "choices": [choice]}
            yield chunk | ({"prompt_token_ids": PROMPT} if first == 0 else {})

    def engine(self, size: int, num_chunks: int | None, tells: bool = True) -> Serve:
        """Streams chunks of `size` tokens, and breaks off after `num_chunks` of them. `tells`: the text of tokens."""

        async def serve(exchange: Exchange) -> None:
            body = json.loads(exchange.body)
            if exchange.path == "/detokenize":
                text = "".join(self.texts[id - 10] for id in body["tokens"])
                exchange.answer(json.dumps({"prompt": text}).encode(), 200 if tells else 404)
                return
            start = len(body["prompt"]) - len(PROMPT) if exchange.path == COMPLETIONS else 0
            exchange.send(OK)
            for i, chunk in enumerate(self.chunks(exchange.path, start, size)):
                if i == num_chunks:
                    exchange.close()
                    return
                exchange.send(event(chunk))
                await asyncio.sleep(0)
            if num_chunks is None:
                num = len(self.ids)
                usage = {"prompt_tokens": len(PROMPT) + start, "completion_tokens": num - start}
                exchange.send(event({"id": "c", "choices": [], "usage": usage}))
                exchange.send(DONE)
            else:
                exchange.close()

        return serve


async def _events(model: Model, *engines: tuple[Any, ...]) -> list[Any]:
    """The client's events of an answer by engines that break off in turn."""
    options = {"include_usage": True}
    request = chat_request(stream=True, stream_options=options, return_token_ids=True, max_tokens=50)
    quarantine = Quarantine(60.0)
    quarantine.answered(request.raw)  # else a second engine that breaks off is the request's fault
    replicas = [engine(i, model.engine(*each)) for i, each in enumerate(engines)]
    relay, writer, _ = relay_of(request, OrderedScheduler(replicas), 10, quarantine)
    await relay.run()
    *events, done = writer.events()
    assert done == "[DONE]"
    return events


async def _answer(model: Model, *engines: tuple[int, int | None]) -> tuple[str, str, list[int], Any]:
    """Reasoning, content, ids and usage of such an answer."""
    events = await _events(model, *engines)
    assert not any("error" in each for each in events), events
    choices = [choice for each in events for choice in each["choices"]]
    reasoning, content = ("".join(c["delta"].get(key, "") for c in choices) for key in ("reasoning", "content"))
    return reasoning, content, [id for c in choices for id in c.get("token_ids", ())], events[-1]["usage"]


@pytest.mark.parametrize("kind", SEQUENCES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_engines_may_break_off_at_any_chunk(kind: str, size: int) -> None:
    """Chunks of `size` tokens from the first engine, of one to three from the second."""
    model = Model(SEQUENCES[kind])
    num = len(model.ids)

    async def story() -> list[Any]:
        wrong = []
        for first, second_size, second in product(range(1, num // size + 1), (1, 2, 3), range(num)):
            engines = (size, first), (second_size, second), (size, None)
            reasoning, content, ids, usage = await _answer(model, *engines)
            expected = (model.reasoning, model.answer, model.ids, num)
            if (reasoning, content, ids, usage["completion_tokens"]) != expected:
                wrong.append((engines, reasoning, content, ids, usage))
        return wrong

    assert not run(story())


def test_an_answer_that_might_be_taken_for_reasoning_ends_with_an_error() -> None:
    """The last chunk has a word and the end tag, and the next engine does not tell the text of tokens."""
    model = Model(SEQUENCES["one"])
    *chunks, last = run(_events(model, (2, 2), (2, None, False)))
    assert "broke off" in last["error"]["message"]
    assert "".join(chunk["choices"][0]["delta"]["reasoning"] for chunk in chunks) == model.reasoning
    events = run(_events(model, (2, 1), (2, None, False)))
    assert "error" in events[-1], "of several tokens, any may be the tag"
    events = run(_events(model, (1, 3), (2, None, False)))
    assert "error" not in events[-1], "one that brought reasoning is no tag"
