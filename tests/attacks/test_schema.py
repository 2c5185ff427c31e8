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
COMPLETIONS = ("/v1/chat/completions", "/v1/completions")


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Process]:
    sections = {"api_keys": [digest("key")], "admin_keys": [digest("root")], "batches": {}, "hold_s": 0.5}
    engine = serving.emulator("--speed", "1000", "--output-tokens", "4")
    made = serving.gateway(serving.fleet_file(tmp_path_factory.mktemp("fleet"), [engine.url], gateway=sections))
    with serving.closing(engine, made):
        serving.all_up(made, 1)
        yield made


ACCEPTED: dict[str, Any] = {
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["role", "content"],
            "additionalProperties": False,
            "properties": {"role": {"const": "user"}, "content": {"type": "string"}},
        },
    },
    "prompt": {"type": "string"},
    "n": {"enum": [1, None]},
    "stream": {"type": "boolean"},
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 64},
}
"""Fields that the engine judges, and the gateway does not, as the engine accepts them."""


def _operations(front: serving.Process, accepted: bool) -> Iterator[Any]:
    """The operations for clients, with the models' names in place of any text; only those of requests with nothing but
    what the engine accepts, too."""
    description = send(front, "/openapi.json").json()
    names = [model["id"] for model in send(front, "/v1/models").json()["data"]]
    assert names
    for name, schema in description["components"]["schemas"].items():
        if name.endswith("Request"):
            schema["properties"]["model"] = {"enum": names}
            if accepted:
                fields = {key: ACCEPTED[key] for key in schema["properties"] if key in ACCEPTED}
                schema["properties"] = {"model": {"enum": names}, **fields}
                schema["additionalProperties"] = False
                schema["required"] = [key for key in ("model", "messages", "prompt") if key in schema["properties"]]
    for result in schemathesis.openapi.from_dict(description).get_all_operations():
        operation = result.ok()
        if operation.path in COMPLETIONS or not (accepted or operation.path.startswith(("/workers", "/dashboard"))):
            yield operation


def _send_examples(front: serving.Process, operation: Any, statuses: Counter[tuple[str, int, bool]]) -> None:
    @seed(1)
    @given(case=operation.as_strategy())
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def send(case: Any) -> None:
        response = case.call(base_url=front.url, headers=KEY, session=session)
        statuses[operation.label, response.status_code, "x-headway-replica" in response.headers] += 1
        assert response.status_code < 500, (operation.label, case.body, response.content)

    with requests.Session() as session:
        send()


@pytest.mark.ci
def test_requests_of_any_shape_are_answered_without_a_failure(front: serving.Process) -> None:
    statuses: Counter[tuple[str, int, bool]] = Counter()
    accepted: Counter[tuple[str, int, bool]] = Counter()
    with memory_ceiling(front, peak_mib=60.0):
        for operation in _operations(front, accepted=False):
            _send_examples(front, operation, statuses)
        for operation in _operations(front, accepted=True):
            _send_examples(front, operation, accepted)
    print(dict(statuses), dict(accepted))  # noqa: T201  # shown by pytest -s, and if the test fails
    for path in COMPLETIONS:
        assert any(statuses[f"POST {path}", status, True] for status in (200, 400)), "no request reached an engine"
        assert accepted[f"POST {path}", 200, True], "the engine answered no request"
    assert send(front, "/health").json()["up"] == 1
