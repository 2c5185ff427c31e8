"""The parts of a fleet file that an endpoint picker supports: Envoy sends the requests, each to one engine."""

from __future__ import annotations

import re
from importlib.util import find_spec
from ipaddress import ip_address
from urllib.parse import urlsplit

from headway.config.scenario import Scenario
from headway.config.strict_yaml import Key
from headway.gateway.server import web_server
from headway.serving.pools import declared_pools

_IN_GATEWAY = "`headway serve` does that"
_SETTINGS = {
    "max_attempts": "Envoy's routes retry; expected a `retry_policy` there",
    "pace_s": f"Envoy sends the answers to clients, and cannot pace their tokens; {_IN_GATEWAY}",
    "batches": f"batches are requests of the gateway itself; {_IN_GATEWAY}",
    "tracing": "Envoy's own tracing sees the whole request; expected it in Envoy's configuration",
    "cors": "Envoy answers the clients; expected its filter envoy.filters.http.cors",
}
"""Maps each key of `gateway` that a picker does not use to the reason."""


def check_installed() -> None:
    """Raises HeadwayError if the libraries for gRPC are missing."""
    for module in ("grpc", "grpc_health"):
        if find_spec(module) is None:
            raise web_server.not_installed(module, "epp")


def check(scenario: Scenario) -> None:
    """Raises HeadwayError if the scenario needs answers to pass through Headway, or Envoy cannot reach the engines'
    addresses."""
    spec, places = scenario.spec, scenario.places

    def refuse(key: Key, why: str) -> None:
        raise places.error(key, f"an endpoint picker cannot do it: {why}")

    policies = spec.policies
    if spec.cascade is not None:
        refuse(("cascade",), f"Envoy sends the first model's answer to the client, unjudged; {_IN_GATEWAY}")
    if policies.migration is not None:
        refuse(("policies", "migration"), f"a stream that Envoy relays continues at no other engine; {_IN_GATEWAY}")
    if policies.preempt_every_s is not None:
        refuse(("policies", "preempt_every_s"), f"a stream that Envoy relays cannot be paused; {_IN_GATEWAY}")
    if scenario.fleet.fallbacks.models:
        refuse(("fleet",), f"`fallback`: Envoy sends a request to endpoints of one model; {_IN_GATEWAY}")
    given = scenario.document.get("gateway") or {}
    for name, why in _SETTINGS.items():
        if name in given:
            refuse(("gateway", name), why)
    for each in declared_pools(scenario):
        if each.spec.slots:
            refuse(
                (*each.at, "slots"), f"the engines' slots are given to requests that the gateway sends; {_IN_GATEWAY}"
            )
        for i, url in enumerate(each.spec.endpoints):
            if why := _unreachable(url):
                raise places.error((*each.at, "endpoints", i), f"{url}: {why}")


def _unreachable(url: str) -> str:
    """Why Envoy cannot use this address; empty if it can use it."""
    parts = urlsplit(url)
    try:
        ip_address(parts.hostname or "")
        port = parts.port
    except ValueError:
        host = "127.0.0.1" if parts.hostname == "localhost" else "10.0.0.7"
        return f"Envoy is told IP addresses; expected one, such as http://{host}:{_port(parts.netloc)}"
    if parts.scheme != "http" or port is None or parts.path not in ("", "/"):
        return "Envoy is told an address and a port; expected http://ADDRESS:PORT, without a path"
    return ""


def _port(netloc: str) -> str:
    found = re.search(r":(\d+)$", netloc)
    return found[1] if found else "8000"
