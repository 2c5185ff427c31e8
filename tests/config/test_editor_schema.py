"""The schema for editors takes what the reader takes, and marks keys and values that it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.cli import main
from headway.config import strict_yaml
from headway.config.editor_schema import editor_schema
from headway.config.spec import Spec
from headway.core.errors import HeadwayError

jsonschema_rs = pytest.importorskip("jsonschema_rs")
ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "src" / "headway" / "scenario" / "presets"
VALIDATOR = jsonschema_rs.validator_for(editor_schema())
_SECTIONS = {field for field in Spec.__struct_fields__}


def _documents() -> Iterator[tuple[str, Any]]:
    """Scenarios and fleet files: presets, examples, and what the documentation's pages write or show in full."""
    for path in (*PRESETS.glob("*.yaml"), *(ROOT / "examples").glob("*.yaml")):
        yield path.stem, yaml.safe_load(path.read_text())
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text()
        blocks = re.findall(r"^cat > \S+\.yaml <<'?END'?\n(.*?)^END$", text, re.DOTALL | re.MULTILINE)
        for i, block in enumerate((*blocks, *re.findall(r"^```yaml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))):
            try:
                document = yaml.safe_load(block)
            except yaml.YAMLError:
                continue
            if isinstance(document, dict) and {"fleet", "combos"} & document.keys() and document.keys() <= _SECTIONS:
                yield f"{page.stem}-{i}", document


def _by_yaml_1_2(value: Any) -> Any:
    """0.43e9 is a number to editors and to our reader, and a text to PyYAML."""
    if isinstance(value, dict):
        return {key: _by_yaml_1_2(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_by_yaml_1_2(each) for each in value]
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?[0-9.]+e[-+]?[0-9]+", value)
    return float(value) if is_number else value


DOCUMENTS = {name: _by_yaml_1_2(document) for name, document in _documents()}


def test_presets_examples_and_pages_are_valid() -> None:
    assert len(DOCUMENTS) > 30
    faults = {name: [each.message for each in VALIDATOR.iter_errors(made)] for name, made in DOCUMENTS.items()}
    assert {name: found for name, found in faults.items() if found} == {}


def _with_typos(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The document with one key misspelt, for each key."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        if isinstance(document, dict):
            yield (*at, key), {(f"{name}x" if name == key else name): kept for name, kept in document.items()}
        if isinstance(value, dict | list):
            for place, changed in _with_typos(value, (*at, key)):
                copy = dict(document) if isinstance(document, dict) else list(document)
                copy[key] = changed
                yield place, copy


@pytest.mark.parametrize("name", ["chat", "tenants", "pascal"])
def test_every_typo_that_the_reader_finds_by_types_is_marked(name: str) -> None:
    num = 0
    for place, changed in _with_typos(DOCUMENTS[name]):
        refused = _is_refused(changed)
        if refused:
            num += 1
            assert not VALIDATOR.is_valid(changed), place
    assert num > 15


def _is_refused(document: dict[str, Any]) -> bool:
    try:
        strict_yaml.convert(document, Spec, strict_yaml.Places())
    except HeadwayError:
        return True
    return False


@pytest.mark.parametrize(
    "pool", [{"replicas": "two"}, {"gpu": 5}, {"replica": 2}, {"startup_s": "soon"}, {"role": "prefil"}]
)
def test_wrong_values_are_marked(pool: dict[str, Any]) -> None:
    right = {"model": "llama-3.1-8b", "gpu": "h100"}
    assert VALIDATOR.is_valid({"fleet": [right]}) and not VALIDATOR.is_valid({"fleet": [{**right, **pool}]})


def test_a_new_file_names_its_schema(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    assert main(["new", str(path)]) == 0
    named = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", path.read_text().splitlines()[0])
    assert named is not None
    schema = json.loads((tmp_path / named[1]).read_text())
    assert schema == json.loads(json.dumps(editor_schema()))
    assert jsonschema_rs.validator_for(schema).is_valid(yaml.safe_load(path.read_text()))
