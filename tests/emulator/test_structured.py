"""Answers that follow a JSON schema: valid by an independent validator, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.emulator import structured

jsonschema_rs = pytest.importorskip("jsonschema_rs")

NAMES = st.sampled_from(["a", "b", "c d", "é"])


def _numbers(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    bounds = st.integers(-50, 50)
    return st.one_of(
        st.just({"type": kind}),
        bounds.map(lambda low: {"type": kind, "minimum": low}),
        bounds.map(lambda high: {"type": kind, "maximum": high}),
        bounds.map(lambda low: {"type": kind, "exclusiveMinimum": low}),
        bounds.map(lambda high: {"type": kind, "exclusiveMaximum": high}),
        st.builds(
            lambda low, more, step: {"type": kind, "minimum": low, "maximum": low + step + more, "multipleOf": step},
            bounds,
            st.integers(0, 9),
            st.integers(1, 9),
        ),
    )


LEAVES = st.one_of(
    _numbers("integer"),
    _numbers("number"),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["null", "string"]}, {"const": {"x": [1]}}, {}]),
    st.builds(
        lambda least, more: {"type": "string", "minLength": least, "maxLength": least + more},
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    st.lists(st.integers() | st.text(max_size=3), min_size=1, max_size=3).map(lambda values: {"enum": values}),
    st.sampled_from(["date-time", "date", "email", "ipv4", "ipv6", "uri", "uuid", "hostname"]).map(
        lambda form: {"type": "string", "format": form}
    ),
)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda properties, required, closed: {
            "type": "object",
            "properties": properties,
            "required": sorted(required & properties.keys()),
            "additionalProperties": not closed,
        },
        st.dictionaries(NAMES, inner, max_size=3),
        st.sets(NAMES),
        st.booleans(),
    )


def _arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda items, least, more: {"type": "array", "items": items, "minItems": least, "maxItems": least + more},
        inner,
        st.integers(0, 3),
        st.integers(0, 3),
    )


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        _objects(inner), _arrays(inner), st.lists(inner, min_size=1, max_size=3).map(lambda each: {"anyOf": each})
    ),
    max_leaves=8,
)


@given(SCHEMAS)
def test_an_answer_is_valid_against_its_schema(schema: Any) -> None:
    text = structured.text(schema)
    assert jsonschema_rs.is_valid(schema, json.loads(text)), text
    assert "".join(structured.pieces(text)) == text


def test_recursive_schemas_end() -> None:
    tree = {
        "$defs": {
            "node": {
                "type": "object",
                "required": ["value", "next"],
                "additionalProperties": False,
                "properties": {
                    "value": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
            }
        },
        "$ref": "#/$defs/node",
    }
    assert jsonschema_rs.is_valid(tree, json.loads(structured.text(tree)))


def test_parts_of_all_of_are_merged() -> None:
    named = {"properties": {"name": {"type": "string"}}, "required": ["name"]}
    schema = {
        "$defs": {"named": named},
        "type": "object",
        "allOf": [
            {"$ref": "#/$defs/named"},
            {"properties": {"age": {"type": "integer", "minimum": 3}}, "required": ["age"]},
        ],
    }
    assert json.loads(structured.text(schema)).keys() == {"name", "age"}
    assert jsonschema_rs.is_valid(schema, json.loads(structured.text(schema)))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "string", "pattern": "a+"}, "'pattern'"),
        ({"$ref": "#/$defs/nowhere"}, "leads nowhere"),
        ({"$ref": "other.json"}, "within the schema"),
        ({"type": "text"}, '"text"'),
        ({"enum": []}, "enum"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "bounds"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "infinitely deep"),
        (["no schema"], "expected a schema"),
        ({"format": "phone"}, "'phone'"),
    ],
)
def test_schemas_that_cannot_be_followed(schema: Any, message: str) -> None:
    with pytest.raises(structured.SchemaError, match=message):
        structured.text(schema)
