"""Values that are valid under a JSON schema, like the output of an engine with guided decoding.

Covers the keywords that guided decoding commonly supports. Other keywords raise an error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

_KNOWN = frozenset((
    "type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions", "properties", "required",
    "additionalProperties", "items", "prefixItems", "minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "format", "title", "description", "default", "examples",
    "$schema", "$id", "nullable", "propertyOrdering", "minProperties", "strict",
))  # fmt: skip
_FORMATS = {
    "date-time": "2026-01-02T03:04:05Z",
    "date": "2026-01-02",
    "time": "03:04:05Z",
    "duration": "PT1H",
    "email": "reader@example.com",
    "hostname": "example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.com/",
    "uuid": "12345678-1234-4234-8234-123456789abc",
}
_MAX_DEPTH = 6
"""Depth below which objects have only their required properties, and arrays the fewest allowed items, so that recursion
ends."""


class SchemaError(Exception):
    """The schema is not supported or cannot be satisfied."""


def text(schema: Any) -> str:
    """A JSON text that is valid against the schema. Raises SchemaError."""
    try:
        return json.dumps(_value(schema, schema, 0), ensure_ascii=False)
    except RecursionError:
        raise SchemaError("every value of the schema is infinitely deep") from None


def pieces(answer: str) -> list[str]:
    """Split a text into pieces of four characters, the typical size of a token."""
    return re.findall(r"(?s).{1,4}", answer)


def _value(schema: Any, root: Any, depth: int) -> Any:
    if schema is True or schema == {}:
        return "w3"
    if not isinstance(schema, Mapping):
        raise SchemaError(f"expected a schema, found {json.dumps(schema)}")
    if unknown := schema.keys() - _KNOWN:
        raise SchemaError(f"keyword {min(unknown)!r} is not supported")
    if "$ref" in schema:
        return _value(_resolve(schema["$ref"], root), root, depth + 1)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return _first(schema["enum"], "enum")
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return _value(_shallowest(schema[key], key, depth), root, depth + 1)
    if "allOf" in schema:
        return _value(_merged(schema, root), root, depth + 1)
    return _typed(schema, root, depth)


def _typed(schema: Mapping[str, Any], root: Any, depth: int) -> Any:
    kind = schema.get("type") or ("object" if "properties" in schema else "array" if "items" in schema else "string")
    if isinstance(kind, list):
        kind = "null" if "null" in kind and depth > _MAX_DEPTH else _first(kind, "type")
    match kind:
        case "object":
            return _object(schema, root, depth)
        case "array":
            return _array(schema, root, depth)
        case "string":
            return _string(schema)
        case "integer" | "number":
            return _number(schema, kind == "integer")
        case "boolean":
            return True
        case "null":
            return None
    raise SchemaError(f"type {json.dumps(kind)} is not known")


def _object(schema: Mapping[str, Any], root: Any, depth: int) -> dict[str, Any]:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    names = [name for name in properties if name in required or depth <= _MAX_DEPTH]
    value = {name: _value(properties[name], root, depth + 1) for name in names}
    more = schema.get("additionalProperties", True)
    for name in required:
        if name not in value:
            value[name] = _value(True if more is True else more, root, depth + 1)
    for i in range(schema.get("minProperties", 0) - len(value)):
        value[f"w{i}"] = _value(True if more is True else more, root, depth + 1)
    return value


def _array(schema: Mapping[str, Any], root: Any, depth: int) -> list[Any]:
    prefix, items = schema.get("prefixItems", []), schema.get("items", True)
    least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
    num = max(least, min(max(len(prefix), 1), most) if depth <= _MAX_DEPTH else 0)
    return [_value(prefix[i] if i < len(prefix) else items, root, depth + 1) for i in range(num)]


def _string(schema: Mapping[str, Any]) -> str:
    if (name := schema.get("format")) is not None:
        if name not in _FORMATS:
            raise SchemaError(f"format {name!r} is not supported")
        return _FORMATS[name]
    word = "w3".ljust(schema.get("minLength", 0), "a")
    return word[: schema.get("maxLength", len(word))]


def _number(schema: Mapping[str, Any], is_whole: bool) -> float:
    step = schema.get("multipleOf", 1 if is_whole else 0)
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if step:
        number = math.ceil(low / step) * step if low is not None else 0
        number += step * (number == schema.get("exclusiveMinimum"))
        if low is None and high is not None and number >= high:
            number = math.floor(high / step) * step - step * ("exclusiveMaximum" in schema)
    elif low is None:
        number = 0.5 if high is None or high > 0.5 else high - 1
    else:
        number = low if "minimum" in schema else (low + 1 if high is None else (low + high) / 2)
    too_high = high is not None and (number > high or number == schema.get("exclusiveMaximum"))
    if too_high:
        raise SchemaError("no number is within the bounds")
    return int(number) if is_whole else number


def _resolve(reference: Any, root: Any) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise SchemaError(f"$ref {json.dumps(reference)}: expected one within the schema, as #/$defs/NAME")
    found = root
    for part in reference[1:].split("/")[1:]:
        try:
            found = found[part.replace("~1", "/").replace("~0", "~")]
        except (KeyError, TypeError):
            raise SchemaError(f"$ref {reference} leads nowhere") from None
    return found


def _shallowest(choices: Any, key: str, depth: int) -> Any:
    """The first choice; at great depth, the first choice that does not recurse."""
    _first(choices, key)
    ends = [
        each for each in choices if isinstance(each, Mapping) and not ({"$ref", "items", "properties"} & each.keys())
    ]
    return ends[0] if depth > _MAX_DEPTH and ends else choices[0]


def _merged(schema: Mapping[str, Any], root: Any) -> dict[str, Any]:
    """One schema equivalent to `allOf`."""
    merged = {key: value for key, value in schema.items() if key != "allOf"}
    for part in schema["allOf"]:
        while isinstance(part, Mapping) and "$ref" in part:
            part = _resolve(part["$ref"], root)
        if not isinstance(part, Mapping):
            raise SchemaError("allOf: expected schemas")
        for key, value in part.items():
            if key in ("properties", "$defs") and key in merged:
                value = {**merged[key], **value}
            elif key == "required":
                value = [*merged.get(key, []), *value]
            merged[key] = value
    return merged


def _first(values: Any, key: str) -> Any:
    if not isinstance(values, list) or not values:
        raise SchemaError(f"{key}: expected a list with a value")
    return values[0]
