"""Addresses and connections of Valkey: refused, encrypted, kept apart, found in a cluster, and nothing sent twice."""

from __future__ import annotations

import asyncio
import gc
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from shutil import which
from typing import Any
from urllib.parse import quote

import pytest

pytest.importorskip("redis")
pytest.importorskip("sqlalchemy")

import processes
import valkey_server
from headway.core.errors import HeadwayError
from headway.gateway.accounts.store import StoredKey, Use
from headway.gateway.accounts.stores import account_store
from headway.gateway.peers.store import KEEP_PARTS_S
from headway.gateway.peers.stores import peer_store
from headway.gateway.valkey import Valkey
from headway.gateway.valkey_address import valkey_address
from headway.limits.budgets import Budget
from serving import until

PATIENCE_S = 60.0


def run(location: str, work: Callable[[Valkey], Awaitable[Any]]) -> Any:
    async def within() -> Any:
        connections = Valkey(location, PATIENCE_S)
        try:
            return await work(connections)
        finally:
            await connections.close()

    return asyncio.run(within())


@pytest.mark.parametrize("scheme", ["redis", "rediss", "valkey", "valkeys"])
def test_an_address_says_all_that_a_connection_needs(scheme: str) -> None:
    bare, full = (
        valkey_address(f"{scheme}://db"),
        valkey_address(f"{scheme}://me:{quote('p@:/#?', safe='')}@[::1]:7000/3?prefix=a.b:c"),
    )
    assert (bare.host, bare.port, bare.database, bare.prefix, bare.user) == ("db", 6379, 0, "headway", None)
    assert (full.host, full.port, full.database, full.prefix) == ("::1", 7000, 3, "a.b:c")
    assert (full.user, full.password) == ("me", "p@:/#?")
    assert (bare.tls is None) == (scheme in ("redis", "valkey"))
    assert bare.tls is None or bare.tls == {"ssl_cert_reqs": "required", "ssl_check_hostname": True}


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("redis://", "not an address of Valkey or Redis"),
        ("redis://a:b:c/0", "expected redis://user:password@host:port/0"),
        ("redis://:se#cret@db/0", "%23, %2F and %3F"),
        ("redis://db/first", "'first' is no number"),
        ("redis://db/0?prefx=a", "did you mean 'prefix'"),
        ("redis://db/0?prefix={a}", "expected letters"),
        ("redis://db/0?ssl_cert_reqs=none", "expected rediss:// or valkeys://"),
        ("rediss://db/0?ssl_cert_reqs=maybe", "expected required, or none"),
    ],
)
def test_a_malformed_address_is_refused_without_its_password(address: str, words: str) -> None:
    with pytest.raises(HeadwayError) as error:
        valkey_address(address)
    assert words in str(error.value) and "cret" not in str(error.value)


def test_stores_of_other_prefixes_and_databases_are_other_stores(valkey: valkey_server.Server) -> None:
    """Channels, too, of which a server has one set for all databases."""
    begin = valkey.new()
    places = [begin, valkey.new(), begin.replace("/0", "/1")]

    async def work() -> None:
        accounts = [account_store(place) for place in places]
        heard: list[list[str]] = [[] for _ in places]
        peers = [peer_store(place, "same name", PATIENCE_S) for place in places]
        for i, each in enumerate(peers):
            await each.connect(heard[i].append, lambda: None)
        for i, (store, peer) in enumerate(zip(accounts, peers, strict=True)):
            await store.add_key(StoredKey("k", f"{i}", "", Budget()))
            await store.exchange([Use("k", "", "2026-01-05", "m", 1, 10**i, 0, 0.0)], "2026-01-05")
            await peer.publish([f"{i}"])
            await peer.add_parts([(b"s", i, b"")])
            assert await peer.acquire_lease("l", 600.0)
        for i, (store, peer) in enumerate(zip(accounts, peers, strict=True)):
            assert [key.name for key in await store.keys()] == [f"{i}"]
            by_key, _ = await store.exchange([], "2026-01-05")
            assert by_key == {"k": (10**i, 0.0)}
            assert [part[0] for part in await peer.parts(b"s")] == [i]
            while not heard[i]:
                await asyncio.sleep(0.01)
        for each in (*accounts, *peers):
            await each.close()
        assert heard == [["0"], ["1"], ["2"]]

    asyncio.run(work())


