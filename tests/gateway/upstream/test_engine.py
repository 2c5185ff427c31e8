"""What the gateway reads from engines besides completions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest

pytest.importorskip("httptools")

from headway.gateway.settings import Api
from headway.gateway.upstream.client import Client
from headway.gateway.upstream.dialects import ADAPTERS, Load
from headway.gateway.upstream.engine import EngineEndpoint
from headway.gateway.upstream.errors import EngineError, RefusedError
from in_memory import InMemoryTransport
from scripted import Exchange


def endpoint(api: Api, pages: dict[str, bytes], bodies: list[Any] | None = None) -> EngineEndpoint:
    """An engine that answers these paths, and others with status 404."""

    async def serve(exchange: Exchange) -> None:
        if exchange.body and bodies is not None:
            bodies.append(json.loads(exchange.body))
        page = pages.get(exchange.path)
        exchange.answer(b"not found" if page is None else page, 404 if page is None else 200)

    client = Client("http://engine", transport=InMemoryTransport(serve))
    return EngineEndpoint(3, "pool", "qwen", "http://engine", ADAPTERS[api], 4096, client)


def run(story: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(story)


def test_the_name_is_pool_and_number() -> None:
    assert endpoint("vllm", {}).name == "pool/3"


def test_a_health_check_fails_by_its_status() -> None:
    run(endpoint("vllm", {"/health": b""}).check_health(5.0))
    with pytest.raises(RefusedError, match="answered 404"):
        run(endpoint("vllm", {}).check_health(5.0))


@pytest.mark.parametrize(
    ("page", "name", "context"),
    [
        (b'{"data":[{"id":"other"},{"id":"qwen","max_model_len":1000}]}', "qwen", 1000),
        (b'{"data":[{"id":"/models/q","max_model_len":99999}]}', "/models/q", 4096),
        (b'{"data":[{"id":"q"}]}', "q", 4096),
        (b'{"data":[]}', None, 4096),
        (b"none", None, 4096),
    ],
)
def test_the_models_name_and_longest_request(page: bytes, name: str | None, context: int) -> None:
    engine = endpoint("vllm", {"/v1/models": page})
    run(engine.read_details(5.0))
    assert (engine.reported_model, engine.max_context_tokens) == (name, context)


def test_the_load_is_unknown_without_metrics() -> None:
    assert run(endpoint("openai", {}).read_load(5.0)) is None
    assert run(endpoint("vllm", {}).read_load(5.0)) is None
    assert run(endpoint("vllm", {"/metrics": b"vllm:num_requests_running 2\n"}).read_load(5.0)) == Load(running=2)


def test_a_canary_is_a_completion_of_one_token() -> None:
    bodies: list[Any] = []
    engine = endpoint("vllm", {"/v1/completions": b"{}"}, bodies)
    engine.reported_model = "/models/q"
    run(engine.run_canary(5.0))
    assert bodies == [{"model": "/models/q", "prompt": "a", "max_tokens": 1}]
    run(endpoint("vllm", {}).run_canary(5.0))  # an engine without completions is not down


def test_the_canary_of_a_single_phase_engine_needs_no_partner() -> None:
    engine = endpoint("sglang", {"/health_generate": b""})
    engine.is_single_phase = True
    run(engine.run_canary(5.0))
    engine = endpoint("sglang", {})
    engine.is_single_phase = True
    with pytest.raises(RefusedError):
        run(engine.run_canary(5.0))


def test_chats_are_rendered_by_engines_that_can() -> None:
    assert run(endpoint("llama.cpp", {"/apply-template": b'{"prompt":"<hi>"}'}).render_chat({})) == "<hi>"
    assert run(endpoint("llama.cpp", {}).render_chat({})) is None
    assert run(endpoint("vllm", {"/apply-template": b'{"prompt":"<hi>"}'}).render_chat({})) is None
    with pytest.raises(EngineError, match="rendered no prompt"):
        run(endpoint("llama.cpp", {"/apply-template": b"{}"}).render_chat({}))


@pytest.mark.parametrize(
    ("api", "pages", "counted", "sent"),
    [
        ("vllm", {"/tokenize": b'{"count":7}'}, 7, {"messages": [1], "model": "qwen"}),
        ("vllm", {"/tokenize": b"none"}, None, {"messages": [1], "model": "qwen"}),
        ("vllm", {}, None, {"messages": [1], "model": "qwen"}),
        (
            "llama.cpp",
            {"/tokenize": b'{"tokens":[1,2]}', "/apply-template": b'{"prompt":"<hi>"}'},
            2,
            {"content": "<hi>", "add_special": True, "model": "qwen"},
        ),
        ("llama.cpp", {"/tokenize": b'{"tokens":[1,2]}'}, None, None),
        ("openai", {}, None, None),
    ],
)
def test_a_prompt_is_counted_by_engines_that_can(
    api: Api, pages: dict[str, bytes], counted: int | None, sent: Any
) -> None:
    bodies: list[Any] = []
    assert (
        run(endpoint(api, pages, bodies).count_tokens({"messages": [1], "temperature": 0, "stream": True})) == counted
    )
    assert sent is None or bodies[-1] == sent


def test_the_number_of_slots() -> None:
    assert run(endpoint("llama.cpp", {"/props": b'{"total_slots":4}'}).read_num_slots(5.0)) == 4
    for pages in ({}, {"/props": b"{}"}, {"/props": b'{"total_slots":0}'}):
        with pytest.raises(EngineError, match="reports no slots"):
            run(endpoint("llama.cpp", pages).read_num_slots(5.0))


@pytest.mark.parametrize(
    ("info", "port"),
    [
        (b'{"disaggregation_mode":"prefill","disaggregation_bootstrap_port":9001}', 9001),
        (b'{"disaggregation_mode":"prefill"}', 8998),
        (b"{}", 8998),
        (b"none", 0),
    ],
)
def test_the_bootstrap_port(info: bytes, port: int) -> None:
    engine = endpoint("sglang", {"/get_server_info": info})
    run(engine.read_bootstrap_port("prefill", 5.0))
    assert engine.bootstrap_port == port


@pytest.mark.parametrize(("mode", "words"), [("decode", "for decode"), ("null", "for both phases")])
def test_an_engine_of_another_phase_is_an_error(mode: str, words: str) -> None:
    engine = endpoint("sglang", {"/get_server_info": json.dumps({"disaggregation_mode": mode}).encode()})
    with pytest.raises(EngineError, match=f"was started {words}"):
        run(engine.read_bootstrap_port("prefill", 5.0))
