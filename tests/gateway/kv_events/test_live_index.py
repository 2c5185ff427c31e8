"""A gateway's index beside the prefix caches of emulated engines, with restarts, evictions and lost events."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvicorn
import yaml
from msgspec.structs import replace

pytest.importorskip("zmq")

from asgi import Reply
from attacking import SCALE
from headway import catalog, serving
from headway.control.decisions import Decision
from headway.core.fleet import Parallel, Pool
from headway.emulator.completion import SurfaceConfig
from headway.emulator.engine import EmulatedEngine
from headway.emulator.kv_events import KvEventsConfig
from headway.emulator.vllm import application as emulator
from headway.gateway.gateway import Gateway
from headway.gateway.server.app import application
from headway.gateway.telemetry.recording import Recording
from headway.policies.ordering.fcfs import FcfsOrdering

MODEL = "llama-3.1-8b"
NUM_REQUESTS = 150 * SCALE
KV_TOKENS = 6000
PATIENCE_S = 30.0
PROFILE = replace(catalog.engine("vllm-v1"), max_num_seqs=64)
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
        app = emulator(self._make, SurfaceConfig(MODEL))
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
        made = EmulatedEngine(self._pool, FcfsOrdering(), speed=50.0, caches_prefixes=True, events=self.config)
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
    folder: Path, num: int, pool: Pool = POOL, **policies: Any
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
                        "engine": "vllm-v1",
                        "kv_capacity_tokens": KV_TOKENS,
                        "endpoints": [f"http://127.0.0.1:{engine.port}" for engine in engines],
                        "kv_events": {
                            "endpoint": f"ipc://{folder}/{{port}}",
                            "replay_endpoint": f"ipc://{folder}/{{port}}-replay",
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
        await until(lambda: gateways[0].num_up == num)
        yield gateways[0], app, engines, told
    for engine in engines:
        await engine.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def ask(app: Any, body: dict[str, Any], path: str = "/v1/completions") -> Reply:
    """One request."""
    messages = [{"type": "http.request", "body": msgspec.json.encode({"model": MODEL, **body})}]
    reply = Reply()

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    scope = {
        "type": "http", "method": "POST" if body else "GET", "path": path, "headers": [], "query_string": b"",
        "root_path": "", "app": app,
    }  # fmt: skip
    await app(scope, receive, reply.send)
    return reply


def agree(gateway: Gateway, engines: list[Engine]) -> bool:
    """Whether the index of each replica has the blocks of its engine, no more and no fewer."""
    assert gateway.cache_feeds is not None
    feeds = gateway.cache_feeds.subscribers
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
    """After evictions, restarts and lost batches. Prompts come as token ids, as texts and as chats."""

    async def story() -> None:
        async with fleet(tmp_path, 2) as (gateway, app, engines, told):
            prompt, chance = prompts(1), random.Random(2)

            async def one() -> None:
                ids = prompt()
                words = " ".join(f"w{id}" for id in ids)
                body: dict[str, Any] = {"prompt": ids, "max_tokens": 3}
                path = "/v1/completions"
                if chance.random() < 0.3:
                    body["prompt"] = words
                elif chance.random() < 0.3:
                    del body["prompt"]
                    body["messages"], path = [{"role": "user", "content": words}], "/v1/chat/completions"
                assert (await ask(app, body, path)).status == 200

            for _ in range(3):
                for _ in range(NUM_REQUESTS // 30):
                    await asyncio.gather(*(one() for _ in range(10)))
                await until(lambda: agree(gateway, engines))
            lossy = engines[0].engine
            assert lossy is not None and lossy.events is not None
            pub, lossy.events._pub = lossy.events._pub, _Nowhere()
            await asyncio.gather(*(one() for _ in range(20)))
            lossy.events._pub = pub
            await asyncio.gather(*(one() for _ in range(20)))
            await until(lambda: agree(gateway, engines))
            await engines[1].stop()
            assert gateway.cache_feeds is not None
            await until(lambda: gateway.cache_feeds.subscribers[1].state == "degraded")  # type: ignore[union-attr]
            await engines[1].start()
            await until(lambda: gateway.num_up == 2)
            await asyncio.gather(*(one() for _ in range(40)))
            await until(lambda: agree(gateway, engines))
            for engine in engines:
                assert len(engine.held()) * 16 > KV_TOKENS / 2, "no cache was full, so nothing was evicted"
            counts = [each.counts for each in gateway.cache_feeds.subscribers.values()]
            assert counts[0].gaps >= 1 and counts[1].restarts >= 1 and not any(each.lost for each in counts)
            states = [each.why for each in told if each.what == "cache" and each.choice == 1]
            assert states == ["live", "degraded: the connection is lost", "connecting", "live"]
            metrics = (await ask(app, {}, "/metrics")).body.decode()
            assert 'headway_kv_events_live{pool="pool-0",model="llama-3.1-8b",replica="0"} 1' in metrics

    asyncio.run(story())


class _Nowhere:
    def send_multipart(self, *_: object) -> None:
        """Do nothing."""


def test_a_request_is_looked_up_by_its_tokens(tmp_path: Path) -> None:
    """A chat is tokenized by an engine, and each replica's view says what it holds of it."""

    async def story() -> None:
        async with fleet(tmp_path, 2) as (gateway, app, engines, _):
            words = " ".join(f"w{id}" for id in range(100, 300))
            chat = {"messages": [{"role": "user", "content": words}], "max_tokens": 1}
            assert (await ask(app, chat, "/v1/chat/completions")).status == 200
            await until(lambda: agree(gateway, engines) and any(engine.held() for engine in engines))
            (holder,) = [number for number, engine in enumerate(engines) if engine.held()]
            seen: list[list[int]] = []
            driver = gateway.driver
            arrived = driver.arrived

            def look(request: Any) -> None:
                seen.append([replica.cached_tokens(request.live) for replica in gateway.replicas])
                arrived(request)

            driver.arrived = look  # type: ignore[method-assign]
            longer = {**chat, "messages": [{"role": "user", "content": words + " and more"}]}
            assert (await ask(app, longer, "/v1/chat/completions")).status == 200
            assert seen[0][holder] == 192 and seen[0][1 - holder] == 0, "12 full blocks of 202 tokens"

    asyncio.run(story())