def test_what_ends_ends_by_the_servers_clock_and_what_was_spent_stays(valkey: valkey_server.Server) -> None:
    location = valkey.new()
    prefix = f"{{{location.partition('prefix=')[2]}}}:"

    async def work() -> None:
        store, peer = account_store(location), peer_store(location, "me", PATIENCE_S)
        await peer.connect(lambda _: None, lambda: None)
        await store.set_team("t", Budget(5, None, "day"))
        await store.add_key(StoredKey("k", "k", "t", Budget()))
        await store.exchange([Use("k", "t", "2026-01-05", "m", 1, 10, 0, 0.0)], "2026-01-05")
        await peer.add_parts([(b"s", 0, b"x")])
        assert await peer.acquire_lease("l", 600.0)
        for each in (store, peer):
            await each.close()

    asyncio.run(work())
    left_ms = {str(key)[len(prefix) :]: valkey.call("PTTL", key) for key in valkey.call("KEYS", f"{prefix}*")}  # type: ignore[attr-defined]
    assert {key for key, left in left_ms.items() if left == -1} == {
        "keys",
        "teams",
        "key-changes",
        "days",
        "usage:2026-01-05",
        "spent:2026-01-05",
        "spent:2026-01",
    }
    assert 0 < left_ms[f"stream:{b's'.hex()}"] <= 1000 * KEEP_PARTS_S and 0 < left_ms["lease:l"] <= 600_000


def test_a_server_that_has_lost_its_keys_is_not_taken_for_one_that_has_none(valkey: valkey_server.Server) -> None:
    """As an SQLite file that is gone: what is known goes on. A key that is added begins a new store."""
    location = valkey.new()
    prefix = f"{{{location.partition('prefix=')[2]}}}:"

    async def work() -> None:
        store = account_store(location)
        await store.open()
        await store.add_key(StoredKey("k", "k", "", Budget()))
        before = await store.num_changes()
        valkey.call("DEL", *valkey.call("KEYS", f"{prefix}*"))  # type: ignore[misc]
        with pytest.raises(OSError, match="has lost its keys"):
            await store.open()
        await store.add_key(StoredKey("new", "new", "", Budget()))
        await store.open()
        assert await store.num_changes() > before, "the number of no earlier state"
        await store.close()

    asyncio.run(work())


