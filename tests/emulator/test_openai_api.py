"""What OpenAI's own client gets from an emulated engine: tools, schemas, several choices, embeddings, responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx2")

from headway.catalog import engine, gpu, model  # noqa: E402
from headway.cli import main  # noqa: E402
from headway.core.fleet import Parallel, Pool  # noqa: E402
from headway.emulator.completion import SurfaceConfig  # noqa: E402
from headway.emulator.engine import EmulatedEngine  # noqa: E402
from headway.emulator.vllm import application  # noqa: E402
from headway.policies.ordering.fcfs import FcfsOrdering  # noqa: E402

POOL = Pool("emulated", model("qwen3-8b"), gpu("h100"), engine("vllm-0.15"), Parallel(1))
MODEL = "qwen3-8b"
SCHEMA = {
    "type": "object",
    "required": ["city", "days"],
    "additionalProperties": False,
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
}
TOOL = {"type": "function", "function": {"name": "forecast", "parameters": SCHEMA}}
CHAT = [{"role": "user", "content": "what is the weather"}]
Case = Callable[[Any], Awaitable[None]]


@asynccontextmanager
async def connected(reasoning_tokens: int) -> AsyncIterator[Any]:
    config = SurfaceConfig(MODEL, output_tokens=20, reasoning_tokens=reasoning_tokens)
    app = application(lambda: EmulatedEngine(POOL, FcfsOrdering(), speed=50.0), config)
    async with app.router.lifespan_context(app):
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        async with openai.AsyncOpenAI(api_key="any", base_url="http://engine/v1", http_client=http) as client:
            yield client


def with_client(case: Case, reasoning_tokens: int = 0) -> None:
    async def run() -> None:
        async with connected(reasoning_tokens) as client:
            await case(client)

    asyncio.run(run())


@pytest.mark.parametrize("reasoning_tokens", [0, 6])
def test_a_required_tool_is_called_with_valid_arguments(reasoning_tokens: int) -> None:
    async def case(client: Any) -> None:
        for choice in ("required", {"type": "function", "function": {"name": "forecast"}}):
            options = {"model": MODEL, "messages": CHAT, "tools": [TOOL], "tool_choice": choice}
            answer = await client.chat.completions.create(**options)
            (call,) = answer.choices[0].message.tool_calls
            assert (call.function.name, answer.choices[0].finish_reason) == ("forecast", "tool_calls")
            arguments = json.loads(call.function.arguments)
            assert arguments.keys() == {"city", "days"} and arguments["days"] >= 1
            stream = await client.chat.completions.create(
                **options, stream=True, stream_options={"include_usage": True}
            )
            deltas, usage = [], None
            async for chunk in stream:
                deltas += [call for choice in chunk.choices for call in choice.delta.tool_calls or []]
                usage = chunk.usage or usage
            assert [call.function.name for call in deltas if call.function.name] == ["forecast"]
            assert len({call.id for call in deltas if call.id}) == 1
            assert json.loads("".join(call.function.arguments for call in deltas)) == arguments
            assert usage is not None and usage.completion_tokens == answer.usage.completion_tokens

    with_client(case, reasoning_tokens)


def test_tools_are_left_alone_by_default() -> None:
    async def case(client: Any) -> None:
        answer = await client.chat.completions.create(model=MODEL, messages=CHAT, tools=[TOOL])
        assert answer.choices[0].message.content and answer.choices[0].message.tool_calls is None

    with_client(case)


def test_a_schema_determines_the_answer() -> None:
    async def case(client: Any) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
        answer = await client.chat.completions.create(model=MODEL, messages=CHAT, response_format=form)
        assert json.loads(answer.choices[0].message.content).keys() == {"city", "days"}
        assert answer.choices[0].finish_reason == "stop"
        cut = await client.chat.completions.create(model=MODEL, messages=CHAT, response_format=form, max_tokens=2)
        assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 2
        assert answer.choices[0].message.content.startswith(cut.choices[0].message.content)
        free = await client.chat.completions.create(model=MODEL, messages=CHAT, response_format={"type": "json_object"})
        assert isinstance(json.loads(free.choices[0].message.content), dict)

    with_client(case)


def test_several_choices_differ_and_are_all_counted() -> None:
    async def case(client: Any) -> None:
        answer = await client.chat.completions.create(model=MODEL, messages=CHAT, n=3)
        texts = [choice.message.content for choice in answer.choices]
        assert [choice.index for choice in answer.choices] == [0, 1, 2] and len(set(texts)) == 3
        assert answer.usage.completion_tokens == 60
        streamed = ["", "", ""]
        async for chunk in await client.chat.completions.create(model=MODEL, messages=CHAT, n=3, stream=True):
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
        assert streamed == texts

    with_client(case)


def test_log_probabilities() -> None:
    async def case(client: Any) -> None:
        answer = await client.chat.completions.create(model=MODEL, messages=CHAT, logprobs=True, top_logprobs=3)
        choice = answer.choices[0]
        assert "".join(each.token for each in choice.logprobs.content) == choice.message.content
        for each in choice.logprobs.content:
            values = [top.logprob for top in each.top_logprobs]
            assert values == sorted(values, reverse=True) and values[0] == each.logprob and len(values) == 3
        plain = await client.completions.create(model=MODEL, prompt="once upon a time", logprobs=2, max_tokens=5)
        assert len(plain.choices[0].logprobs.tokens) == 5 and plain.choices[0].logprobs.text_offset[0] == 0

    with_client(case)


def test_embeddings() -> None:
    async def case(client: Any) -> None:
        several = await client.embeddings.create(model=MODEL, input=["a cat", "a cat", "the moon rises"])
        one, same, other = (each.embedding for each in several.data)
        assert one == same != other and sum(value * value for value in one) == pytest.approx(1.0, abs=1e-5)
        plain = await client.embeddings.create(model=MODEL, input="a cat", encoding_format="float", dimensions=8)
        assert len(plain.data[0].embedding) == 8 and plain.usage.prompt_tokens == 2
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            await client.embeddings.create(model=MODEL, input="a cat", dimensions=0)

    with_client(case)


@pytest.mark.parametrize("reasoning_tokens", [0, 6])
def test_responses(reasoning_tokens: int) -> None:
    async def case(client: Any) -> None:
        answer = await client.responses.create(model=MODEL, input="what is the weather", instructions="be brief")
        assert answer.status == "completed" and answer.output_text and answer.usage.output_tokens == 20
        assert (answer.output[0].type == "reasoning") is bool(reasoning_tokens)
        events = [event async for event in await client.responses.create(model=MODEL, input=CHAT, stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == events[-1].response.output_text and events[-1].type == "response.completed"
        cut = await client.responses.create(model=MODEL, input=CHAT, max_output_tokens=8)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")

    with_client(case, reasoning_tokens)


def test_responses_with_tools_and_schemas() -> None:
    async def case(client: Any) -> None:
        tool = {"type": "function", "name": "forecast", "parameters": SCHEMA, "strict": True}
        options = {"model": MODEL, "input": CHAT, "tools": [tool], "tool_choice": "required"}
        answer = await client.responses.create(**options)
        assert (answer.output[0].type, answer.output[0].name) == ("function_call", "forecast")
        arguments = json.loads(answer.output[0].arguments)
        assert arguments.keys() == {"city", "days"}
        events = [event async for event in await client.responses.create(**options, stream=True)]
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert json.loads("".join(deltas)) == arguments
        form = {"format": {"type": "json_schema", "name": "trip", "schema": SCHEMA}}
        formed = await client.responses.create(model=MODEL, input=CHAT, text=form)
        assert json.loads(formed.output_text).keys() == {"city", "days"}

    with_client(case)


def test_scores_and_tokens() -> None:
    async def case(client: Any) -> None:
        async def post(path: str, **body: Any) -> Any:
            return await client.post(path, body=body, cast_to=object)

        ranked = await post("/rerank", query="a cat", documents=["the moon", "a cat sat"], top_n=1)
        assert [each["index"] for each in ranked["results"]] == [1]
        scored = await post("/score", text_1="a cat", text_2=["a cat", "the moon"])
        best, worst = (each["score"] for each in scored["data"])
        assert best == pytest.approx(1.0) and worst < 0.9
        counted = await client.post("http://engine/tokenize", body={"prompt": "a w7 cat"}, cast_to=object)
        assert counted["count"] == 3 and counted["tokens"][1] == 7
        text = await client.post("http://engine/detokenize", body={"tokens": [7]}, cast_to=object)
        assert text["prompt"] == " w7"

    with_client(case)


@pytest.mark.parametrize(
    "body",
    [
        {"n": 0},
        {"n": 1.5},
        {"tools": [1], "tool_choice": "required"},
        {"tools": [], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"response_format": {"type": "yaml"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"pattern": "a"}}}},
    ],
)
def test_requests_that_cannot_be_followed(body: dict[str, Any]) -> None:
    async def case(client: Any) -> None:
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model=MODEL, messages=CHAT, extra_body=body)

    with_client(case)


@pytest.mark.parametrize("name", ["vllm-0.15", "sglang", "vllm-v0", "simulated"])
def test_an_engine_has_the_defaults_of_the_profile_that_it_imitates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each setting of the pool is the profile's, and a prompt is cached if the profile caches prefixes."""
    made: list[Callable[[], EmulatedEngine]] = []
    monkeypatch.setattr("headway.emulator.vllm.application", lambda make, *_: made.append(make))
    monkeypatch.setattr("headway.gateway.server.web_server.serve", lambda _, listener, **__: listener.close())
    assert main(["emulate", "--model", MODEL, "--gpu", "h100", "--engine", name, "--port", "0"]) == 0
    assert main(["emulate", "--model", MODEL, "--gpu", "h100", "--engine", name, "--port", "0",
                 "--no-enable-prefix-caching"]) == 0  # fmt: skip

    async def run() -> None:
        pool = Pool("emulated", model(MODEL), gpu("h100"), engine(name), Parallel(1))
        by_default, without = made[0](), made[1]()
        assert by_default.pool == pool
        assert bool(by_default.blocks_of(list(range(500)), "")) is engine(name).prefix_caching
        assert without.blocks_of(list(range(500)), "") == ()

    asyncio.run(run())
