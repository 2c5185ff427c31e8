"""A gateway's index beside the prefix caches of emulated engines, with restarts, evictions and lost events."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import yaml
from msgspec.structs import replace

pytest.importorskip("zmq")
pytest.importorskip("tokenizers")

from attacking import SCALE
from gateway_in_process import Reply, send_request
from headway import catalog, serving
from headway.control.decisions import Decision
from headway.core.fleet import Parallel, Pool
from headway.emulator.completion import SurfaceConfig
from headway.emulator.engine import EmulatedEngine
from headway.emulator.kv_events import KvEventsConfig
from headway.emulator.vllm import application as emulator
from headway.gateway.gateway import Gateway
from headway.gateway.kv_events.agreement import MIN_SAMPLES
from headway.gateway.kv_events.checked_tokenizer import PROBES
from headway.gateway.server.admin import replica_state
from headway.gateway.server.app import application
from headway.gateway.telemetry.recording import Recording
from headway.gateway.upstream.engine import EngineEndpoint
from headway.policies.ordering.fcfs import FcfsOrdering
from serving import eventually
from tokenizing import write_model

MODEL = "llama-3.1-8b"
NUM_REQUESTS = 300 * SCALE
PER_ROUND = 100
NUM_ENGINES = 4
KV_TOKENS = 3000
PATIENCE_S = 30.0
PROFILE = replace(catalog.engine("vllm-0.15"), max_num_seqs=64)
POOL = Pool(
    "emulated", catalog.model(MODEL), catalog.gpu("h100-80gb-sxm"), PROFILE, Parallel(), kv_capacity_tokens=KV_TOKENS
)


class Engine:
    """An emulated engine that can be restarted at its address."""

    def __init__(self, folder: Path, number: int, pool: Pool = POOL) -> None:
        self._pool = pool
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.config = KvEventsConfig(
            True, endpoint=f"ipc://{folder}/{self.port}", replay_endpoint=f"ipc://{folder}/{self.port}-replay"
        )
        self.engine: EmulatedEngine | None = None

    async def start(self) -> None:
        self._stack = AsyncExitStack()
        app = emulator(self._make, SurfaceConfig(MODEL, reports_cached_tokens=True))
        await self._stack.enter_async_context(app.router.lifespan_context(app))
        server = uvicorn.Server(uvicorn.Config(app, port=self.port, lifespan="off", log_level="warning"))
        serving_task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)

        async def stop() -> None:
            server.should_exit = server.force_exit = True
            await serving_task

        self._stack.push_async_callback(stop)

    def _make(self) -> EmulatedEngine:
        made = EmulatedEngine(self._pool, FcfsOrdering(), speed=50.0, events=self.config)
        self.engine = made
        return made

    async def stop(self) -> None:
        await self._stack.aclose()

    def held(self) -> set[int]:
        """The names of the blocks in the engine's own cache, which does not know of events."""
        assert self.engine is not None
        prefixes = self.engine._replica.batch.prefixes
        assert prefixes is not None
        return {name for name, node in prefixes.nodes.items() if name >= 0 and node.cached}


@asynccontextmanager
async def fleet(
    folder: Path, num: int, pool: Pool = POOL, tokenizer: Path | None = None, **policies: Any
) -> AsyncIterator[tuple[Gateway, Any, list[Engine], list[Decision]]]:
    """A gateway before engines that publish events; the ASGI application, and the decision log."""
    told: list[Decision] = []
    engines = [Engine(folder, number, pool) for number in range(num)]
    for engine in engines:
        await engine.start()
    path = folder / "fleet.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "fleet": [
                    {
                        "model": MODEL,
                        "gpu": "h100-80gb-sxm",
                        "engine": "vllm-0.15",
                        "kv_capacity_tokens": KV_TOKENS,
                        "endpoints": [f"http://127.0.0.1:{engine.port}" for engine in engines],
                        "kv_events": {
                            "endpoint": f"ipc://{folder}/{{port}}",
                            "replay_endpoint": f"ipc://{folder}/{{port}}-replay",
                            "tokenizer": str(tokenizer or ""),
                        },
                    }
                ],
                "policies": policies,
                "gateway": {"scrape_period_s": 0.1},
            }
        )
    )
    _, plan = serving.load(path)
    gateways: list[Gateway] = []

    def made() -> Gateway:
        gateways.append(Gateway(plan, Recording(enabled=False), told.append))
        return gateways[0]

    app = application(made, lambda gateway: None)
    async with app.router.lifespan_context(app):
        await eventually(lambda: gateways[0].num_up == num)
        yield gateways[0], app, engines, told
    for engine in engines:
        await engine.stop()


async def send(app: Any, body: dict[str, Any], path: str = "/v1/completions") -> Reply:
    """One request."""
    reply = Reply()
    await send_request(app, path, {"model": MODEL, **body}, reply.send, method="POST" if body else "GET")
    return reply


