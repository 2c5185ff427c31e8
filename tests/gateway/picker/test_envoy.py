"""A real Envoy in front of four emulated engines, with `headway epp` as its picker."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("httptools")

import envoys
import serving
from envoys import Envoy
from serving import MODEL, Process, answer_text, chat, until

NUM_ENGINES = 4


def status(process: Process, **options: Any) -> int:
    """The status of the answer to a chat, which is read to its end."""
    reply = chat(process, **{"max_tokens": 1, **options})
    reply.text()
    return reply.status


class Front:
    """Four engines, a picker, and an Envoy."""

    def __init__(self, engines: list[Process], folder: Path) -> None:
        self.engines, self.folder = engines, folder
        self.ports = [engine.port for engine in engines]
        path = serving.fleet_file(folder, [engine.url for engine in engines], policies={"routing": "least-loaded"})
        self.picker = envoys.picker(path, "--decisions", str(folder / "decisions.jsonl"))
        self.envoy = Envoy(envoys.unwatched(envoys.configuration()), self.picker.grpc_port, self.ports, folder)
        serving.all_up(self.picker, NUM_ENGINES)
        envoys.listening(self.envoy)
        until(lambda: status(self.envoy) == 200)

    def decisions(self) -> dict[str, int]:
        """The replicas that were chosen, by request."""
        lines = (self.folder / "decisions.jsonl").read_text().splitlines()
        placed = [line for line in map(json.loads, lines) if line["what"] == "placed"]
        return {line["request"]: line["choice"] for line in placed}


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    envoys.binary()
    engines = [serving.emulator("--speed", "10") for _ in range(NUM_ENGINES)]
    made: Front | None = None
    try:
        made = Front(engines, tmp_path_factory.mktemp("front"))
        yield made
        made.picker.stop()
        assert made.picker.process.returncode == 0, "SIGTERM asks for an end"
    finally:
        for process in (*engines, *(() if made is None else (made.picker, made.envoy))):
            process.close()


def test_openai_s_client_works_unchanged(front: Front) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{front.envoy.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        chats, messages = client.chat.completions, [{"role": "user", "content": "hello"}]
        whole = chats.create(model=MODEL, messages=messages, max_tokens=7)
        assert whole.usage.completion_tokens == 7
        parts = list(chats.create(model=MODEL, messages=messages, max_tokens=7, stream=True))
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        assert text == whole.choices[0].message.content
        with pytest.raises(openai.NotFoundError, match="model 'none'"):
            chats.create(model="none", messages=messages)


def test_each_request_is_served_where_it_was_to_be(front: Front) -> None:
    def one(i: int) -> tuple[str, int, str, str]:
        reply = chat(
            front.envoy, f"{i} " + "word " * (i * 40), headers={"x-request-id": f"r{i}"}, max_tokens=8, stream=True
        )
        return (
            reply.headers["x-request-id"],
            reply.status,
            reply.headers["x-headway-replica"],
            answer_text(list(reply.events())),
        )

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, range(60)))
    until(lambda: {id for id, *_ in answers} <= front.decisions().keys())
    chosen = front.decisions()
    for id, status, replica, text in answers:
        assert status == 200 and len(text.split()) == 8 and replica == f"pool/{chosen[id]}"
    assert set(Counter(replica for _, _, replica, _ in answers)) == {f"pool/{i}" for i in range(NUM_ENGINES)}
    until(lambda: serving.metric(front.picker, "headway_requests_in_flight") == 0)


def test_usage_comes_only_to_clients_that_ask(front: Front) -> None:
    events = list(chat(front.envoy, max_tokens=3, stream=True).events())
    assert [event for event in events if event != "[DONE]" and event.get("usage")] == []
    asked = chat(front.envoy, max_tokens=3, stream=True, stream_options={"include_usage": True})
    assert [
        event["usage"]["completion_tokens"] for event in asked.events() if event != "[DONE]" and event.get("usage")
    ] == [3]


def test_a_long_prompt_passes(front: Front) -> None:
    assert chat(front.envoy, "word " * 30_000, max_tokens=1).json()["usage"]["prompt_tokens"] >= 30_000


def test_a_client_that_leaves_is_told_to_the_picker(front: Front) -> None:
    reply = chat(front.envoy, max_tokens=30_000, ignore_eos=True, stream=True)
    next(reply.events())
    until(lambda: serving.metric(front.picker, "headway_requests_in_flight") == 1)
    reply.close()
    until(lambda: serving.metric(front.picker, "headway_requests_in_flight") == 0)


def test_without_a_picker_no_engine_is_asked_that_holds_all_it_got(tmp_path: Path) -> None:
    envoys.binary()
    asked = asyncio.run(_asked_without_a_picker(tmp_path, num_requests=160))
    assert sum(asked) == 160
    # two random choices that may be the same engine: ten requests of 160
    assert asked[0] <= 2


async def _asked_without_a_picker(folder: Path, num_requests: int) -> list[int]:
    """How many requests each engine got of some one after the other; the first engine never ends an answer."""
    asked = [0] * NUM_ENGINES
    opened: list[asyncio.StreamWriter] = []

    def engine(i: int) -> Any:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            opened.append(writer)
            await reader.readuntil(b"{}")
            asked[i] += 1
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\na")
            if i == 0:
                await reader.read()
            writer.write(b"b")
            writer.close()

        return serve

    async def ask(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        opened.append(writer)
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")
        assert (await reader.readuntil(b"\r\n\r\na")).startswith(b"HTTP/1.1 200")

    servers = [await asyncio.start_server(engine(i), "127.0.0.1", 0) for i in range(NUM_ENGINES)]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    config = envoys.fail_open(envoys.unwatched(envoys.configuration()))
    envoy = Envoy(config, envoys.free_port(), ports, folder)
    try:
        await asyncio.to_thread(envoys.listening, envoy)
        for _ in range(num_requests):
            await ask(envoy.port)
            await asyncio.sleep(0.005)
        return asked
    finally:
        for writer in opened:
            writer.close()
        for server in servers:
            server.close()
        await asyncio.gather(*(writer.wait_closed() for writer in opened), return_exceptions=True)
        envoy.close()