async def risks(location: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What a store of keys says of its server when it is opened, once."""
    caplog.clear()
    store = account_store(location)
    for _ in range(2):
        await store.open()
    await store.close()
    return [each.message for each in caplog.records if "the key store" in each.message]


def test_a_server_that_removes_keys_is_named(valkey: valkey_server.Server, caplog: pytest.LogCaptureFixture) -> None:
    assert asyncio.run(risks(valkey.new(), caplog)) == []
    try:
        valkey.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        (found,) = asyncio.run(risks(valkey.new(), caplog))
        assert "allkeys-lru" in found
    finally:
        valkey.call("CONFIG", "SET", "maxmemory-policy", "noeviction")


def test_a_server_without_room_is_away_and_keeps_what_it_has(valkey: valkey_server.Server) -> None:
    async def work() -> None:
        store = account_store(valkey.new())
        await store.add_key(StoredKey("k", "k", "", Budget()))
        uses = [Use("k", "", "2026-01-05", "m", 1, 10, 0, 0.5), Use("k", "", "2026-01-06", "m", 1, 10, 0, 0.5)]
        try:
            valkey.call("CONFIG", "SET", "maxmemory", 1)
            for attempt in (store.exchange(uses, "2026-01-06"), store.set_team("t", Budget())):
                with pytest.raises(OSError, match="memory"):
                    await attempt
        finally:
            valkey.call("CONFIG", "SET", "maxmemory", 0)
        assert await store.spent("2026-01-01", "2026-02-01") == ({}, {}) and await store.teams() == {}
        await store.exchange(uses, "2026-01-06")
        assert await store.spent("2026-01-01", "2026-02-01") == ({"k": (20, 1.0)}, {"": (20, 1.0)})
        await store.close()

    asyncio.run(work())


def test_a_change_that_is_refused_leaves_no_trace(valkey: valkey_server.Server) -> None:
    location = valkey.new()

    async def work() -> None:
        store = account_store(location)
        with pytest.raises(HeadwayError, match="unknown team"):
            await store.add_key(StoredKey("k", "k", "none", Budget()))
        assert (await store.num_changes(), await store.keys()) == (0, [])
        await store.add_key(StoredKey("k", "k", "", Budget()))
        before = await store.num_changes()
        with pytest.raises(HeadwayError, match="already"):
            await store.replace_key(StoredKey("k", "changed", "", Budget()), StoredKey("k", "k", "", Budget()))
        assert [key.name for key in await store.keys()] == ["k"] and await store.num_changes() == before
        await store.close()

    asyncio.run(work())


class Proxy:
    """In front of a server: passes all on, but closes a connection in place of one answer."""

    def __init__(self, port: int) -> None:
        self._port, self.swallows = port, False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, commands = await asyncio.open_connection("127.0.0.1", self._port)

        async def forward() -> None:
            while command := await reader.read(65536):
                commands.write(command)
            commands.close()

        forwarding = asyncio.create_task(forward())
        while answer := await answers.read(65536):
            if self.swallows:
                break
            writer.write(answer)
        self.swallows = False
        writer.close()
        await forwarding


def test_a_command_whose_answer_is_lost_is_not_sent_again(valkey: valkey_server.Server) -> None:
    """What was used would be counted twice."""

    async def work() -> None:
        proxy = Proxy(valkey.port)
        async with await asyncio.start_server(proxy.serve, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            connections = Valkey(valkey.new().replace(str(valkey.port), str(port)), PATIENCE_S)
            key = connections.key("n")
            assert await connections.run("INCR", key) == 1
            proxy.swallows = True
            with pytest.raises(OSError):
                await connections.run("INCR", key)
            assert not proxy.swallows and await connections.run("GET", key) == b"2"
            await connections.close()

    asyncio.run(work())


def test_a_server_that_hangs_fails_like_one_that_is_down(valkey: valkey_server.Server) -> None:
    location = valkey.new()

    async def work() -> None:
        connections = Valkey(location, 0.1)
        with valkey.paused():
            with pytest.raises(OSError):
                await connections.run("GET", "k")
            with pytest.raises(OSError):
                await connections.subscribe("c")
        await connections.close()

    asyncio.run(work())


def test_a_connection_that_was_idle_over_a_restart_is_made_anew(valkey: valkey_server.Server) -> None:
    async def work(connections: Valkey) -> None:
        await connections.run("SET", connections.key("k"), "kept")
        with valkey.stopped():
            pass
        for _ in range(3):  # the loop learns that the connection has ended
            await asyncio.sleep(0)
        assert await connections.run("GET", connections.key("k")) == b"kept"

    run(valkey.new(), work)


def test_all_of_a_store_is_at_the_node_of_a_cluster_that_has_its_keys() -> None:
    """By the address of another node, which has none."""
    if valkey_server.missing():
        pytest.skip(valkey_server.missing())
    with ExitStack() as running:
        nodes = []
        for _ in range(2):
            options = ["--cluster-enabled", "yes", "--cluster-port", f"{processes.ports(2)[1]}"]
            nodes.append(running.enter_context(valkey_server.server(*options)))
        asked, owner = nodes
        owner.call("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        asked.call("CLUSTER", "MEET", "127.0.0.1", owner.port, owner.options[-1])
        until(lambda: "cluster_slots_assigned:16384" in str(asked.call("CLUSTER", "INFO")))
        until(lambda: all("cluster_state:ok" in str(each.call("CLUSTER", "INFO")) for each in nodes))

        async def work() -> None:
            locations = [asked.new(), asked.url.replace(str(asked.port), str(owner.port))]
            locations[1] += f"?{locations[0].partition('?')[2]}"
            heard: asyncio.Queue[str] = asyncio.Queue()
            peers = [peer_store(each, name, PATIENCE_S) for each, name in zip(locations, "ab", strict=True)]
            for each in peers:
                await each.connect(heard.put_nowait, lambda: None)
            assert await peers[1].is_alive("a") and await peers[0].is_alive("b")
            await peers[0].publish(["hello"])
            assert [await heard.get(), await heard.get()] == ["hello", "hello"]
            await peers[0].add_parts([(f"{i}".encode(), 0, b"") for i in range(20)])  # of one node, or it would refuse
            assert len(await peers[1].parts(b"7")) == 1 and await peers[0].acquire_lease("l", 600.0)
            for each in peers:
                await each.close()
            stores = [account_store(each) for each in locations]
            await stores[0].add_key(StoredKey("k", "k", "", Budget()))
            uses = [Use("k", "", f"2026-01-{day:02}", "m", 1, 10, 0, 0.5) for day in range(1, 32)]
            await stores[0].exchange(uses, "2026-01-31")
            by_key, _ = await stores[1].spent("2026-01-02", "2026-02-01")
            assert by_key == {"k": (300, 15.0)} and len(await stores[1].keys()) == 1
            for store in stores:
                await store.close()

        asyncio.run(work())


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[valkey_server.Server, str]]:
    """A server that takes encrypted connections with a password only, and its certificate."""
    if valkey_server.missing():
        pytest.skip(valkey_server.missing())
    if which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = str(folder / "key.pem"), str(folder / "cert.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", key, "-out", certificate, "-days", "1", "-subj", "/CN=headway-test"]
    subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, stderr=subprocess.DEVNULL)
    files = ["--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", certificate]
    options = [*files, "--tls-auth-clients", "no", "--requirepass", "a/b"]
    try:
        with valkey_server.server(*options, is_tls=True) as made:
            yield made, certificate
    except valkey_server.NoTlsError:
        pytest.skip("this Valkey was built without TLS")


@pytest.fixture
def cut_connections() -> Iterator[None]:
    """A TLS connection that ends before its peer has said so is closed when it is collected: here and now."""
    yield
    gc.collect()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.usefixtures("cut_connections")
def test_connections_are_encrypted_and_the_server_is_who_it_says(encrypted: tuple[valkey_server.Server, str]) -> None:
    server, certificate = encrypted
    begin = f"valkeys://:a%2Fb@127.0.0.1:{server.port}/0"

    async def works(location: str) -> bool:
        connections = Valkey(location, PATIENCE_S)
        try:
            subscription = await connections.subscribe("c")
            await connections.run("PUBLISH", "c", "x")
            assert await subscription.next() == b"x"
            await subscription.close()
        finally:
            await connections.close()
        return True

    assert asyncio.run(works(f"{begin}?ssl_ca_certs={certificate}"))
    assert asyncio.run(works(f"{begin}?ssl_cert_reqs=none"))
    for location, words in (
        (begin, "certificate verify failed"),
        (f"{begin}?ssl_ca_certs={certificate}".replace("127.0.0.1", "localhost"), "certificate"),
        (f"{begin}?ssl_ca_certs={certificate}".replace("a%2Fb", "wrong"), "WRONGPASS|invalid.*password"),
        (f"{begin}?ssl_ca_certs={certificate}".replace(":a%2Fb@", ""), "(?i)auth"),
        (f"redis://:a%2Fb@127.0.0.1:{server.port}/0", "."),
    ):
        with pytest.raises(OSError, match=words) as error:
            asyncio.run(works(location))
        assert "a/b" not in str(error.value) and "a%2Fb" not in str(error.value)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.usefixtures("cut_connections")
def test_a_server_without_a_log_is_named(
    encrypted: tuple[valkey_server.Server, str], caplog: pytest.LogCaptureFixture
) -> None:
    server, certificate = encrypted
    location = f"rediss://:a%2Fb@127.0.0.1:{server.port}/0?ssl_ca_certs={certificate}"
    (found,) = asyncio.run(risks(location, caplog))
    assert "appendonly no" in found
