"""Files that list a pool's endpoints: what they may hold, and when they count as changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.core.errors import HeadwayError
from headway.serving.endpoints_file import read
from headway.serving.gateway import read as read_fleet
from headway.serving.reload import FleetFile

pytest.importorskip("httptools")
POOL = {"name": "pool", "model": "qwen3-8b", "gpu": "h100", "engine": "vllm-0.15", "endpoints_file": "engines.yaml"}
FIRST, SECOND = "http://10.0.0.7:8000", "http://10.0.0.8:8000"


def _fleet(folder: Path, *pools: dict[str, Any], **sections: Any) -> Path:
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump({"fleet": list(pools), **sections}))
    return path


@pytest.mark.parametrize(
    "text",
    [
        f"- {FIRST}  # rack 2\n- {SECOND}\n",
        f"- {FIRST}\n- {SECOND}\n- {FIRST}\n",
        json.dumps([FIRST, SECOND]),
        json.dumps([{"targets": ["10.0.0.7:8000", "10.0.0.8:8000"], "labels": {"job": "vllm"}}]),
        "- targets: ['10.0.0.7:8000']\n- targets:\n  - 10.0.0.8:8000\n",
    ],
)
def test_addresses_are_a_list_or_the_target_groups_of_prometheus(text: str, tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    path.write_text(text)
    assert read(path) == (FIRST, SECOND)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "engines.yaml: no such file"),
        ("", "engines.yaml: lists no address; expected at least one, http://host:port"),
        ("[]", "engines.yaml: lists no address"),
        ("endpoints: []", "engines.yaml:1: expected a list of addresses, http://host:port"),
        (f"- {FIRST}\n- ftp://10.0.0.8", "engines.yaml:2: 'ftp://10.0.0.8'; expected http://host:port"),
        ("- [x]", "engines.yaml:1: ''; expected http://host:port"),
        ("- {target: [a]}", "engines.yaml:1: has no `targets`; expected an address, or a group with its `targets`"),
        ("- {", r"engines.yaml:1: not valid YAML"),
    ],
)
def test_what_is_no_list_of_addresses_is_refused_with_its_line(text: str | None, why: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "engines.yaml").write_text(text)
    path = _fleet(tmp_path, POOL)
    with pytest.raises(HeadwayError) as raised:
        read_fleet(path)
    assert f"fleet.yaml:2: fleet[0].endpoints_file: {tmp_path}/{why}" in str(raised.value)


def test_a_pool_has_its_endpoints_in_one_place(tmp_path: Path) -> None:
    path = _fleet(tmp_path, POOL | {"endpoints": [FIRST]})
    with pytest.raises(HeadwayError, match="endpoints_file: the pool has `endpoints`, too; expected one of the two"):
        read_fleet(path)


def test_a_file_that_changes_changes_the_fleet_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    listed = tmp_path / "engines.yaml"
    listed.write_text(f"- {FIRST}\n")
    file = FleetFile(_fleet(tmp_path, POOL), lambda read: read)
    before = file.signature()
    assert before == file.signature() and file.plan.pools[0].endpoints == (FIRST,)
    listed.write_text(f"- {FIRST}\n- {SECOND}\n")
    assert file.signature() != before
    plan = file.read_again(file.plan)
    assert plan.pools[0].endpoints == (FIRST, SECOND) and plan.pools[0].pool.replicas == 2
    listed.write_text("")
    with pytest.raises(HeadwayError, match="lists no address"):
        file.read_again(plan)
    listed.write_text(f"- {SECOND}\n")
    assert file.read_again(plan).pools[0].endpoints == (SECOND,)


def test_the_parts_of_combos_have_files_too(tmp_path: Path) -> None:
    (tmp_path / "engines.yaml").write_text(f"- {FIRST}\n- {SECOND}\n")
    part = {key: value for key, value in POOL.items() if key != "name"}
    other = part | {"endpoints": ["http://10.0.0.9:8000"]}
    del other["endpoints_file"]
    path = _fleet(tmp_path, combos=[{"name": "pair", "prefill": part, "decode": other}])
    file = FleetFile(path, lambda read: read)
    assert [each.endpoints for each in file.plan.pools] == [(FIRST, SECOND), ("http://10.0.0.9:8000",)]
    before = file.signature()
    (tmp_path / "engines.yaml").write_text(f"- {FIRST}\n")
    assert file.signature() != before
