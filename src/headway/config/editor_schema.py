"""The JSON schema of fleet files and scenarios, with which editors complete keys and mark mistakes.

It is generated from the types of `config.spec` and accepts everything that the reader accepts. Only the reader finds
errors that concern the whole fleet, such as a router's unknown argument or a model without a GPU.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headway.config.spec import Spec
from headway.core.duration import DURATION, is_seconds

FILE_NAME = "headway.schema.json"
COMMENT = f"# yaml-language-server: $schema={FILE_NAME}\n"
"""The first line of a YAML file, which tells editors where its schema is."""
_DURATION = {"type": "string", "pattern": f"^({DURATION.pattern})$"}
_PLACEHOLDER = {"type": "string", "pattern": r"\$\{[^{}]+\}"}


def editor_schema() -> dict[str, Any]:
    """A schema in JSON Schema's draft 2020-12. A fleet file needs no workload; a scenario does."""
    schema = msgspec.json.schema(Spec)
    definitions = schema["$defs"]
    for name, definition in definitions.items():
        for key, property in definition.get("properties", {}).items():
            definition["properties"][key] = _as_written(key, property, has_variables=name == "Settings")
    spec = definitions["Spec"]
    spec["required"] = [key for key in spec.get("required", ()) if key != "workload"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Headway's fleet file", **schema}


def _as_written(key: str, property: dict[str, Any], has_variables: bool) -> dict[str, Any]:
    """A property that also accepts what files may write instead of its value: a duration with a unit, or a variable."""
    also = [_DURATION] if is_seconds(key) else []
    also += [_PLACEHOLDER] if has_variables else []
    if not also:
        return property
    if "items" in property:  # each duration in a list has its own unit
        property = {**property, "items": {"anyOf": [property["items"], *also]}}
    kept: dict[str, Any] = {name: property[name] for name in ("description", "default") if name in property}
    return {**kept, "anyOf": [{name: value for name, value in property.items() if name not in kept}, *also]}
