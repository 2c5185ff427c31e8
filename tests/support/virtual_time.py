"""A day lived through without waiting: a gateway, emulated engines and their sockets in one event loop, in which time
passes only when nobody has anything to do. So what differs from a simulation is not how busy the machine was."""

from __future__ import annotations

import asyncio
import json
import selectors
import socket
from collections.abc import AsyncIterator, Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import yaml
from msgspec.structs import replace
from uvicorn.server import ServerState

from gateway_in_process import Reply, send_request
from headway import scenario, serving
from headway.control.decisions import Decision, DecisionObserver
from headway.core.fleet import Pool
from headway.core.policy import Ordering
from headway.core.record import Records
from headway.emulator import engine as emulated
from headway.emulator.completion import SurfaceConfig
from headway.emulator.kv_exchange import KvLink
from headway.emulator.sglang import SglangSurface, SinglePhase
from headway.emulator.vllm import VllmSurface
from headway.emulator.vllm import application as emulator
from headway.gateway import clock
from headway.gateway.fleet.specs import ServingPlan
from headway.gateway.gateway import Gateway
from headway.gateway.relay import engine_stream, paced
from headway.gateway.server import http_protocol
from headway.gateway.server.app import application
from headway.gateway.telemetry.recording import Recording
from headway.policies.ordering.fcfs import FcfsOrdering


class Front:
    """By what requests come, in place of the gateway's own application. This one sends none."""

    def is_in_transit(self) -> bool:
        """Whether something is on its way through another process, so that time must not pass."""
        return False

    def listener(self, port: int) -> socket.socket | None:
        """Where the engine of this port listens for another process, beside its file in the folder."""
        return None

    def watched(self, app: Any) -> Any:
        """The application of an engine, as the other process reaches it."""
        return app

    def beside(self, gateway: Gateway) -> AbstractAsyncContextManager[None]:
        """What runs beside the gateway."""
        raise NotImplementedError

    async def send(self, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """The whole answer to a request."""
        raise NotImplementedError


_TURN_S, _PATIENCE_S = 0.01, 60.0


class _Selector(selectors.DefaultSelector):
    """Where nothing can be read, what was to be waited for is over at once, unless something is in transit."""

    now = 0.0
    front: Front | None = None
    _waited_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0 if timeout is not None else None)
        if ready or not timeout:
            self._waited_s = 0.0 if ready else self._waited_s
            return ready
        if self.front is not None and self.front.is_in_transit():
            self._waited_s += _TURN_S
            if self._waited_s > _PATIENCE_S:
                raise AssertionError(f"nothing has come for {_PATIENCE_S} s: {self.front}")
            return super().select(_TURN_S)
        self.now += timeout
        return ready


class _Loop(asyncio.SelectorEventLoop):
    """Ports are files in a folder: what is written there can be read at once, which nobody promises of TCP."""

    def __init__(self, folder: Path, front: Front | None = None) -> None:
        self._clock, self._folder = _Selector(), folder
        self._clock.front = front
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        return await self.create_unix_connection(protocol_factory, str(self._folder / str(port)))

    async def create_server(
        self, protocol_factory: Any, host: Any = None, port: Any = None, sock: Any = None, **_: Any
    ) -> Any:
        if sock is not None:
            port = sock.getsockname()[1]
            sock.close()
        return await self.create_unix_server(protocol_factory, str(self._folder / str(port)))

    tcp_connection = asyncio.SelectorEventLoop.create_connection
    tcp_server = asyncio.SelectorEventLoop.create_server


@contextmanager
def in_virtual_time(folder: Path, front: Front | None = None) -> Iterator[asyncio.Runner]:
    """All that looks at the clock looks at the loop's."""
    with asyncio.Runner(loop_factory=lambda: _Loop(folder, front)) as runner, pytest.MonkeyPatch.context() as patch:
        for module in (clock, engine_stream, paced, emulated):
            patch.setattr(module, "monotonic", runner.get_loop().time)
        yield runner


class _WithoutBlocks(emulated.EmulatedEngine):
    """A simulated request without prefixes does not find its own blocks again after a preemption; nor does this one."""

    def blocks_of(self, prompt: list[int], lora: str) -> tuple[Any, ...]:
        return ()