def agree(gateway: Gateway, engines: list[Engine]) -> bool:
    """Whether the index of each replica has the blocks of its engine, no more and no fewer."""
    assert gateway.cache_feeds is not None
    feeds = {id: feed.subscribers[0] for id, feed in gateway.cache_feeds.of.items()}
    return all(
        feeds[number].state == "live"
        and feeds[number].blocks.names == engine.held()
        and len(gateway.replicas[number].cache_index.gpu) == len(engine.held())
        for number, engine in enumerate(engines)
    )


def prompts(seed: int) -> Callable[[], list[int]]:
    """Prompts that begin with one of a few system prompts, and then branch."""
    chance = random.Random(seed)
    systems = [[chance.randrange(3, 30_000) for _ in range(chance.randrange(40, 300))] for _ in range(12)]

    def prompt() -> list[int]:
        own = [chance.randrange(3, 30_000) for _ in range(chance.randrange(1, 200))]
        return [*chance.choice(systems), *own]

    return prompt


def test_the_index_has_the_blocks_of_the_engines(tmp_path: Path) -> None:
    """After evictions, restarts, lost batches and damaged ones, while requests run: block for block.

    Prompts come as token ids, as texts and as chats.
    """

    async def story() -> None:
        async with fleet(tmp_path, NUM_ENGINES) as (gateway, app, engines, told):
            feeds, requests = gateway.cache_feeds, _Requests(app)
            assert feeds is not None
            checks = blocks = 0
            for round in range(NUM_REQUESTS // PER_ROUND):
                number = round // 3 % NUM_ENGINES
                incident = (_lose, _restart, _damage)[round % 3]
                task = asyncio.create_task(incident(gateway, number, engines[number]))
                await asyncio.gather(*(requests.some(PER_ROUND // 4) for _ in range(4)))
                while not task.done():
                    await requests.some(1)
                await task
                await requests.some(4)  # a gap at the end shows by the next batch only
                await _settled(gateway, engines, requests)
                checks += 1
                blocks += sum(len(engine.held()) for engine in engines)
            counts = [each.counts for each in feeds.of.values()]
            restarts, gaps, malformed = (
                sum(getattr(each, name) for each in counts) for name in ("restarts", "gaps", "malformed")
            )
            evicted = sum(each.subscribers[0].blocks.num_events for each in feeds.of.values())
            print(  # noqa: T201  # shown by pytest -s
                f"{requests.num} requests, {checks} comparisons of {blocks} blocks, {evicted} events of blocks,"
                f" {restarts} restarts, {gaps} gaps, {malformed} malformed batches, {requests.num_failed} failed"
            )
            assert requests.num_failed == 0
            assert restarts and gaps and malformed and not any(each.lost for each in counts)
            assert max(len(engine.held()) for engine in engines) * 16 > KV_TOKENS / 2, "no cache was full"
            states = [each.why for each in told if each.what == "cache" and each.choice == 0]
            assert states[:4] == ["live", "degraded: the connection is lost", "connecting", "live"]
            compared = [each.agreement for each in feeds.of.values()]
            expected, reported = (
                sum(getattr(each, name) for each in compared) for name in ("expected_tokens", "reported_tokens")
            )
            assert sum(each.num_compared for each in compared) > 0 and 0.7 < expected / reported < 1.4
            known = replica_state(gateway, gateway.replicas[0]).prefix_cache
            assert known is not None and (known.state, known.blocks) == ("live", len(engines[0].held()))
            assert known.gaps == counts[0].gaps and known.age_s is not None
            metrics = (await send(app, {}, "/metrics")).body.decode()
            assert 'headway_kv_events_live{pool="pool-0",model="llama-3.1-8b",replica="0"} 1' in metrics

    asyncio.run(story())


class _Requests:
    """Sends requests of all kinds, and counts those without an answer."""

    def __init__(self, app: Any) -> None:
        self._app, self._prompt, self._chance = app, prompts(1), random.Random(2)
        self.num = self.num_failed = 0

    async def some(self, num: int) -> None:
        for _ in range(num):
            await self.one()

    async def one(self) -> None:
        ids, kind = self._prompt(), self._chance.random()
        words = " ".join(f"w{id}" for id in ids)
        body: dict[str, Any] = {"prompt": ids, "max_tokens": 3}
        path = "/v1/completions"
        if kind < 0.3:
            body["prompt"] = words
        elif kind < 0.5:
            del body["prompt"]
            body["messages"], path = [{"role": "user", "content": words}], "/v1/chat/completions"
        self.num += 1
        self.num_failed += (await send(self._app, body, path)).status != 200


async def _settled(gateway: Gateway, engines: list[Engine], requests: _Requests) -> None:
    """Wait until the index agrees. A lost batch shows by the next one only, so a few requests go on."""
    async with asyncio.timeout(PATIENCE_S):
        while not agree(gateway, engines):
            for _ in range(30):
                await asyncio.sleep(0.01)
                if agree(gateway, engines):
                    return
            await requests.some(NUM_ENGINES)


async def _restart(gateway: Gateway, number: int, engine: Engine) -> None:
    feeds = gateway.cache_feeds
    assert feeds is not None
    await asyncio.sleep(0.02)
    await engine.stop()
    await eventually(lambda: feeds.of[number].state == "degraded")
    await engine.start()
    await eventually(lambda: gateway.num_up == NUM_ENGINES)


async def _lose(gateway: Gateway, number: int, engine: Engine) -> None:
    """Lose all batches of a while."""
    await _spoil(engine, lambda parts: None)


async def _damage(gateway: Gateway, number: int, engine: Engine) -> None:
    """Damage the batches of a while."""
    await _spoil(engine, lambda parts: (*parts[:2], parts[2][: len(parts[2]) // 2]))


async def _spoil(engine: Engine, spoiled: Callable[[Any], Any]) -> None:
    assert engine.engine is not None
    events = engine.engine.events
    assert events is not None
    pub = events._pub
    spoiler = events._pub = _Spoiler(pub, spoiled)
    await eventually(lambda: spoiler.num >= 5)
    events._pub = pub


class _Spoiler:
    """A publisher's socket whose messages are lost or damaged."""

    def __init__(self, pub: Any, spoiled: Callable[[Any], Any]) -> None:
        self._pub, self._spoiled = pub, spoiled
        self.num = 0

    def send_multipart(self, parts: Any, flags: int = 0) -> None:
        self.num += 1
        if (changed := self._spoiled(parts)) is not None:
            self._pub.send_multipart(changed, flags)


@pytest.mark.parametrize("is_local", [False, True])
def test_a_request_is_looked_up_by_its_tokens(tmp_path: Path, is_local: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat is tokenized by an engine or by the model's files, and each replica's view says what it holds of it."""
    tokenizer = write_model(tmp_path / "model") if is_local else None
    asked: list[Any] = []
    tokenize = EngineEndpoint.tokenize

    async def counted(engine: EngineEndpoint, body: dict[str, Any]) -> list[int] | None:
        asked.append(body)
        return await tokenize(engine, body)

    monkeypatch.setattr(EngineEndpoint, "tokenize", counted)

    async def story() -> None:
        async with fleet(tmp_path, 2, tokenizer=tokenizer) as (gateway, app, engines, _):
            if is_local:
                await eventually(lambda: len(asked) == len(PROBES))
                checked = gateway._prompt_blocks._tokenizers[str(tokenizer)]
                await eventually(lambda: checked.is_settled)
                asked.clear()
            words = " ".join(f"w{id}" for id in range(100, 300))
            chat = {"messages": [{"role": "user", "content": words}], "max_tokens": 1}
            assert (await send(app, chat, "/v1/chat/completions")).status == 200
            await eventually(lambda: agree(gateway, engines) and any(engine.held() for engine in engines))
            (holder,) = [number for number, engine in enumerate(engines) if engine.held()]
            seen: list[list[int]] = []
            driver = gateway.driver
            arrived = driver.arrived

            def look(request: Any) -> None:
                seen.append([replica.cached_tokens(request.live) for replica in gateway.replicas])
                arrived(request)

            driver.arrived = look  # type: ignore[method-assign]
            longer = {**chat, "messages": [{"role": "user", "content": words + " and more"}]}
            assert (await send(app, longer, "/v1/chat/completions")).status == 200
            assert seen[0][holder] == 192 and seen[0][1 - holder] == 0, "12 full blocks of 202 tokens"
            assert len(asked) == (0 if is_local else 2)

    asyncio.run(story())


def test_several_choices_say_nothing_about_events(tmp_path: Path) -> None:
    """vLLM reports the cached tokens of one choice, which found what a sibling had computed. Judged as the prompt's,
    they would differ from correct expectations, and the events would be doubted."""
    chance = random.Random(3)
    system = [chance.randrange(3, 30_000) for _ in range(32)]

    async def story() -> None:
        async with fleet(tmp_path, 1, routing="lmetric") as (gateway, app, engines, told):
            cached = []
            for _ in range(MIN_SAMPLES + 2):
                prompt = [*system, *(chance.randrange(3, 30_000) for _ in range(160))]
                reply = await send(app, {"prompt": prompt, "max_tokens": 2, "n": 4})
                details = json.loads(reply.body)["usage"]["prompt_tokens_details"]
                cached.append(details["cached_tokens"])
            assert min(cached) > 2 * len(system), "no choice found what a sibling had computed"
            await eventually(lambda: agree(gateway, engines))
            assert [each.why for each in told if each.what == "cache"][-1] == "live"

    asyncio.run(story())
