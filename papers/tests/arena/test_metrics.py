"""The window of a measurement."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headway.config.strict_yaml import Places
from headway.metrics.latency import DefaultSlo
from headway.scenario import Simulator, assemble
from headway_papers.arena.metrics import begin_s, metrics


def test_calls_begin_with_their_program_and_single_requests_alone() -> None:
    columns = {"arrival_s": np.array([1.0, 2.0, 3.0, 9.0, 7.0]), "session_id": np.array([-1, 4, -1, 4, 5])}
    assert begin_s(columns).tolist() == [1.0, 2.0, 3.0, 2.0, 7.0]
    assert begin_s({"arrival_s": columns["arrival_s"]}).tolist() == columns["arrival_s"].tolist()


def test_calls_after_the_last_program_began_do_not_count() -> None:
    document = {
        "workload": {
            "arrivals": 1,
            "num_requests": 40,
            "prompt_tokens": 100,
            "output_tokens": 5,
            "sessions": {"turns": 4, "think_s": 20},
        },
        "fleet": [{"model": "llama-3.1-8b", "gpu": "h100-80gb-sxm", "engine": "vllm-0.15"}],
    }
    records = Simulator().records(assemble(document, Places(), Path()))
    arrival_s = records.workload["arrival_s"]
    last_s = begin_s(records.workload).max()
    assert last_s < arrival_s.max() / 2
    found = metrics(records, 0.0, DefaultSlo())
    assert found["num_requests"] == (arrival_s <= last_s).sum()
    assert found["goodput_rps"] == pytest.approx(found["num_requests"] / last_s)