async def _emulate(
    stack: AsyncExitStack,
    pool: Pool,
    ordering: Ordering,
    url: str,
    reasoning_tokens: int,
    caches_prefixes: bool,
    front: Front | None,
    throttle: tuple[float, float] | None,
) -> None:
    """An engine, as `headway emulate` has it."""
    host, port = url.removeprefix("http://").split(":")
    link, config = (
        KvLink(pool.network_bytes_per_s),
        SurfaceConfig(pool.model.name, reasoning_tokens=reasoning_tokens, address=(host, int(port))),
    )
    surface, made_by = VllmSurface(), emulated.EmulatedEngine if caches_prefixes else _WithoutBlocks
    if pool.engine.name == "sglang" and pool.role != "mixed":
        config = replace(config, has_token_ids=False, has_single_token_chunks=True)
        bootstrap = socket.create_server((host, 0)) if pool.role == "prefill" else None
        surface = SglangSurface(SinglePhase(pool.role, bootstrap, 300.0))
    app = emulator(lambda: made_by(pool, ordering, link=link, throttle=throttle), config, surface)
    await stack.enter_async_context(app.router.lifespan_context(app))
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _Loop)
    protocol, connections = _server(app)
    servers = [await loop.create_server(protocol, host, int(port))]
    listener = None if front is None else front.listener(int(port))
    if front is not None and listener is not None:
        protocol, others = _server(front.watched(app))
        servers.append(await loop.tcp_server(protocol, sock=listener))
        stack.callback(lambda: [each.shutdown() for each in list(others)])
    stack.callback(lambda: [each.shutdown() for each in list(connections)])
    for server in servers:
        stack.callback(server.close)


def _server(app: Any) -> tuple[Callable[[], asyncio.Protocol], set[Any]]:
    """What makes the protocol of each connection to an application; and the connections."""
    served = uvicorn.Config(app, http=http_protocol.HttpProtocol, lifespan="off", log_level="warning")
    served.load()
    state, loop = ServerState(), asyncio.get_running_loop()

    def protocol() -> asyncio.Protocol:
        return served.http_protocol_class(config=served, server_state=state, app_state={}, _loop=loop)  # type: ignore[call-arg]

    return protocol, state.connections


async def ask_once(
    app: Any, front: Front | None, is_streamed: bool, model: str, id: int, arrival_s: float, prompt_tokens: int,
    output_tokens: int, tier: int, tenant: str, lora: str, shared: Sequence[tuple[int, int]],
) -> dict[str, Any]:  # fmt: skip
    """One request, in time: the error that its client was told, if any. `shared`: the ids and the tokens of its
    prompt's leading segments."""
    await asyncio.sleep(arrival_s - asyncio.get_running_loop().time())
    prompt = [3 + (segment * 13 + i) % 30_000 for segment, tokens in shared for i in range(tokens)]
    prompt += [3 + (id * 7 + i) % 30_000 for i in range(prompt_tokens - len(prompt))]
    body = {"model": lora or model, "prompt": prompt, "max_tokens": output_tokens, "priority": tier}
    body["stream"] = is_streamed
    headers = {"x-request-id": f"{id}", "authorization": f"Bearer {tenant}"}
    if front is not None:
        answer = await front.send("/v1/completions", json.dumps(body).encode(), headers)
        assert answer.endswith(b"data: [DONE]\n\n") if is_streamed else "usage" in json.loads(answer), answer
        return {}
    reply = Reply()
    await send_request(app, "/v1/completions", body, reply.send, headers.items())
    assert reply.status in (200, 429) and reply.is_whole, reply.body
    error: dict[str, Any] = {} if reply.status == 200 else json.loads(reply.body)["error"]
    return error


@asynccontextmanager
async def served_plan(
    plan: ServingPlan,
    decisions: list[Decision],
    reasoning_tokens: int = 0,
    caches_prefixes: bool = False,
    front: Front | None = None,
    make: Callable[[], Gateway] | None = None,
    throttles: Mapping[str, tuple[float, float]] | None = None,
    service: Pool | None = None,
) -> AsyncIterator[tuple[Any, Any]]:
    """The gateway's application, and a function that returns the gateway. `make`: another than of the plan.
    `throttles`: of the engines of a pool, seconds and how many times as long iterations take from then on. `service`:
    what hosted pools are in truth, if not what the plan says."""
    gateways: list[Gateway] = []

    def of_plan() -> Gateway:
        return Gateway(plan, Recording(True, has_fallbacks=bool(plan.fallbacks.models)), decisions.append)

    def made() -> Gateway:
        gateways.append((make or of_plan)())
        return gateways[0]

    async with AsyncExitStack() as stack:
        for served in plan.pools:
            for url in served.endpoints:
                ordering = FcfsOrdering() if plan.policies.ordering_at == "gateway" else plan.policies.ordering()
                await _emulate(
                    stack,
                    served.pool if served.pool.hosted is None else service or served.pool,
                    ordering,
                    url,
                    reasoning_tokens,
                    caches_prefixes,
                    front,
                    (throttles or {}).get(served.pool.name),
                )
        app = application(made, lambda gateway: None, None if front is None else front.beside)
        async with app.router.lifespan_context(app):
            yield app, lambda: gateways[0]


