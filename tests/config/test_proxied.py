"""Pools that are only served: simulations leave them out with their requests, and nothing else changes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from headway import scenario
from headway.cli import main
from headway.config.proxied import proxied_names, without_proxied
from headway.config.strict_yaml import Places, read
from headway.core.errors import HeadwayError, LeftOutWarning
from headway.core.record import Records
from headway.planning.advise.days import Day
from headway.workload.files import to_parquet
from headway.workload.table import Workload

SIMULATED = {"name": "chat", "model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm-0.15", "replicas": 2}
OTHER = {"name": "other", "model": "qwen3-8b", "gpu": "a100-80gb", "engine": "vllm-0.15"}
PROXIED = {"name": "tiny", "model": "tiny-llama", "engine": "llama.cpp", "endpoints": ["http://a:1", "http://b:1"]}
MODELS = ("tiny-llama", "llama-3.1-8b", "qwen3-8b")
NUM = 60


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Requests for three models in turn."""
    codes = np.arange(NUM) % 3
    columns = {
        "arrival_s": np.arange(NUM) / 10,
        "prompt_tokens": 100 + np.arange(NUM),
        "output_tokens": np.full(NUM, 20),
        "model": codes.astype("i2"),
    }
    to_parquet(Workload(columns, models=MODELS).validate(), tmp_path / "day.parquet")
    return tmp_path / "day.parquet"


def document(trace: Path, fleet: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"name": "x", "fleet": fleet, "workload": {"trace": str(trace)}, **more}


def ran(content: dict[str, Any]) -> Records:
    return scenario.run(scenario.assemble(copy.deepcopy(content), Places(), Path())).records


@pytest.mark.parametrize("where", [{"endpoints": ["http://a:1"]}, {"endpoints_file": "engines.txt"}])
def test_commands_leave_it_out_wherever_its_replicas_are(
    where: dict[str, Any], trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = {"name": "tiny", "model": "tiny-llama", **where}
    file = tmp_path / "fleet.yaml"
    file.write_text(yaml.safe_dump({"fleet": [pool, SIMULATED, OTHER]}, sort_keys=False))
    assert main(["simulate", str(file), "--trace", str(trace), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["results"][0]["num_completed"] == NUM * 2 // 3
    assert printed.err.count("tiny has no gpu: it is left out") == 1


@pytest.mark.parametrize("at", [0, 1, 2])
def test_the_others_run_as_if_it_were_not_there(trace: Path, at: int) -> None:
    fleet = [SIMULATED, OTHER]
    mixed = [*fleet[:at], PROXIED, *fleet[at:]]
    alone = document(trace, fleet)
    alone["workload"]["trace"] = {"path": str(trace), "without_models": ["tiny-llama"]}
    with pytest.warns(LeftOutWarning, match="tiny has no gpu: it is left out"):
        found = ran(document(trace, mixed))
    expected = ran(alone)
    assert len(found.workload["arrival_s"]) == NUM * 2 // 3
    assert [each.pool for each in found.replicas] == ["chat", "chat", "other"]
    for name, column in expected.requests.items():
        assert np.array_equal(column, found.requests[name], equal_nan=column.dtype.kind == "f"), name


def test_it_is_kept_where_it_is_served_and_where_nothing_else_is(trace: Path) -> None:
    made = scenario.assemble(document(trace, [PROXIED, SIMULATED, OTHER]), Places(), Path())
    assert [pool.name for pool in made.fleet.pools] == ["tiny", "chat", "other"]
    only = document(trace, [PROXIED])
    assert without_proxied(only, Places())[0] == only and not proxied_names(only)
    with pytest.raises(HeadwayError, match="without which replicas can be served, not simulated"):
        ran(only)


def test_requests_for_a_model_that_another_pool_has_stay(trace: Path) -> None:
    also_served = {**PROXIED, "model": "qwen3-8b"}
    with pytest.warns(LeftOutWarning):
        changed, _ = without_proxied(document(trace, [also_served, OTHER]), Places())
    assert changed["workload"] == {"trace": str(trace)} and changed["fleet"] == [OTHER]


def test_a_model_that_no_pool_names_is_still_an_error(trace: Path) -> None:
    with pytest.warns(LeftOutWarning), pytest.raises(HeadwayError, match="qwen3-8b"):
        ran(document(trace, [SIMULATED, PROXIED]))


def test_errors_name_the_lines_and_fallbacks_lose_its_name(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    pools = [PROXIED, {**SIMULATED, "fallback": ["tiny", "other"]}, OTHER]
    file.write_text(yaml.safe_dump(document(trace, pools), sort_keys=False))
    content, places = read(file)
    with pytest.warns(LeftOutWarning, match=rf"^{file}:3: tiny has no gpu"):
        changed, moved = without_proxied(content, places)
    assert changed["fleet"][0]["fallback"] == ["other"]
    for new, old in ((0, 1), (1, 2)):
        assert moved.where(("fleet", new, "gpu")) == places.where(("fleet", old, "gpu")).replace(f"[{old}]", f"[{new}]")


def test_a_plan_for_one_model_takes_its_requests(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"plan capacity --trace {trace} --model llama-3.1-8b --gpus h100 --ttft-p99 1 --no-cache --json"
    assert main(words.split()) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["measured"]["num_requests"] == NUM // 3
    assert any("left out: tiny-llama, qwen3-8b" in note for note in answer["notes"])


def test_a_day_has_the_records_of_the_simulated_models(trace: Path) -> None:
    content = document(trace, [SIMULATED, OTHER])
    content["workload"]["trace"] = {
        "path": str(trace),
        "models": {**dict.fromkeys(MODELS, "llama-3.1-8b"), "qwen3-8b": "qwen3-8b"},
    }
    records = ran(content)
    day = Day("day", trace, records, "", 0.0)
    kept = day.without_models(["qwen3-8b"]).records
    is_kept = records.workload["model"] != records.models.index("qwen3-8b")
    assert np.array_equal(kept.workload["arrival_s"], records.workload["arrival_s"][is_kept])
    order = np.argsort(kept.requests["request"])
    assert np.array_equal(kept.requests["request"][order], np.arange(is_kept.sum()))
    ends_s = np.empty(NUM)
    ends_s[records.requests["request"]] = records.requests["end_s"]
    assert np.array_equal(kept.requests["end_s"][order], ends_s[is_kept])
    assert set(kept.segments["request"]) == set(range(int(is_kept.sum())))
    with pytest.raises(HeadwayError, match="cannot be simulated"):
        day.without_models(["qwen3-8b", "llama-3.1-8b"])
