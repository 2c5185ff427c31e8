"""Values set in the text of a YAML file: it reads as the changed document, and what is not changed stays."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config.strict_yaml import Places, change, parse
from headway.config.yaml_edit import edited, unified_diff

FLEET = """\
# The fleet of the assistant.
fleet:
  - name: chat          # two nodes
    model: llama-3.1-8b
    engine: vllm-0.15     # as installed
    replicas: 2
  # the second one
  - {name: code, model: qwen3-8b, engine: {name: vllm-0.15, max_num_seqs: 64}}
slo: {ttft_s: 450ms}

policies:
  # found in May
  routing: round-robin  # the old one
# the end
"""
WITHOUT_POLICIES = "fleet:\n- model: llama-3.1-8b\n  endpoints:\n  - http://a:1\n  - http://b:1 # the new one\n"
CHANGES: list[dict[tuple[str | int, ...], Any]] = [
    {("policies", "routing"): "least-loaded"},
    {("policies", "routing"): {"name": "freest", "num_tiers": 4}},
    {("policies", "ordering"): "fair", ("policies", "ordering_at"): "gateway"},
    {("policies",): {"preset": "headway", "scaling": None}},
    {("policies", "admission"): None},
    {("fleet", 0, "replicas"): 3},
    {("fleet", 0, "engine", "max_num_seqs"): 128},
    {("fleet", 0, "endpoints"): ["http://a:1"]},
    {("fleet", 0, "endpoints"): ["http://a:1"], ("policies", "routing"): "random"},
]


def patched(text: str, diff: str) -> str:
    """What `patch` makes of a text: hunks of a unified diff, one after the other."""
    lines, made, at = text.splitlines(True), list[str](), 0
    for line in diff.splitlines(True)[2:]:
        if line.startswith("@@"):
            start = int(line.split()[1].lstrip("-").split(",")[0]) - 1
            made += lines[at:start]
            at = start
        elif line.startswith("\\"):
            made[-1] = made[-1].removesuffix("\n")
        elif line[0] in " -":
            assert lines[at].rstrip("\n") == line[1:].rstrip("\n")
            at += 1
        if line[0] in " +":
            made.append(line[1:])
    return "".join(made + lines[at:])


@pytest.mark.parametrize("text", [FLEET, FLEET.rstrip("\n"), WITHOUT_POLICIES, "fleet: [{model: a}]\n"])
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_the_text_reads_as_the_changed_document(text: str, changes: dict[tuple[str | int, ...], Any]) -> None:
    document, places = parse(text, "f.yaml")
    wanted, _ = change(document, places, {key: ("", value) for key, value in changes.items()})
    made = edited(text, changes)
    assert parse(made, "f.yaml")[0] == wanted
    comments = [line[line.index("#") :] for line in text.splitlines() if "#" in line]
    is_inside = ("policies",) in changes or (("fleet", 0, "endpoints") in changes and text == WITHOUT_POLICIES)
    assert is_inside or all(each in made for each in comments)
    assert patched(text, unified_diff(text, made, "f.yaml")).rstrip("\n") == made.rstrip("\n")


def test_only_the_lines_that_change_differ() -> None:
    made = edited(FLEET, {("policies", "routing"): "random", ("fleet", 0, "engine", "max_num_seqs"): 128})
    before, after = FLEET.splitlines(), made.splitlines()
    assert [line for line in after if line not in before] == [
        "    engine: {name: vllm-0.15, max_num_seqs: 128}     # as installed",
        "  routing: random  # the old one",
    ]
    assert len(before) == len(after)
    added = edited(FLEET, {("policies", "ordering"): "fair"}).splitlines()
    assert added[added.index("  routing: round-robin  # the old one") + 1] == "  ordering: fair"


def test_a_value_with_an_anchor_is_written_anew_with_the_whole_document() -> None:
    text = "fleet:\n- &one {name: a, replicas: 1} # first\n- *one\n"
    made = edited(text, {("fleet", 0, "replicas"): 3})
    found = parse(made, "f.yaml")[0]["fleet"]
    assert [each["replicas"] for each in found] == [3, 1]


_TEXTS = st.text(st.sampled_from("ab: #'\"{}[],&*-\n1\u00e9"), max_size=8)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("kmn"), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=40)
@given(_VALUES, st.sampled_from([("policies", "routing"), ("fleet", 1, "name"), ("own",), ("fleet", 0, "replicas")]))
def test_any_value_is_read_as_it_was_set(value: Any, key: tuple[str | int, ...]) -> None:
    made = parse(edited(FLEET, {key: value}), "f.yaml")[0]
    document, _ = parse(FLEET, "f.yaml")
    assert made == change(document, Places(), {key: ("", value)})[0]
    assert yaml.safe_load(edited(FLEET, {key: value})) is not None
