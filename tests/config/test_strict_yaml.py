"""Strict files: what is wrong is named with file, line, key and the nearest valid name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct, field

from headway.config import strict_yaml
from headway.config.strict_yaml import Places, change, convert, parse, read, spell
from headway.core.errors import HeadwayError


class Poisson(Struct, frozen=True, forbid_unknown_fields=True, tag="poisson", tag_field="kind"):
    rate: float = 1.0


class Gamma(Struct, frozen=True, forbid_unknown_fields=True, tag="gamma", tag_field="kind"):
    rate: float = 1.0
    cv: float = 1.0


class Pool(Struct, frozen=True, forbid_unknown_fields=True):
    gpu: str
    tp: Annotated[int, Meta(ge=1)] = 1
    engine: str | dict[str, Any] = ""


class Doc(Struct, frozen=True, forbid_unknown_fields=True):
    fleet: tuple[Pool, ...] = ()
    arrivals: Poisson | Gamma = field(default_factory=Poisson)
    step: Literal["stretch", "exact"] = "stretch"
    rate: float = 0.0


def error_of(text: str) -> str:
    with pytest.raises(HeadwayError) as caught:
        data, places = parse(text, "f.yaml")
        convert(data, Doc, places)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "fleet:\n  - gpu: a\n    ngpu: 2\n",
            "f.yaml:3: fleet[0].ngpu: unknown key 'ngpu'; did you mean 'gpu'?",
        ),
        ("\nflete: []\n", "f.yaml:2: flete: unknown key 'flete'; did you mean 'fleet'?"),
        ("fleet:\n  - tp: 2\n", "f.yaml:2: fleet[0]: 'gpu' is missing"),
        ("fleet:\n  - gpu: a\n    tp: 0\n", "f.yaml:3: fleet[0].tp: expected integer >= 1"),
        ("rate: 55/s\n", "f.yaml:1: rate: expected number, got string: '55/s'"),
        ("fleet: sk-secret\n", "f.yaml:1: fleet: expected list, got string"),
        ("fleet:\n  - gpu: 7\n", "f.yaml:2: fleet[0].gpu: expected string, got integer"),
        ("step: strech\n", "f.yaml:1: step: unknown value 'strech'; did you mean 'stretch'?"),
        ("arrivals: {kind: gama}\n", "f.yaml:1: arrivals.kind: unknown value 'gama'; did you mean 'gamma'?"),
        (
            "arrivals:\n  kind: poisson\n  cv: 2\n",
            "f.yaml:3: arrivals.cv: unknown key 'cv'; one of: kind, rate",
        ),
        ("rate: .nan\n", "f.yaml:1: rate: expected a finite number"),
        ("rate: 1\nstep: exact\nrate: 2\n", "f.yaml:3: rate is here a second time"),
        ("rate: [\n", "f.yaml:2: not valid YAML: expected the node content, but found '<stream end>'"),
        ("- 1\n", "f.yaml: expected keys and values, found a list"),
        ("", "f.yaml: expected keys and values, found nothing"),
        ("rate: &a [*a]\n", "f.yaml:1: *a refers to itself"),
        ("a: &a {}\nrate:\n  &b x: [*b]\n  <<: &c {y: *c}\n", "f.yaml:4: *c refers to itself"),
        ("? [1]\n: 2\n", "f.yaml:1: a key must be a word"),
    ],
)
def test_errors_say_where_and_what(text: str, message: str) -> None:
    assert error_of(text) == message


def test_exponents_are_numbers() -> None:
    data, places = parse("rate: 1e3", "f.yaml")
    assert convert(data, Doc, places).rate == 1000.0


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match=r"no\.yaml: no such file"):
        read(tmp_path / "no.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(HeadwayError, match="cannot be read as text"):
        read(tmp_path / "b.yaml")


def test_changes_name_their_flag() -> None:
    original, file_places = parse("fleet:\n  - {gpu: a, engine: vllm}\n", "f.yaml")
    data, places = change(original, file_places, {("fleet", 0, "engine", "max_num_seqs"): ("--max-num-seqs", 3)})
    assert data["fleet"][0]["engine"] == {"name": "vllm", "max_num_seqs": 3}
    data, places = change(data, places, {("fleet", 0, "tp"): ("--tp", 0)})
    with pytest.raises(HeadwayError, match=r"^--tp: expected integer >= 1$"):
        convert(data, Doc, places)
    with pytest.raises(HeadwayError, match=r"^--x: f\.yaml:2: fleet\[0\]\.gpu: expected keys and values there$"):
        change(data, places, {("fleet", 0, "gpu", "x"): ("--x", 0)})
    assert original == {"fleet": [{"gpu": "a", "engine": "vllm"}]} and not file_places.flags


def test_places_of_keys() -> None:
    _, places = parse("a:\n  b:\n    - 1\n    - {c: 2}\n", "f.yaml")
    assert places.where(("a", "b", 1, "c")) == "f.yaml:4: a.b[1].c"
    assert places.where(("a", "b", 1, "missing", "deep")) == "f.yaml:4: a.b[1].missing.deep"
    assert Places().where(("a",)) == "a"
    with pytest.raises(HeadwayError, match=r"^f\.yaml:2: a\.b: no$"), places.at("a", "b"):
        raise HeadwayError("no")


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        data, places = parse(text, "f.yaml")
        convert(data, Doc, places)
    except HeadwayError as error:
        assert str(error).startswith("f.yaml")


@given(st.lists(st.one_of(st.integers(0, 9), st.sampled_from(["a", "bc"])), max_size=5))
def test_a_key_is_spelled_with_all_its_steps(key: list[str | int]) -> None:
    assert [c for c in spell(tuple(key)) if c not in ".[]"] == [c for step in key for c in str(step)]


def _repeated(num: int, times: int) -> str:
    """Lists of aliases in each other: `times` to the power of `num` values in a few hundred bytes."""
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * times)}]" for i in range(1, num)]
    return "\n".join(lines) + "\n"


def test_aliases_repeat_a_bounded_number_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of lists, of mappings and of merged keys; without a copy of any value before."""
    monkeypatch.setattr(strict_yaml, "_lines", None)  # it follows each alias, and is not reached
    expected = r"f\.yaml:\d: \*a\d: aliases repeat more than 100,000 values"
    assert re.fullmatch(expected, error_of(_repeated(9, 10)))
    merged = ["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 9))]
    assert re.fullmatch(expected, error_of("\n".join(merged)))
    with pytest.raises(HeadwayError, match=expected):
        strict_yaml.compose(_repeated(9, 10), "f.yaml")
    monkeypatch.setattr(strict_yaml, "_MAX_REPEATED", 100)
    assert "f.yaml:3: *a0" in error_of("a: &a0 [" + "x, " * 60 + "]\nb: *a0\nc: *a0\n")


@pytest.mark.parametrize("levels", [101, 2_000])
def test_levels_are_bounded(levels: int) -> None:
    assert error_of("a:\n  " + "[" * levels + "]" * levels) == "f.yaml:2: more than 100 levels"
    chained = [f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 200)]
    assert error_of("\n".join(["a0: &a0 [x]", *chained])) == "f.yaml:99: more than 100 levels with *a97"


def test_values_that_aliases_share_are_read() -> None:
    data, places = parse(
        "base: &base {gpu: h100, tp: 2}\nfleet:\n- *base\n- {<<: *base, tp: 4}\n" + "x: " + "[" * 90 + "]" * 90,
        "f.yaml",
    )
    assert data["fleet"] == [{"gpu": "h100", "tp": 2}, {"gpu": "h100", "tp": 4}]
    assert places.where(("fleet", 0, "gpu")) == "f.yaml:1: fleet[0].gpu"
