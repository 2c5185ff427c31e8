"""A gateway without file descriptors for more connections: clients wait or are told so, and no engine is to blame."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("httptools")

import envoys
import serving
from scripted import started
from serving import MODEL

LIMIT = 160
NUM_STREAMS = 150
LIMITED = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {LIMIT}))
from headway.cli import main
sys.exit(main(sys.argv[1:]))
"""


def _chat(tokens: int) -> bytes:
    body = {"model": MODEL, "stream": True, "max_tokens": tokens, "messages": [{"role": "user", "content": "a"}]}
    data = json.dumps(body).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data)


@pytest.fixture(scope="module")
def engine() -> Iterator[serving.Process]:
    made = serving.emulator()
    with serving.closing(made):
        yield made


@contextmanager
def _gateway(engine: serving.Process, folder: Path, *options: str) -> Iterator[serving.Process]:
    file = serving.fleet_file(folder, [engine.url])
    made = serving.Process("-c", LIMITED, "serve", str(file), "--port", "0", "--restarts", "0", *options)
    with serving.closing(made):
        serving.all_up(made, 1)
        yield made


@pytest.mark.ci
@pytest.mark.parametrize("workers", ["1", "2"])
def test_more_streams_than_descriptors_are_all_answered(engine: serving.Process, workers: str, tmp_path: Path) -> None:
    """Connections wait until there is room for them, and for theirs to an engine; idle ones make room, too."""

    async def stream(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_chat(20))
        data = b""
        while not data.endswith(b"0\r\n\r\n") and (part := await reader.read(1 << 16)):
            data += part
        writer.close()
        return data

    async def streams(port: int) -> list[bytes]:
        async with asyncio.timeout(serving.PATIENCE_S):
            return await asyncio.gather(*(stream(port) for _ in range(NUM_STREAMS)))

    with _gateway(engine, tmp_path, "--workers", workers) as front, ExitStack() as idle:
        for _ in range(LIMIT):
            idle.enter_context(socket.create_connection(("127.0.0.1", front.port)))
        found = asyncio.run(streams(front.port))
        assert sum(b"data: [DONE]" in each for each in found) == len(found)
        written = front.stop()
    assert f"ulimit -n is {LIMIT}: 48 clients are connected at a time" in written and " is down" not in written


def _beginning(client: socket.socket) -> bytes:
    """An answer's head, and the body of an error."""
    data = b""
    while b"\r\n\r\n" not in data or (b"HTTP/1.1 200" not in data and b"}}" not in data):
        part = client.recv(1 << 16)
        assert part, data
        data += part
    return data


def _fill(pid: int, most: int = LIMIT) -> None:
    """Let the process open nothing more. It may later open `most` files."""
    used = {int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()}
    free = next(number for number in range(most) if number not in used)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, most))


def test_an_engine_to_which_no_connection_can_be_opened_stays_up(engine: serving.Process, tmp_path: Path) -> None:
    with _gateway(engine, tmp_path) as front, ExitStack() as stack:
        pid = front.process.pid
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", front.port))) for _ in range(8)]
        for each in clients:  # accepted, and answered on connections that stay open
            each.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert each.recv(1 << 16).startswith(b"HTTP/1.1 200")
        _fill(pid)
        for each in clients:
            each.sendall(_chat(20_000))
        heads = [_beginning(each) for each in clients]
        refused = [each for each in heads if each.startswith(b"HTTP/1.1 503")]
        assert len(refused) >= 7 and all(each.startswith(b"HTTP/1.1 200") for each in heads if each not in refused)
        assert all(b"retry-after: 1" in each and b"too_many_connections" in each for each in refused)
        front.wait_for("replicas are not probed")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
        assert serving.chat(front, max_tokens=1).json()["usage"]
        for each in clients:
            each.close()
        assert " is down" not in front.stop()


def test_a_picker_that_can_open_no_connection_blames_no_engine(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    engine = started()  # it closes its connections
    picker = envoys.picker(serving.fleet_file(tmp_path, [engine.url]))
    with closing(engine), serving.closing(picker):
        serving.all_up(picker, 1)
        pid = picker.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        _fill(pid, before[1])
        picker.wait_for("replicas are not probed")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        assert serving.metric(picker, "headway_replica_up") == 1
        assert " is down" not in picker.stop()
