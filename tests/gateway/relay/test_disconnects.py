"""Clients that disconnect before the response, after requests of any length."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import serving
from serving import MODEL, metric, send, until

pytest.importorskip("httptools")


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Process]:
    engine = serving.emulator()
    folder: Path = tmp_path_factory.mktemp("fleet")
    made = serving.gateway(serving.fleet_file(folder, [engine.url]))
    with serving.closing(engine, made):
        serving.all_up(made, 1)
        yield made


@pytest.mark.parametrize("num_bytes", [100, 60_000, 70_000, 100_000, 140_000])
def test_the_disconnect_of_a_client_with_a_long_body_is_noticed(front: serving.Process, num_bytes: int) -> None:
    """The server pauses reading while much of a body is unread, and resumes it afterwards."""
    body = {"model": MODEL, "prompt": "a" * num_bytes, "max_tokens": 5000, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", front.port)) as client:
        client.sendall(head.encode())
        send(front, "/version").close()  # the gateway waits for the body by now
        client.sendall(data)
        until(lambda: metric(front, "headway_requests_in_flight") == 1)
    until(lambda: metric(front, "headway_requests_in_flight") == 0, 5.0)
