"""What a request may cost at most: reserved alike in rates, budgets and prices, and never less than what is charged."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from headway import serving
from headway.control.live import Live
from headway.emulator.completion import Completion, SurfaceConfig
from headway.gateway.gateway import Gateway
from headway.gateway.relay.request import CHAT, COMPLETIONS, MEDIA_TOKENS, MESSAGES, RERANK, RESPONSES, SCORE
from headway.gateway.relay.request_reader import read_request
from headway.gateway.telemetry.recording import Recording
from headway.limits.budgets import MostTokens, TokenPrices, dearest_usd, most_tokens

pytest.importorskip("httptools")
pytest.importorskip("sqlalchemy")
from headway.gateway.accounts.budgets import BudgetHold, StoredAccount
from headway.gateway.auth.keys import ApiKeys, RateHold
from headway.gateway.charges import Charges
from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.gateway.settings import Key
from headway.limits.budgets import Budget
from keys import digest

POOL = {"name": "pool", "model": "qwen3-8b", "gpu": "h100", "engine": "vllm-0.15", "endpoints": ["http://127.0.0.1:1"]}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Gateway:
    path = tmp_path_factory.mktemp("fleet") / "fleet.yaml"
    prices = {"usd_per_million_input_tokens": 1.0, "usd_per_million_output_tokens": 2.0}
    path.write_text(yaml.safe_dump({"fleet": [POOL | prices]}))
    _, plan = serving.load(path)

    async def make() -> Gateway:
        made = Gateway(plan, Recording(enabled=False))
        made.fleet.connect(made.fleet.create(plan.pools[0], "http://127.0.0.1:1"))
        return made

    return asyncio.run(make())


def most(gateway: Gateway, path: str, body: dict[str, Any]) -> MostTokens:
    raw = json.dumps({"model": "qwen3-8b", **body}).encode()
    return gateway.admission.most_tokens(read_request(path, raw, {}).features(0.0))


WORDS = st.lists(st.integers(100_000, 999_999), min_size=4, max_size=300).map(
    lambda ids: " ".join(f"w{i}" for i in ids)
)
COUNTS = st.integers(1, 5_000)
LIMITS = st.fixed_dictionaries(
    {"max_tokens": COUNTS},
    optional={
        "max_completion_tokens": st.sampled_from([None, 0, 1, 7, 9_000]),
        "min_tokens": COUNTS,
        "n": st.integers(1, 40),
        "ignore_eos": st.booleans(),
        "stream": st.booleans(),
    },
)


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}


def _chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


@given(WORDS, LIMITS, st.booleans(), st.integers(0, 30))
def test_an_emulated_engine_charges_no_more_than_is_reserved(
    gateway: Gateway, text: str, limits: dict[str, Any], is_chat: bool, reasoning_tokens: int
) -> None:
    body = {**(_chat(text) if is_chat else {"prompt": text}), **limits}
    config = SurfaceConfig("qwen3-8b", output_tokens=20_000, reasoning_tokens=reasoning_tokens)
    completion = Completion(body, is_chat, config)
    reserved = most(gateway, CHAT if is_chat else COMPLETIONS, body)
    assert len(completion.prompt) <= reserved.input
    assert sum(each.output_tokens for each in completion.choices) <= reserved.output


@pytest.mark.parametrize(
    ("path", "body", "least"),
    [
        (CHAT, {**_chat("hi"), "n": 50, "max_tokens": 100}, (1, 5_000)),
        (CHAT, {**_chat("hi"), "n_cmpl": 50, "max_tokens": 100}, (1, 5_000)),
        (COMPLETIONS, {"prompt": "hi", "best_of": 9, "n": 2, "max_tokens": 10}, (1, 90)),
        (COMPLETIONS, {"prompt": ["a", "b"], "n": 3, "max_tokens": 10}, (1, 60)),
        (CHAT, {**_chat("hi"), "max_completion_tokens": 1, "max_tokens": 600}, (1, 600)),
        (CHAT, {**_chat("hi"), "max_completion_tokens": 0, "max_tokens": 600}, (1, 600)),
        (CHAT, {**_chat("hi"), "max_tokens": 5, "min_tokens": 700}, (1, 700)),
        (COMPLETIONS, {"prompt": "hi", "n_predict": 800}, (1, 800)),
        (RESPONSES, {"input": "hi", "max_output_tokens": 900}, (1, 900)),
        (MESSAGES, {**_chat("hi"), "max_tokens": 50, "thinking": {"type": "enabled", "budget_tokens": 800}}, (1, 850)),
        (CHAT, {**_chat("hi"), "max_tokens": 50, "reasoning": {"max_tokens": 300}}, (1, 350)),
        (CHAT, {**_chat("hi"), "max_tokens": 50, "thinking_token_budget": 300}, (1, 350)),
        (COMPLETIONS, {"prompt": [7] * 400, "echo": True, "n": 3, "max_tokens": 1}, (400, 3 * 401)),
        (COMPLETIONS, {"prompt": "word " * 400, "echo": True, "max_tokens": 1}, (500, 501)),
        (COMPLETIONS, {"prompt": [[7] * 300, [8] * 200], "max_tokens": 4}, (500, 8)),
        (CHAT, {**_chat("hi"), "tools": [{"function": {"name": "f", "description": "x" * 40_000}}]}, (9_900, 0)),
        (CHAT, {**_chat("hi"), "response_format": {"json_schema": {"schema": {"title": "x" * 8_000}}}}, (1_900, 0)),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "x" * 8_000}}]}]},
         (1_900, 0)),
        (CHAT, {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}},
            {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        ]}]}, (2 * MEDIA_TOKENS, 0)),
        (MESSAGES, {"max_tokens": 3, "messages": [{"role": "user", "content": [
            {"type": "tool_result", "content": [{"type": "image", "source": {"type": "base64", "data": "A" * 9_000}}]},
            {"type": "document", "source": {"type": "text", "data": "text " * 8_000}},
        ]}]}, (MEDIA_TOKENS + 9_900, 3)),
        (RERANK[0], {"query": "word " * 400, "documents": ["a", "b"] * 50}, (50_000, 0)),
        (RERANK[0], {"query": "word " * 400, "documents": []}, (500, 0)),
        (SCORE[0], {"text_1": ["word " * 400], "text_2": ["word " * 400] * 30}, (30_000, 0)),
        (SCORE[0], {"text_1": ["word " * 400] * 30, "text_2": ["word " * 400] * 30}, (30_000, 0)),
        (SCORE[0], {"queries": "word " * 400, "documents": ["a"] * 10, "text_1": "alone"}, (5_000, 0)),
        (SCORE[0], {"query": {"content": [IMAGE]}, "items": ["a"] * 7}, (7 * MEDIA_TOKENS, 0)),
        (SCORE[0], {"text_1": "a", "text_2": {"content": [IMAGE, IMAGE]}}, (2 * MEDIA_TOKENS, 0)),
    ],
)  # fmt: skip
def test_each_field_that_makes_a_request_dearer_counts(
    gateway: Gateway, path: str, body: dict[str, Any], least: tuple[int, int]
) -> None:
    found = most(gateway, path, body)
    assert least[0] <= found.input < 1.3 * least[0] + 120 and found.output >= least[1]
    assert found.output <= 1.1 * least[1] + 60


def test_a_plain_request_reserves_its_text_and_its_limit(gateway: Gateway) -> None:
    """Not the JSON around it."""
    body = {**_chat("word " * 100), "max_tokens": 20, "temperature": 0.3, "stream": True, "user": "somebody"}
    assert most(gateway, CHAT, body) == MostTokens(round((5 * 100 + 5) / 4), 20)
    assert most(gateway, COMPLETIONS, {"prompt": [5] * 3000, "max_tokens": 20}) == MostTokens(3000, 20)


@settings(max_examples=50)
@given(
    st.integers(1, 1000),
    st.integers(0, 1000),
    st.integers(1, 9),
    st.booleans(),
    st.integers(1, 4),
    st.lists(st.tuples(*[st.floats(0, 50)] * 3), min_size=1, max_size=4),
    st.data(),
)
def test_no_pool_model_or_share_of_cached_tokens_is_dearer(
    prompt: int, output: int, num: int, echoes: bool, stages: int, prices: list[tuple[float, float, float]], data: Any
) -> None:
    """Of all sequences, at each model of a cascade, whichever fallback answers."""
    pools = [(f"m{i}", TokenPrices(*each)) for i, each in enumerate(prices)]
    names = {name: (name,) for name, _ in pools}
    found = most_tokens(prompt, output, num, echoes, stages)
    usd = dearest_usd("m0", found.input, found.output, pools, names, {"m0": [name for name, _ in pools[1:]]})
    charged_tokens, charged_usd = 0, 0.0
    for _ in range(data.draw(st.integers(1, stages))):
        _, price = data.draw(st.sampled_from(pools))
        used = sum(data.draw(st.integers(0, output + prompt * echoes)) for _ in range(num))
        charged_tokens += prompt + used
        charged_usd += price.usd(prompt, used, data.draw(st.integers(0, prompt)))
    assert charged_tokens <= found.total
    assert charged_usd <= usd * (1 + 1e-9) + 1e-12


def test_what_is_used_beyond_a_reservation_is_reserved_as_it_is_used(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer without a limit: other requests of the key find its tokens taken, in rates and budgets."""
    keys = ApiKeys([Key(sha256=digest("k"), tokens_per_minute=1_000)], lambda: 0.0)
    caller, account = keys.caller_of(digest("k")), StoredAccount("key", Budget(2_000, 1.0, "total"))
    request, replica = InFlightRequest(Live(0, 0.0, 10, 1, "qwen3-8b")), gateway.replicas[0]
    request.replica = replica
    request.rate_hold = RateHold(caller, 10)
    request.budget_hold = BudgetHold(caller.owner, "", [account], 10, 0.0)
    unused: Any = None
    pools = {served.pool.name: served for served in gateway.plan.pools}
    monkeypatch.setattr(gateway.admission, "charges", Charges(unused, pools, lambda: gateway.plan))
    for tokens in (0, 300, 900):
        request.live.placed_s, request.live.generated_tokens = 0.0, tokens
        gateway.admission.raise_holds([request])
        held = 10 + tokens
        assert (account.reserved_tokens, request.rate_hold.tokens) == (held, held)
        assert caller.limits()[0].remaining == 1_000 - held
    assert account.reserved_usd == pytest.approx((10 * 1.0 + 900 * 2.0) / 1e6)
    request.rate_hold.settle(910)
    assert caller.limits()[0].remaining == 90
