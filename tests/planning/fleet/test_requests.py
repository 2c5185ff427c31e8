"""The requests of several models: by model, and drawn anew."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from headway import catalog
from headway.cli import main
from headway.core.errors import HeadwayError
from headway.planning.fleet.document import of_trace
from headway.planning.fleet.requests import FleetRequests, check_workload, names_of, redrawn
from headway.workload.files import from_parquet
from headway.workload.spec import SessionsSpec, TraceSpec, WorkloadSpec
from headway.workload.table import Workload

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
}  # fmt: skip
HEADS = "arrival_s,prompt_tokens,output_tokens,model"


def trace(folder: Path, num: int = 400, models: tuple[str, ...] = ("qwen3-8b", "llama-3.1-8b")) -> Path:
    """A minute of requests, twice as many in its second half."""
    path = folder / "day.csv"
    times = np.concatenate((np.linspace(0, 30, num // 3), np.linspace(30, 60, num - num // 3)))
    rows = "".join(f"{t:.3f},{100 + i},{10 + i % 7},{models[i % len(models)]}\n" for i, t in enumerate(times))
    path.write_text(f"{HEADS}\n{rows}")
    return path


def requests(path: Path, folder: Path) -> FleetRequests:
    spec = WorkloadSpec(trace=TraceSpec(str(path)))
    models = [catalog.model("qwen3-8b"), catalog.model("llama-3.1-8b")]
    return FleetRequests(spec, path.parent, 0, names_of(spec, 0, path.parent, models), folder)


def test_a_files_requests_are_divided_by_model(tmp_path: Path) -> None:
    chosen = requests(trace(tmp_path), tmp_path / "requests")
    own = from_parquet(chosen.file(model="llama-3.1-8b"))
    assert len(own) == 200 and set(own.prompt_tokens % 2) == {1}
    assert len(from_parquet(chosen.file())) == 400
    assert chosen.file() == chosen.file() and chosen.file() != chosen.file(1)


def test_arrivals_drawn_anew_keep_the_load_over_time(tmp_path: Path) -> None:
    rows = requests(trace(tmp_path), tmp_path).table()
    again = redrawn(rows, 1)
    assert (np.diff(again.arrival_s) >= 0).all() and not np.array_equal(again.arrival_s, rows.arrival_s)
    assert again.arrival_s[-1] <= rows.arrival_s[-1] + 1e-9
    assert sorted(again.prompt_tokens) == sorted(rows.prompt_tokens)
    halves = [(part.arrival_s < 30).sum() for part in (rows, again)]
    assert abs(halves[0] - halves[1]) < 30
    assert np.array_equal(redrawn(rows, 1).arrival_s, again.arrival_s), "the same seed draws the same"


def test_requests_that_share_prefixes_keep_their_order(tmp_path: Path) -> None:
    rows = requests(trace(tmp_path), tmp_path).table()
    in_sessions = rows.with_columns({"session_id": np.arange(len(rows)) // 4})
    assert np.array_equal(redrawn(in_sessions, 1).prompt_tokens, rows.prompt_tokens)
    one = Workload({"arrival_s": [3.0], "prompt_tokens": [5], "output_tokens": [5]})
    assert redrawn(one, 1).arrival_s.tolist() == [3.0]


def test_synthetic_requests_are_drawn_with_the_next_seeds(tmp_path: Path) -> None:
    spec = WorkloadSpec(arrivals=10.0, num_requests=50, prompt_tokens=100, output_tokens=10)
    chosen = FleetRequests(spec, tmp_path, 7, {"": "qwen3-8b"}, tmp_path)
    assert not np.array_equal(chosen.table(0).arrival_s, chosen.table(1).arrival_s)
    assert chosen.table().models == ("qwen3-8b",)


def test_models_that_are_not_planned_are_refused(tmp_path: Path) -> None:
    spec = WorkloadSpec(trace=TraceSpec(str(trace(tmp_path))))
    with pytest.raises(HeadwayError, match=r"unknown model 'llama-3\.1-8b'"):
        names_of(spec, 0, tmp_path, [catalog.model("qwen3-8b")])
    nameless = WorkloadSpec(arrivals=10.0, num_requests=5, prompt_tokens=100, output_tokens=10)
    with pytest.raises(HeadwayError, match="requests name no model, and there are 2"):
        names_of(nameless, 0, tmp_path, [catalog.model("qwen3-8b"), catalog.model("llama-3.1-8b")])


def test_clients_that_react_are_refused() -> None:
    with pytest.raises(HeadwayError, match="expected no sessions"):
        check_workload(
            WorkloadSpec(arrivals=1.0, num_requests=9, prompt_tokens=9, output_tokens=9, sessions=SessionsSpec())
        )


def test_a_trace_is_a_scenario_with_a_pool_for_each_model(tmp_path: Path) -> None:
    path = trace(tmp_path, models=("chat", "qwen3-8b", "meta-llama/Llama-3.1-8B-Instruct"))
    document = of_trace(path, {"chat": "llama-3.1-70b"}, "vllm-0.15", limit=90, rate_scale=2.0)
    assert {each["model"]: each.get("served_name") for each in document["fleet"]} == {
        "llama-3.1-70b": "chat",
        "qwen3-8b": None,
        "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    }
    assert document["workload"]["trace"]["limit"] == 90 and document["workload"]["trace"]["rate_scale"] == 2.0
    assert all(each["engine"] == "vllm-0.15" for each in document["fleet"])
    with pytest.raises(HeadwayError, match="--model chat=MODEL"):
        of_trace(path, {})


@pytest.mark.parametrize("served_name", ["", "house"])
def test_a_models_config_is_that_of_the_records_fleet_file(tmp_path: Path, served_name: str) -> None:
    """A model of no catalog is planned for from its records alone, by the folder or by its file of requests."""
    config = tmp_path / "tiny" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(CONFIG))
    pool = {"model": {"config": str(config)}, "served_name": served_name, "gpu": "h100", "engine": "vllm"}
    served = {"name": "chat", "fleet": [pool, {"model": "qwen3-8b", "gpu": "h100", "engine": "vllm"}]}
    lengths = {"prompt_tokens": 9, "output_tokens": 2, "num_requests": 20, "arrivals": 5.0}
    workload = {**lengths, "models": {served_name or "tiny": 1, "qwen3-8b": 1}}
    path = tmp_path / "chat.yaml"
    path.write_text(yaml.safe_dump({**served, "workload": workload}))
    assert main(["simulate", str(path), "--out", str(tmp_path / "day")]) == 0
    for trace in (tmp_path / "day", tmp_path / "day" / "requests.parquet"):
        document = of_trace(trace, {})
        assert {str(each["model"]): each.get("served_name") for each in document["fleet"]} == {
            str({"config": str(config), "assume": False}): served_name or "tiny",
            "qwen3-8b": None,
        }
    with pytest.raises(HeadwayError, match=f"unknown model '{served_name or 'tiny'}'"):
        of_trace(Path(shutil.copy(tmp_path / "day" / "requests.parquet", tmp_path)), {})
