"""Validation of batch files: the requests of valid lines, and an error for each invalid one."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from headway.gateway.batch.validate import LineValidator

PATH = "/v1/chat/completions"


def _validator(max_lines: int = 10, max_line_bytes: int = 1000) -> LineValidator:
    return LineValidator("batch_1", PATH, max_lines, max_line_bytes)


def _line(**changes: Any) -> bytes:
    return json.dumps({"custom_id": "a", "method": "POST", "url": PATH, "body": {"model": "m"}, **changes}).encode()


def test_a_valid_line_is_a_request_and_a_blank_one_is_skipped() -> None:
    validator = _validator()
    line = validator.read(3, _line())
    assert line is not None
    assert (line.batch, line.line, line.custom_id, json.loads(line.body)) == ("batch_1", 3, "a", {"model": "m"})
    assert validator.read(4, b"  ") is None
    assert validator.num_requests == 1 and not validator.errors


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (b"[" * 9000, "invalid_json_line", None),
        (_line(method="GET"), "invalid_method", "method"),
        (_line(url="/v1/embeddings"), "mismatched_url", "url"),
        (_line(custom_id=""), "invalid_custom_id", "custom_id"),
        (_line(custom_id="x" * 513), "invalid_custom_id", "custom_id"),
        (_line(custom_id="a\0"), "invalid_custom_id", "custom_id"),
        (_line(body=[1]), "invalid_body", "body"),
        (_line(body={"x": "y" * 10_000}), "line_too_long", None),
    ],
)
def test_an_invalid_line_is_an_error(raw: bytes, code: str, param: str | None) -> None:
    validator = _validator(max_line_bytes=9_500)
    assert validator.read(7, raw) is None
    (error,) = validator.errors
    assert (error.code, error.param, error.line) == (code, param, 7)


def test_custom_ids_are_unique() -> None:
    validator = _validator()
    assert validator.read(1, _line()) and validator.read(2, _line()) is None and validator.read(3, _line(custom_id="b"))
    assert [error.code for error in validator.errors] == ["duplicate_custom_id"]


def test_validation_stops_after_too_many_lines_or_errors() -> None:
    validator = _validator(max_lines=2)
    for number in range(3):
        assert not validator.can_stop
        validator.read(number, _line(custom_id=str(number)))
    assert validator.can_stop and [error.code for error in validator.errors] == ["too_many_lines"]
    validator = _validator(max_lines=1000)
    for number in range(150):
        validator.read(number, b"{")
    assert validator.can_stop and len(validator.errors) == 100


def test_a_long_line_has_the_limits_of_a_long_body() -> None:
    validator = _validator(max_line_bytes=1 << 20)
    assert validator.read(1, _line(body={"model": "m", "x": "a, " * 50_000})) is not None
    assert validator.read(2, _line(custom_id="b", body={"model": "m", "x": [[]] * 50_001})) is None
    assert [error.code for error in validator.errors] == ["body_too_complex"]
