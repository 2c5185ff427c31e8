"""The gateway's index beside two vLLM servers on a CPU, which count what their prefix caches held: `make vllm-cpu`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("zmq")

from gateway_in_process import Reply, send_request
from headway.gateway.gateway import Gateway
from headway.gateway.kv_events.agreement import MIN_SAMPLES
from vllm_cpu.servers import BLOCK, MARKS, Server, fleet, make_model, show

pytestmark = MARKS
NUM_ENGINES = 2
NUM_CONVERSATIONS, NUM_TURNS, NUM_CLIENTS = 10, 5, 2
WORDS = "the of and to in is that it was for on are with as his they at be this from have or by one had not".split()


def counts(server: Server) -> tuple[int, int]:
    """Prompt tokens that were looked up in the prefix cache, and that it held, by the engine's own counters."""
    found = [server.metric(rf"vllm:prefix_cache_{name}_total\S* (\S+)") for name in ("queries", "hits")]
    queries, hits = (int(float(each[0])) if each else 0 for each in found)
    return queries, hits


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Server]]]:
    folder = tmp_path_factory.mktemp("vllm")
    model = make_model(folder)
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{folder}/{{port}}",
        "replay_endpoint": f"ipc://{folder}/{{port}}-replay",
    }
    option = "--kv-events-config", msgspec.json.encode(events).decode()
    with ExitStack() as stack:
        made = [Server(folder, model, stack, *option) for _ in range(NUM_ENGINES)]
        for server in made:
            server.wait()
        yield folder, made


def routed(folder: Path, servers: list[Server], routing: str) -> AbstractAsyncContextManager[tuple[Gateway, Any]]:
    events = {"endpoint": f"ipc://{folder}/{{port}}", "replay_endpoint": f"ipc://{folder}/{{port}}-replay"}
    policies = {"routing": routing}
    return fleet(folder / f"{routing}.yaml", servers, pool={"kv_events": events}, policies=policies)


async def chat(app: Any, body: dict[str, Any]) -> Any:
    reply = Reply()
    await send_request(app, "/v1/chat/completions", body, reply.send)
    answer = msgspec.json.decode(reply.body)
    assert reply.status == 200, answer
    return answer


async def converse(app: Any, seed: int) -> list[tuple[int, int]]:
    """One conversation, each turn with all turns before it. Of each: prompt tokens, and those that were cached."""
    chance, messages, counts = random.Random(seed), list[dict[str, str]](), []
    for _ in range(NUM_TURNS):
        messages.append({"role": "user", "content": " ".join(chance.choices(WORDS, k=40))})
        body = {"model": "llama-3.1-8b", "messages": messages, "max_tokens": 8, "temperature": 0}
        answer = await chat(app, body)
        usage = answer["usage"]
        counts.append((usage["prompt_tokens"], (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0))
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or "yes"})
    return counts


def totals(servers: list[Server]) -> tuple[int, int]:
    pairs = [counts(each) for each in servers]
    return sum(queries for queries, _ in pairs), sum(hits for _, hits in pairs)


def test_the_index_says_what_the_engines_find(servers: tuple[Path, list[Server]]) -> None:
    """Before each request, the index says how many of its tokens the replica holds; then the engine says it itself."""
    folder, engines = servers

    async def story() -> None:
        async with routed(folder, engines, "lmetric") as (gateway, app):
            expected: list[int] = []
            reserve = {id(replica): replica.reserve for replica in gateway.replicas}

            def watched(replica: Any) -> Any:
                def note(live: Any) -> Any:
                    expected.append(replica.cache_index.cached_tokens(live))
                    return reserve[id(replica)](live)

                return note

            for replica in gateway.replicas:
                replica.reserve = watched(replica)  # type: ignore[method-assign]
            before, counts = totals(engines), []
            for seed in range(6):
                counts += await converse(app, seed)
                await asyncio.sleep(0.5)  # the answer's own blocks are told, too
            assert gateway.cache_feeds is not None
            states = {feed.state for feed in gateway.cache_feeds.of.values()}
            blocks = {feed.subscribers[0].blocks.block_size_tokens for feed in gateway.cache_feeds.of.values()}
            ignored = sum(feed.subscribers[0].blocks.ignored.total() for feed in gateway.cache_feeds.of.values())
            after = totals(engines)
            told_by_engines = sum(hit for _, hit in counts)
            show(f"index {sum(expected)} cached tokens, answers {told_by_engines}, counters {after[1] - before[1]}")
            assert states <= {"live", "connecting"} and "live" in states and BLOCK in blocks and not ignored
            assert expected == [hit for _, hit in counts], "request for request"
            assert sum(expected) == after[1] - before[1] > 0
            assert sum(tokens for tokens, _ in counts) == after[0] - before[0]

    asyncio.run(story())


def test_more_is_found_than_by_turns(servers: tuple[Path, list[Server]]) -> None:
    folder, engines = servers

    async def rate(routing: str, first: int) -> float:
        async with routed(folder, engines, routing) as (_, app):
            before, seeds = totals(engines), iter(range(first, first + NUM_CONVERSATIONS))

            async def client() -> None:
                for seed in seeds:
                    await converse(app, seed)

            await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
            after = totals(engines)
        share = (after[1] - before[1]) / (after[0] - before[0])
        show(f"{routing}: {share:.1%} of {after[0] - before[0]} prompt tokens were in the engines' prefix caches")
        return share

    by_turns, by_cache = (asyncio.run(rate(*each)) for each in (("round-robin", 1000), ("lmetric", 2000)))
    assert by_cache > by_turns


def test_several_choices_say_nothing_about_events(servers: tuple[Path, list[Server]]) -> None:
    """vLLM reports the cached tokens of one choice, which found what a sibling had computed. Judged as the prompt's,
    they would differ from each correct expectation, and the events would be doubted."""
    folder, engines = servers

    async def story() -> None:
        async with routed(folder, engines, "lmetric") as (gateway, app):
            chance, cached = random.Random(7), list[int]()
            for _ in range(2 * NUM_ENGINES * MIN_SAMPLES):
                user = {"role": "user", "content": " ".join(chance.choices(WORDS, k=100))}
                messages = [{"role": "system", "content": " ".join(WORDS)}, user]
                body = {"model": "llama-3.1-8b", "messages": messages, "max_tokens": 4, "n": 4}
                details = (await chat(app, body))["usage"]["prompt_tokens_details"] or {}
                cached.append(details.get("cached_tokens") or 0)
            assert gateway.cache_feeds is not None
            feeds = gateway.cache_feeds.of.values()
            show(f"cached of prompts with the same first {len(' '.join(WORDS))} tokens and four choices: {cached[4:]}")
            assert min(cached[4:]) > len(" ".join(WORDS))
            assert {feed.state for feed in feeds} == {"live"}, [feed.why for feed in feeds]
            assert all(feed.agreement.share in (None, 1.0) for feed in feeds)

    asyncio.run(story())
