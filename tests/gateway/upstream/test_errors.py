"""Engines' errors as clients get them."""

from __future__ import annotations

import json

import pytest

from headway.gateway.upstream.errors import EngineError, RefusedError, client_error, is_retryable, openai_error


@pytest.mark.parametrize(
    ("status", "expected"),
    [(200, False), (307, True), (400, False), (404, False), (408, True), (429, True), (500, True), (503, True)],
)
def test_statuses_that_another_engine_may_better(status: int, expected: bool) -> None:
    assert is_retryable(status) is expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"object":"error","message":"too long"}', "too long"),
        (b'{"detail":"not found"}', "not found"),
        (b'{"detail":[{"loc":["body"]}]}', '{"detail":[{"loc":["body"]}]}'),
        (b"Bad Gateway", "Bad Gateway"),
        (b"", "the engine answered 400"),
        (b"x" * 5000, "x" * 1000),
        (b"\xff", "\ufffd"),
    ],
)
def test_other_error_bodies_become_openais(data: bytes, message: str) -> None:
    error = json.loads(openai_error(400, data))["error"]
    assert (error["message"], error["type"], error["code"]) == (message, "invalid_request_error", "engine_refused")


def test_openais_error_body_is_unchanged() -> None:
    data = b'{"error": {"message": "no", "odd": 1}}'
    assert openai_error(400, data) is data


def test_a_client_hears_of_an_overload_as_such_and_of_other_failures_as_a_bad_gateway() -> None:
    overload = client_error("pool/0", RefusedError(429, b"busy"))
    assert (overload.status, overload.code, overload.retry_after_s) == (429, "engine_overloaded", 1)
    assert overload.message == "pool/0 answered 429: busy"
    failure = client_error("pool/0", EngineError("broke off"))
    assert (failure.status, failure.code, failure.message) == (502, "engine_error", "pool/0 broke off")


@pytest.mark.parametrize(("status", "is_untouched"), [(429, True), (503, True), (500, False), (400, False)])
def test_an_overloaded_engine_did_not_touch_the_request(status: int, is_untouched: bool) -> None:
    assert RefusedError(status, b"").is_untouched is is_untouched
