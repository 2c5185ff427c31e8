"""Requests made from the served description of the API, for its real models: nothing fails, and engines answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("httptools")
pytest.importorskip("sqlalchemy")
pytest.importorskip("schemathesis")

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings

import serving
from attacking import SCALE, memory_ceiling
from keys import bearer, digest
from serving import send

KEY = bearer("key")
NUM_EXAMPLES = 8 * SCALE


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Process]:
    sections = {"api_keys": [digest("key")], "admin_keys": [digest("root")], "batches": {}, "hold_s": 0.5}
    engine = serving.emulator("--speed", "1000", "--output-tokens", "4")
    made = serving.gateway(serving.fleet_file(tmp_path_factory.mktemp("fleet"), [engine.url], gateway=sections))
    with serving.closing(engine, made):
        serving.all_up(made, 1)
        yield made


def _operations(front: serving.Process) -> Iterator[Any]:
    """The operations for clients, with the models' names in place of any text."""
    description = send(front, "/openapi.json").json()
    names = [model["id"] for model in send(front, "/v1/models").json()["data"]]
    assert names
    for name, schema in description["components"]["schemas"].items():
        if name.endswith("Request"):
            schema["properties"]["model"] = {"enum": names}
    for result in schemathesis.openapi.from_dict(description).get_all_operations():
        operation = result.ok()
        if not operation.path.startswith(("/workers", "/dashboard")):
            yield operation


def _send_examples(front: serving.Process, operation: Any, statuses: Counter[tuple[str, int]]) -> None:
    @seed(1)
    @given(case=operation.as_strategy())
    @settings(
        max_examples=NUM_EXAMPLES, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def send(case: Any) -> None:
        response = case.call(base_url=front.url, headers=KEY, session=session)
        statuses[operation.label, response.status_code] += 1
        assert response.status_code < 500, (operation.label, case.body, response.content)

    with requests.Session() as session:
        send()


def test_requests_of_any_shape_are_answered_without_a_failure(front: serving.Process) -> None:
    statuses: Counter[tuple[str, int]] = Counter()
    with memory_ceiling(front, peak_mib=60.0):
        for operation in _operations(front):
            _send_examples(front, operation, statuses)
    print(dict(statuses))  # noqa: T201  # shown by pytest -s, and if the test fails
    for path in ("chat/completions", "completions"):
        assert statuses[f"POST /v1/{path}", 200], "no request reached an engine"
    assert send(front, "/health").json()["up"] == 1