async def _day(
    path: Path,
    front: Front | None = None,
    unstreamed: Container[int] = (),
    refused: dict[int, dict[str, Any]] | None = None,
) -> tuple[Records, list[Decision]]:
    decisions: list[Decision] = []
    chosen, plan = serving.load(path)
    ran = scenario.Simulator().records(chosen)
    async with served_plan(plan, decisions, caches_prefixes=ran.prefixes is not None, front=front) as (app, gateway):
        rows, model = _rows(ran), next(iter(plan.names))
        asked = (ask_once(app, front, id not in unstreamed, model, id, *row) for id, row in enumerate(rows))
        errors = await asyncio.gather(*asked)
        if refused is None:
            assert all(error["code"] == "shed" for error in errors if error), errors
        else:
            refused.update({id: error for id, error in enumerate(errors) if error})
    return gateway().telemetry.records(), decisions


async def _read(app: Any, at_s: float, body: dict[str, Any]) -> list[tuple[float, bytes]]:
    """The parts of a stream, and when they came."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(at_s - loop.time())
    parts: list[tuple[float, bytes]] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            parts.append((loop.time(), message["body"]))

    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    await send_request(app, path, {**body, "stream": True}, send)
    return parts


def _rows(ran: Records) -> Iterator[tuple[float, int, int, int, str, str, list[tuple[int, int]]]]:
    """Arrival, prompt, answer, tier, the tenant, whose key is its name, the adapter, and the prompt's segments."""
    columns = [ran.workload[name].tolist() for name in ("arrival_s", "prompt_tokens", "output_tokens")]
    tiers = ran.workload["tier"].tolist() if "tier" in ran.workload else [0] * len(columns[0])
    tenants = [ran.tenants[code] for code in ran.workload["tenant"]] if ran.tenants else [""] * len(tiers)
    loras = [ran.loras[code] for code in ran.workload["lora"]] if ran.loras else [""] * len(tiers)
    shared: list[list[tuple[int, int]]] = [[] for _ in tiers]
    if (prefixes := ran.prefixes) is not None:
        segments = list(zip(prefixes.ids.tolist(), prefixes.tokens.tolist(), strict=True))
        shared = [segments[first:end] for first, end in pairwise(prefixes.offsets.tolist())]
    return zip(*columns, tiers, tenants, loras, shared, strict=True)


def streams(
    data: dict[str, Any],
    folder: Path,
    asked: Sequence[tuple[float, dict[str, Any]]],
    reasoning_tokens: int = 0,
    reloaded: tuple[float, dict[str, Any]] | None = None,
) -> tuple[list[list[tuple[float, bytes]]], Records]:
    """What the clients of these requests were sent, and when; and the gateway's records. `reloaded`: a time, and the
    fleet file from then on."""
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(data))

    async def story() -> tuple[list[list[tuple[float, bytes]]], Records]:
        async with served_plan(serving.load(path)[1], [], reasoning_tokens) as (app, gateway):
            if reloaded is not None:
                at_s, later = reloaded
                path.write_text(yaml.safe_dump(later))
                plan = serving.load(path)[1]
                asyncio.get_running_loop().call_at(at_s, lambda: gateway().reconfigure(plan))
            found = await asyncio.gather(*(_read(app, at_s, body) for at_s, body in asked))
        return found, gateway().telemetry.records()

    with in_virtual_time(folder) as runner:
        return runner.run(story())


def lived(
    data: dict[str, Any],
    folder: Path,
    front: Front | None = None,
    unstreamed: Container[int] = (),
    refused: dict[int, dict[str, Any]] | None = None,
) -> tuple[Records, list[Decision]]:
    """The records and decisions of a scenario that is lived through. `unstreamed`: requests without `stream`. `refused`
    gets the errors that clients were told, by request; without it, none may be told but that a request is shed."""
    path = folder / "day.yaml"
    path.write_text(yaml.safe_dump(data))
    with in_virtual_time(folder, front) as runner:
        return runner.run(_day(path, front, unstreamed, refused))


def simulated(data: dict[str, Any], folder: Path) -> tuple[Records, list[Decision]]:
    """The same of a simulation."""
    path = folder / "day.yaml"
    path.write_text(yaml.safe_dump(data))
    foreseen: list[Decision] = []
    decisions = DecisionObserver()
    decisions.listeners.append(foreseen.append)
    return scenario.run(scenario.load(path), decisions=decisions).records, foreseen


def both(
    data: dict[str, Any], folder: Path, front: Front | None = None
) -> tuple[Records, list[Decision], Records, list[Decision]]:
    """A scenario lived through, and simulated: records and decisions of each."""
    return (*lived(data, folder, front), *simulated(data, folder))
