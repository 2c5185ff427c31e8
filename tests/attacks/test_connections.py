"""Clients that send and do not read, or half of what they announce: the memory of so many connections has a bound."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from shutil import which

import pytest

pytest.importorskip("httptools")

import envoys
import serving
from attacking import SCALE, children, memory_ceiling, resident_mib
from certificates import new_certificate
from envoys import Envoy
from keys import digest
from scripted import ScriptedEngine, started
from serving import MODEL

CONNECTIONS = 32
CONNECTION_MIB = 1.0
"""The bound of SECURITY.md for a connection, besides what it has of `max_bodies_bytes`."""
BASE_MIB = 24.0
"""What the process takes once, for whatever the first such request needs."""
QUIET_S = 0.3
HOST = b" HTTP/1.1\r\nHost: localhost\r\n"
CHAT = b"POST /v1/chat/completions" + HOST
KEY = b"Authorization: Bearer right\r\n"
BODY = b'{"model":"%s","messages":[{"role":"user","content":"a"}]}' % MODEL.encode()
HELD = CHAT + KEY + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
REPEATED = {
    "refusals that are not read": CHAT + b"X-Request-Id: " + b"i" * 128 + b"\r\nContent-Length: 0\r\n\r\n",
    "long answers that are not read": b"GET /openapi.json" + HOST + b"\r\n",
    "metrics that are not read": b"GET /metrics" + HOST + b"\r\n",
    "requests after one that waits": HELD,
}
ONCE = {
    "half a head": CHAT + b"X: " + b"y" * 60_000,
    "a head of short headers": CHAT + b"a:b\r\n" * 12_000,
    "half a long body": CHAT + KEY + b"Content-Length: 60000\r\n\r\n" + b"x" * 59_000,
    "chunks of a byte": CHAT + KEY + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 10_000,
    "a body that nobody asked for": CHAT + b"Content-Length: 4000000\r\n\r\n" + b"x" * 3_000_000,
}


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    """An engine that begins an answer and never ends it."""
    made = started(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", "stall")
    yield made
    made.close()


def _gateway(engine: ScriptedEngine, folder: Path, *options: str) -> serving.Process:
    settings = {"api_keys": [digest("right")], "scrape_period_s": 3600.0}
    return serving.gateway(serving.fleet_file(folder, [engine.url], gateway=settings), *options)


@pytest.fixture(scope="module")
def front(engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Process]:
    made = _gateway(engine, tmp_path_factory.mktemp("fleet"))
    with serving.closing(made):
        yield made


@pytest.fixture(scope="module")
def front_with_tls(engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Process]:
    if which("openssl") is None:
        pytest.skip("needs openssl, to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = new_certificate(folder)
    made = _gateway(engine, folder, "--certfile", str(certificate), "--keyfile", str(key))
    with serving.closing(made):
        yield made


def _sent(
    ports: Callable[[], int], data: bytes, is_repeated: bool, most: int, tls: ssl.SSLContext | None = None
) -> int:
    """Send on `CONNECTIONS` connections and read nothing, until no more or `most` bytes are taken; how many were."""
    with ExitStack() as stack:
        left: dict[socket.socket, bytes] = {}
        segment = data * (1 + (32 << 10) // len(data)) if is_repeated else data
        for _ in range(CONNECTIONS):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", ports()))
            if tls is not None:
                client = stack.enter_context(tls.wrap_socket(client))
            client.setblocking(False)
            left[client] = segment
        sent, moved_s = 0, time.monotonic()
        while left and sent < most and time.monotonic() < moved_s + QUIET_S * (10 if SCALE > 1 else 1):
            for client in list(left):
                try:
                    num = client.send(left[client])
                except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                    continue
                except OSError:
                    del left[client]  # refused
                    continue
                sent, moved_s = sent + num, time.monotonic()
                left[client] = left[client][num:] or (segment if is_repeated else b"")
                if not left[client]:
                    del left[client]
            time.sleep(0.001)
        time.sleep(QUIET_S)
        return sent


@pytest.mark.parametrize("name", [*REPEATED, *ONCE])
def test_connections_take_a_bounded_amount_of_memory(front: serving.Process, name: str) -> None:
    is_repeated = name in REPEATED
    data = REPEATED[name] if is_repeated else ONCE[name]
    with memory_ceiling(front, peak_mib=BASE_MIB + CONNECTIONS * CONNECTION_MIB):
        _sent(lambda: front.port, data, is_repeated, most=(200 << 20) * SCALE)


@pytest.mark.ci
@pytest.mark.parametrize("name", [*REPEATED, *ONCE])
def test_over_tls_they_take_twice_as_much_at_most(front_with_tls: serving.Process, name: str) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    is_repeated = name in REPEATED
    data = REPEATED[name] if is_repeated else ONCE[name]
    with memory_ceiling(front_with_tls, peak_mib=BASE_MIB + CONNECTIONS * 2 * CONNECTION_MIB):
        num = _sent(lambda: front_with_tls.port, data, is_repeated, most=(200 << 20) * SCALE, tls=tls)
    assert num > 64 << 10


def test_workers_take_no_more(engine: ScriptedEngine, tmp_path: Path) -> None:
    made = _gateway(engine, tmp_path, "--workers", "2")
    with serving.closing(made):
        _ = made.port
        serving.all_up(made, 1)
        serving.until(lambda: len(children(made.process.pid)) >= 2)
        pids = children(made.process.pid)
        before = sum(map(resident_mib, pids))
        with memory_ceiling(made, peak_mib=BASE_MIB):
            for name, data in REPEATED.items():
                if name != "metrics that are not read":
                    _sent(lambda: made.port, data, True, most=(100 << 20) * SCALE)
        after = sum(map(resident_mib, pids))
        print(f"{len(pids)} workers: {before:.1f} MiB before, {after:.1f} afterwards")  # noqa: T201
        assert after - before <= 2 * BASE_MIB + CONNECTIONS * CONNECTION_MIB, (before, after)


@pytest.mark.ci
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_behind_envoy_they_take_no_more(engine: ScriptedEngine, tls: bool, tmp_path: Path) -> None:
    """Envoy has connections of its own to the gateway, of which encrypted ones may take 2 MiB each.

    Envoy bounds what its clients send and leave unread: it is held to that here, the gateway by the tests above.
    """
    envoys.binary()
    certificate, key = new_certificate(tmp_path)
    made = _gateway(engine, tmp_path, *(("--certfile", str(certificate), "--keyfile", str(key)) if tls else ()))
    with serving.closing(made):
        envoy = Envoy(envoys.plain_proxy(tls), 0, [made.port], tmp_path)
        with closing(envoy):
            envoys.listening(envoy)
            serving.all_up(envoy, 1)
            for name, data in REPEATED.items():
                with memory_ceiling(made, peak_mib=BASE_MIB + CONNECTIONS * CONNECTION_MIB * (1 + tls)):
                    num = _sent(lambda: envoy.port, data, True, most=(100 << 20) * SCALE)
                print(f"{name}: Envoy has taken {num >> 10:,} KiB")  # noqa: T201
            assert "version" in serving.send(envoy, "/version").json()  # who reads is still answered


@pytest.mark.ci
def test_a_picker_behind_envoy_takes_no_more(engine: ScriptedEngine, tmp_path: Path) -> None:
    """Envoy reads one request of a connection at a time, so its calls to the picker are no more than connections."""
    pytest.importorskip("grpc")
    envoys.binary()
    settings = {"api_keys": [digest("right")], "scrape_period_s": 3600.0}
    picker = envoys.picker(serving.fleet_file(tmp_path, [engine.url], gateway=settings))
    with closing(picker):
        envoy = Envoy(envoys.configuration(), picker.grpc_port, [int(engine.url.rpartition(":")[2])], tmp_path)
        with closing(envoy):
            serving.all_up(picker, 1)
            envoys.listening(envoy)
            for name, data in REPEATED.items():
                with memory_ceiling(picker, peak_mib=BASE_MIB + CONNECTIONS * CONNECTION_MIB):
                    num = _sent(lambda: envoy.port, data, True, most=(100 << 20) * SCALE)
                print(f"{name}: Envoy has taken {num >> 10:,} KiB")  # noqa: T201
