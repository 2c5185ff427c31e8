"""The hosts by which a gateway without keys may be reached."""

from __future__ import annotations

import pytest

from headway.gateway.server.hosts import ExpectedHosts


@pytest.mark.parametrize("host", ["localhost", "LocalHost:8080", "a.localhost", "127.0.0.1:1", "127.1.2.3", "[::1]:80"])
def test_loopback_names_are_expected(host: str) -> None:
    for listening in ("127.0.0.1", "::1", "0.0.0.0", "10.0.0.5"):
        assert ExpectedHosts(listening, ()).accepts(host.encode())


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "127.0.0.1@evil", "", "a:b:c", "\xff"]
)
def test_other_names_are_not(host: str) -> None:
    for listening in ("127.0.0.1", "0.0.0.0"):
        assert not ExpectedHosts(listening, ()).accepts(host.encode("latin-1"))


def test_addresses_are_expected_unless_only_loopback_is_listened_on() -> None:
    for listening in ("0.0.0.0", "10.0.0.5", "::"):
        assert ExpectedHosts(listening, ()).accepts(b"10.0.0.5:8080")
        assert ExpectedHosts(listening, ()).accepts(b"[fd00::5]:8080")
    assert not ExpectedHosts("127.0.0.1", ()).accepts(b"10.0.0.5:8080")


def test_named_hosts_are_expected_with_any_port_and_case() -> None:
    hosts = ExpectedHosts("0.0.0.0", ("Gateway.llm.svc", "gateway:8080"))
    for host in (b"gateway.llm.svc", b"GATEWAY.llm.svc.:80", b"gateway"):
        assert hosts.accepts(host)
    assert not hosts.accepts(b"other.llm.svc")
    assert ExpectedHosts("127.0.0.1", ("*",)).accepts(b"evil.example")


def test_pages_are_told_by_their_origin() -> None:
    hosts = ExpectedHosts("127.0.0.1", ("gateway.lan",))
    for origin in (b"http://localhost:3000", b"https://gateway.lan", b"http://[::1]:3000"):
        assert hosts.accepts_origin(origin)
    for origin in (b"http://evil.example", b"null", b"", b"chrome-extension://abc", b"http://localhost.evil.example"):
        assert not hosts.accepts_origin(origin)
