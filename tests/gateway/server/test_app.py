"""The application: its open endpoints, unknown paths and methods, and who may call what."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

pytest.importorskip("starlette")

import serving
from gateway_in_process import Inside, Reply
from headway import __version__
from headway.gateway.server.app import endpoints
from headway.gateway.settings import Batches, Settings
from keys import digest


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    made = Inside(tmp_path_factory.mktemp("fleet"), pool={"api": "openai"}, gateway={"scrape_period_s": 3600.0})
    yield made
    made.close()


def _request(inside: Inside, path: str, method: str = "GET") -> Reply:
    reply: Reply = inside.run(inside.post(b"", path, method=method))
    return reply


def test_open_endpoints(inside: Inside) -> None:
    models = {"object": "list", "data": [{"id": serving.MODEL, "object": "model", "created": 0, "owned_by": "headway"}]}
    assert json.loads(_request(inside, "/v1/models").body) == models
    assert json.loads(_request(inside, "/version").body) == {"version": __version__}
    assert "headway_requests_total" in _request(inside, "/metrics").body.decode()
    health = _request(inside, "/health")
    assert health.status == 200 and json.loads(health.body) == {"status": "ok", "up": 1, "replicas": 1}
    inside.gateway.admission.is_closing = True
    try:
        health = _request(inside, "/health")
        assert health.status == 503 and json.loads(health.body) == {"status": "unavailable", "up": 1, "replicas": 1}
    finally:
        inside.gateway.admission.is_closing = False


def test_the_address_alone_says_what_is_there(inside: Inside) -> None:
    told = json.loads(_request(inside, "/").body)
    assert told["version"] == __version__ and told["about"].startswith("Headway") and told["dashboard"] is None
    assert all(_request(inside, told[name]).status == 200 for name in ("docs", "openapi", "models", "health"))


def test_the_page_of_the_api_lists_every_endpoint_and_loads_nothing(inside: Inside) -> None:
    reply = _request(inside, "/docs")
    text = reply.body.decode()
    shown = set(re.findall(r"<b>([A-Z]+)</b><code>([^<]+)</code>", text))
    paths = json.loads(_request(inside, "/openapi.json").body)["paths"]
    assert shown == {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert "<code>max_tokens</code>" in text and reply.headers["content-security-policy"].startswith(
        "default-src 'none'"
    )
    assert not re.search(r"<script|<link|<img|src=|https?://", text)


def test_unknown_paths_and_methods_are_openai_errors(inside: Inside) -> None:
    reply = _request(inside, "/nothing")
    assert reply.status == 404 and reply.error()["message"] == "there is no /nothing"
    reply = _request(inside, "/v1/files", "PATCH")
    assert reply.status == 405 and reply.headers["allow"] == "GET, HEAD, POST"


@pytest.mark.parametrize(
    ("path", "words"),
    [("/workers", "admin_keys"), ("/v1/files", "gateway.batches"), ("/dashboard", "admin_keys, or `dashboard: open`")],
)
def test_endpoints_that_need_a_setting_say_which(inside: Inside, path: str, words: str) -> None:
    reply = _request(inside, path)
    assert reply.status == 404 and words in reply.error()["message"]


def test_each_endpoint_has_one_entry_and_a_known_access() -> None:
    table = endpoints()
    assert len({(each.method, each.path) for each in table}) == len(table)
    closed, everything = Settings(), Settings(admin_keys=(digest("root"),), batches=Batches())
    assert all(each.access.exists(everything) for each in table)
    for each in table:
        key = each.access.key(everything)
        assert key == "admin" if each.path.startswith("/workers") else key in ("", "client", "admin")
        assert each.access.exists(closed) or each.access.missing, "the error names the setting"
