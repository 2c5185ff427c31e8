"""The web server: certificates, and sockets to listen on."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

pytest.importorskip("httptools")

import serving
from certificates import new_certificate
from headway.core.errors import HeadwayError
from headway.gateway.server import web_server
from headway.gateway.server.web_server import Tls
from headway.gateway.settings import Settings
from serving import send


def test_hosts_are_expected_of_a_gateway_without_keys() -> None:
    with web_server.listen("127.0.0.1", 0) as listener:
        hosts = web_server.expected_hosts(Settings(hosts=("gateway.lan",)), listener)
        assert hosts is not None and hosts.accepts(b"gateway.lan:80") and not hosts.accepts(b"other.lan")
        assert web_server.expected_hosts(Settings(api_keys=("0" * 64,)), listener) is None


def test_a_certificate_makes_connections_https(engines: list[serving.Process], tmp_path: Path) -> None:
    import ssl
    from urllib.request import urlopen

    certificate, key = new_certificate(tmp_path)
    path = serving.fleet_file(tmp_path, [engines[0].url])
    made = serving.gateway(path, "--certfile", str(certificate), "--keyfile", str(key))
    with serving.closing(made):
        context = ssl.create_default_context(cafile=str(certificate))
        with urlopen(f"https://127.0.0.1:{made.port}/version", context=context) as answer:
            assert answer.status == 200
        with pytest.raises(ConnectionError):
            send(made, "/version")


def test_unusable_certificates_are_refused(tmp_path: Path) -> None:
    certificate, key = new_certificate(tmp_path)
    (tmp_path / "other").mkdir()
    other, _ = new_certificate(tmp_path / "other")
    Tls(certificate, key).check()
    for tls in (
        Tls(other, key),
        Tls(tmp_path / "none.pem"),
        Tls(certificate),
        Tls(key, key),
    ):
        with pytest.raises(HeadwayError, match="not a certificate and its key"):
            tls.check()


def test_a_port_is_used_by_one_gateway() -> None:
    with web_server.listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert web_server.address(listener) == f"127.0.0.1:{port}"
        with pytest.raises(HeadwayError, match=f"127.0.0.1:{port}: cannot listen"):
            web_server.listen("127.0.0.1", port)
        with pytest.raises(HeadwayError, match="cannot listen"):
            web_server.listen_shared("127.0.0.1", port, 2)


def test_shared_listeners_have_one_port() -> None:
    listeners = web_server.listen_shared("127.0.0.1", 0, 3)
    assert len(listeners) == 3 and len({each.getsockname() for each in listeners}) == 1
    assert len(set(listeners)) == (3 if sys.platform == "linux" else 1)
    for each in listeners:
        each.close()


def test_an_ipv6_address_has_brackets() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 on this machine")
    try:
        listener = web_server.listen("::1", 0)
    except HeadwayError:
        pytest.skip("no IPv6 on this machine")
    with listener:
        assert web_server.address(listener) == f"[::1]:{listener.getsockname()[1]}"
