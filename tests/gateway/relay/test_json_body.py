"""Bodies are decoded to the same values in steps as at once, within limits, and encoded again without the steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.gateway.errors import DECODE_ERRORS, ApiError
from headway.gateway.relay import json_body
from headway.gateway.relay.json_body import LONG_BYTES, MAX_DEPTH, MAX_PARTS, MAX_VALUES, decode, encode


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every body is long, and every step a few bytes."""
    monkeypatch.setattr(json_body, "LONG_BYTES", 2)
    monkeypatch.setattr(json_body, "_STEP_BYTES", 7)
    monkeypatch.setattr(json_body, "_SCAN_BYTES", 5)
    monkeypatch.setattr(json_body, "_IN_NUMBERS", b"")
    monkeypatch.setattr(json_body, "_END_OF_KEY", json_body.re.compile(rb"(?!)"))
    yield


_CHARACTERS = st.sampled_from([*'ab"\\/u:,[{ \n\x01', "é", "\U0001f600", "d83d", "\ud83d", "\ude00", "x" * 9])
_TEXTS = st.lists(_CHARACTERS, max_size=12).map("".join)
_BYTES = st.sampled_from([b'"', b"\\", b",", b"[", b"}", b"u", b"1", b"\xff", b""])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | _TEXTS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(_TEXTS, inner, max_size=5),
    max_leaves=20,
)


def _result(decoded: Any, raw: bytes) -> Any:
    try:
        return decoded(raw)
    except DECODE_ERRORS:
        return "invalid"


@pytest.mark.ci
@pytest.mark.usefixtures("short_steps")
def test_steps_make_no_difference() -> None:
    @given(
        st.dictionaries(_TEXTS, _VALUES, min_size=1, max_size=5),
        st.booleans(),
        st.sampled_from([None, 1]),
        st.lists(
            st.tuples(st.floats(0.0, 0.999), _BYTES),
            max_size=2,
        ),
    )
    @settings(max_examples=300, deadline=None, database=None)
    def compare(value: Any, is_ascii: bool, indent: int | None, changes: list[tuple[float, bytes]]) -> None:
        raw = json.dumps(value, ensure_ascii=is_ascii, indent=indent).encode("utf-8", "surrogatepass")
        for place, change in changes:
            at = int(place * len(raw))
            raw = raw[:at] + change + raw[at + 1 :]
        expected = _result(msgspec.json.decode, raw)
        stepped = _result(lambda raw: decode(raw)[0], raw)
        if isinstance(expected, dict) or expected == "invalid":
            assert repr(stepped) == repr(expected if raw.lstrip().startswith(b"{") else None)

    compare()


def _body(value: bytes) -> bytes:
    return b'{"model":"m","x":%b}' % value


BEYOND = {
    "depth": _body(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH),
    "depth of a long body": _body(b'["%b",' % (b"a" * LONG_BYTES) + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"]"),
    "arrays": _body(b"[" + b"[]," * MAX_PARTS + b"1]"),
    "objects": _body(b"[" + b"{}," * MAX_PARTS + b"1]"),
    "strings": _body(b"[" + b'"",' * MAX_PARTS + b"1]"),
    "numbers": _body(b"[" + b"1," * (MAX_VALUES + 1) + b"1]"),
    "numbers and a string": _body(b"[" + b"1," * (MAX_VALUES - 9) + b'"a"]'),
    "a key": b'{"%b" :1}' % (b"k" * (2 * LONG_BYTES)),
    "a number": _body(b"0." + b"1" * (4 * LONG_BYTES)),
    "no JSON": b"[" * (1 << 20),
}


@pytest.mark.parametrize("raw", BEYOND.values(), ids=BEYOND)
def test_a_body_beyond_a_limit_is_refused(raw: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        decode(raw)
    assert refused.value.status == 400 and refused.value.code == "body_too_complex"


WITHIN = {
    "depth": _body(b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1)),
    "brackets in a text": _body(b'"%b"' % (b"[{" * 1000)),
    "parts in a text": _body(b'"%b"' % (b'[{\\"a\\":1,' * MAX_PARTS)),
    "token ids": _body(b"[" + b"11," * 1_000_000 + b"1]"),
    "messages": _body(b"[" + b'{"role":"user","content":"a, b"},' * 8000 + b"1]"),
    "a long text": _body(json.dumps('é"\\\n\U0001f600' * 100_000).encode()),
}


@pytest.mark.parametrize("raw", WITHIN.values(), ids=WITHIN)
def test_a_body_within_the_limits_is_decoded(raw: bytes) -> None:
    assert decode(raw)[0] == json.loads(raw)


def test_unchanged_values_of_a_long_body_are_copied() -> None:
    raw = b'{"model": "m", "max_tokens": 3.0, "prompt": "%b"}' % (b"\\u0061" * LONG_BYTES)
    read, fields = decode(raw)
    body = {**read, "model": "other", "stream": True}
    assert fields is not None
    sent = encode(body, read, fields)
    assert json.loads(sent) == body and b'"prompt":"\\u0061\\u0061' in sent and b'"max_tokens":3.0' in sent
    assert decode(b'{"model":"m"}') == ({"model": "m"}, None)
