"""/openapi.json describes what the gateway does: bodies that fit its schemas are accepted, others are refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings

import serving
from serving import MODEL, send

pytest.importorskip("httptools")
pytest.importorskip("sqlalchemy")
pytest.importorskip("schemathesis")

import requests
import schemathesis
from schemathesis.generation.hypothesis.builder import HypothesisTestConfig, HypothesisTestMode, create_test
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance

from headway.gateway.relay.request import MAX_TOKENS
from headway.gateway.server.app import application, endpoints
from headway.gateway.server.openapi import document
from headway.gateway.settings import Batches, Settings

KEY = {"Authorization": "Bearer key"}
SUM = hashlib.sha256(b"key").hexdigest()


def _front(folder: Path, engines: list[serving.Process]) -> serving.Process:
    sections = {
        "api_keys": [SUM],
        "admin_keys": [SUM],
        "batches": {"store": "batches.sqlite"},
        "hold_s": 0.5,
        "explain": True,
    }
    return serving.gateway(serving.fleet_file(folder, [engine.url for engine in engines], gateway=sections))


@pytest.fixture(scope="module")
def fronts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[serving.Process, serving.Process]]:
    """A gateway whose replicas stay, and one whose replicas are added and removed."""
    engines = [serving.emulator("--speed", "1000", "--output-tokens", "4") for _ in range(2)]
    made = [_front(tmp_path_factory.mktemp("fleet"), engines) for _ in range(2)]
    with serving.closing(*engines, *made):
        for front in made:
            serving.all_up(front, 2)
        yield made[0], made[1]


def _description() -> dict[str, Any]:
    """The description with an existing model."""
    made = document(endpoints(), Settings(api_keys=(SUM,), admin_keys=(SUM,), batches=Batches()))
    for name, schema in made["components"]["schemas"].items():
        if name.endswith("Request"):
            schema["properties"]["model"] = {"const": MODEL}
            schema["properties"]["n"] = {"enum": [1, None]}
    return made


NO_EXTRAS = {"generation": {"allow-extra-parameters": False}}
"""Unknown headers and parameters are ignored."""
LABELS = sorted(f"{method.upper()} {path}" for path, methods in _description()["paths"].items() for method in methods)


@pytest.fixture(scope="module")
def operations() -> dict[str, Any]:
    """The operations by label. Not made when tests are collected: each process of a run collects all tests."""
    config = schemathesis.config.SchemathesisConfig.from_dict(NO_EXTRAS)
    results = schemathesis.openapi.from_dict(_description(), config=config).get_all_operations()
    return {operation.label: operation for operation in (result.ok() for result in results)}


@pytest.fixture(scope="module")
def authenticated() -> set[str]:
    """Operations that have refused a request without a key which they serve with one. Each check of that sends two more
    requests, and what is checked is the same for all requests of an operation."""
    return set()


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as made:
        yield made


@pytest.mark.sampled(6)
@pytest.mark.parametrize("label", LABELS)
def test_the_gateway_behaves_as_described(
    label: str,
    operations: dict[str, Any],
    fronts: tuple[serving.Process, serving.Process],
    authenticated: set[str],
    session: requests.Session,
) -> None:
    operation = operations[label]
    front = fronts["workers" in operation.path]

    @settings(
        max_examples=8,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @seed(1)
    def is_answered_as_described(case: Any) -> None:
        _shorten(case)
        response = case.call(base_url=front.url, headers=KEY, session=session)
        # A schema does not know the pools, nor what an engine accepts.
        is_free = label == "POST /workers" or "x-headway-replica" in response.headers
        excluded = [positive_data_acceptance] if is_free else []
        if label in authenticated:
            excluded.append(ignored_auth)
        case.validate_response(response, excluded_checks=excluded, headers=KEY)
        if response.status_code < 300:
            authenticated.add(label)

    config = HypothesisTestConfig(project=operation.schema.config, modes=list(HypothesisTestMode))
    create_test(operation=operation, test_func=is_answered_as_described, config=config)()


def _shorten(case: Any) -> None:
    """Limit tokens to the engine's context, which a schema does not know."""
    if isinstance(case.body, dict):
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            value = case.body.get(name)
            if isinstance(value, int | float) and 64 < value <= MAX_TOKENS:
                case.body[name] = 64


def test_the_description_is_served_without_a_key(
    fronts: tuple[serving.Process, serving.Process], tmp_path: Path
) -> None:
    described = send(fronts[0], "/openapi.json").json()
    made = document(endpoints(), Settings(api_keys=(SUM,), admin_keys=(SUM,), batches=Batches()))
    assert described == json.loads(json.dumps(made))
    assert {"/v1/chat/completions", "/v1/batches/{id}/cancel", "/workers/{id}/drain", "/dashboard/data"} <= set(
        described["paths"]
    )
    assert "max_tokens" in described["components"]["schemas"]["ChatRequest"]["properties"]
    assert (
        "security" in described["paths"]["/v1/files"]["get"] and "security" not in described["paths"]["/health"]["get"]
    )
    plain = document(endpoints(), Settings())
    assert not any(path.startswith(("/workers", "/v1/files", "/dashboard")) for path in plain["paths"])
    assert "security" not in plain["paths"]["/v1/chat/completions"]["post"]


def test_every_endpoint_is_description() -> None:
    made = document(endpoints(), Settings(admin_keys=(SUM,), batches=Batches()))
    described = {(method.upper(), path) for path, methods in made["paths"].items() for method in methods}
    routes = application(_nobody, _nobody).routes
    assert described == {
        (method, route.path.replace(":path}", "}")) for route in routes for method in route.methods - {"HEAD"}
    }


def _nobody(*args: Any) -> Any:
    raise AssertionError("it is not started")


def test_a_405_lists_all_methods_of_its_path(fronts: tuple[serving.Process, serving.Process]) -> None:
    reply = send(fronts[0], "/v1/files", method="PATCH")
    assert reply.status == 405 and reply.headers["allow"] == "GET, HEAD, POST"
    assert reply.json()["error"]["message"] == "PATCH is not for /v1/files"


def test_replica_ids_of_any_length_are_not_found(fronts: tuple[serving.Process, serving.Process]) -> None:
    for id in ("9" * 5000, "-1", "a", "%00", "١"):
        path = f"/workers/{id}".encode().decode("latin-1") if id.isascii() else "/workers/%D9%A1"
        reply = send(fronts[0], path, headers=KEY)
        assert reply.status == 404 and reply.json()["error"]["code"] == "not_found"


def test_deep_nesting_is_refused(fronts: tuple[serving.Process, serving.Process]) -> None:
    for deep in (b"[" * 30_000, b"[" * 30_000 + b"]" * 30_000):
        for path in ("/v1/batches", "/workers", "/v1/chat/completions"):
            reply = send(fronts[0], path, b'{"model": "m", "pool": "p", "x": %s}' % deep, headers=KEY)
            assert reply.status == 400 and reply.json()["error"]["type"] == "invalid_request_error"
