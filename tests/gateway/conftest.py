"""Emulated engines, and a gateway with API keys in front of one of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import serving
import valkey_server
from keys import digest


@pytest.fixture(scope="session")
def valkey() -> Iterator[valkey_server.Server]:
    """A server that keeps what it was told when it is killed. Tests have prefixes of their own."""
    if valkey_server.missing():
        pytest.skip(valkey_server.missing())
    pytest.importorskip("redis")
    with valkey_server.server("--appendonly", "yes", "--appendfsync", "always") as made:
        yield made


@pytest.fixture(scope="module")
def engines() -> Iterator[list[serving.Process]]:
    made = [serving.emulator(), serving.emulator()]
    with serving.closing(*made):
        yield made


@pytest.fixture(scope="module")
def keyed_front(engines: list[serving.Process], tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Process]:
    """A gateway with keys of different limits, and the admin key `root`."""
    keys: list[Any] = [
        digest("free"),
        {"sha256": digest("few"), "requests_per_minute": 2},
        {"sha256": digest("short"), "tokens_per_minute": 60},
        {"sha256": digest("patient"), "tier": 3},
        {"sha256": digest("late"), "expires": "2020-01-01"},
    ]
    gateway = {"api_keys": keys, "admin_keys": [digest("root")], "body_timeout_s": 0.5}
    path = serving.fleet_file(tmp_path_factory.mktemp("fleet"), [engines[0].url], gateway=gateway)
    with serving.up(serving.gateway(path), 1) as made:
        yield made
