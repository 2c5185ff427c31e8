"""Fleets of which a better setting is known: advice finds it on days that the choice never saw, and none where today's
is the best."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.config.test_yaml_edit import patched

import headway as hw
from headway.config import strict_yaml
from headway.planning.advise.plan import Advice
from headway.records import save

pytestmark = pytest.mark.ci
ENGINE = {"model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm-0.15"}
LINKED = {**ENGINE, "network_bytes_per_s": 50e9}
LONG_PROMPTS = {"arrivals": 7, "num_requests": 500, "prompt_tokens": 6000, "output_tokens": 80}
LONG_ANSWERS = {"arrivals": 40, "num_requests": 500, "prompt_tokens": 200, "output_tokens": 300}
BUSY = {"arrivals": 40, "num_requests": 3000, "prompt_tokens": 600, "output_tokens": 80}
Document = dict[str, Any]


def replicas(num: int, **keys: Any) -> Document:
    return {"fleet": [{"name": "chat", **LINKED, "replicas": num, **keys}]}


def pair(prefill: int, decode: int) -> Document:
    sides = {"prefill": {**LINKED, "replicas": prefill}, "decode": {**LINKED, "replicas": decode}}
    return {"combos": [{"name": "chat", **sides, "handover": {"first_token": "decode"}}]}


def scaled(threshold: float) -> Document:
    scaling = {"name": "keda", "threshold": threshold, "polling_s": 20.0}
    return {
        "fleet": [{"name": "chat", **ENGINE, "start_s": 10, "max_replicas": 4}],
        "policies": {"routing": "least-loaded", "scaling": scaling},
    }


def advised(folder: Path, fleet: Document, workload: Mapping[str, Any], tpot_s: float, days: int, kind: str) -> Advice:
    document: Document = {"policies": {"routing": "least-loaded"}, **fleet, "slo": {"ttft_s": 2, "tpot_s": tpot_s}}
    file, folders = folder / "fleet.yaml", [folder / f"day{i}" for i in range(days)]
    file.write_text(strict_yaml.dump(document))
    for seed, day in enumerate(folders):
        ran = hw.simulate({**document, "workload": dict(workload), "seed": seed})
        save(ran.records, day, {"fleet": file.read_text()})
    answer: Advice = hw.advise(file, [str(day) for day in folders], kinds=[kind]).answer
    assert not answer.is_withheld
    return answer


def test_a_scaler_that_adds_replicas_too_late_is_given_a_lower_threshold(tmp_path: Path) -> None:
    answer = advised(tmp_path, scaled(300.0), BUSY, 0.012, 6, "scaling.settings")
    best = answer.proposals[0]
    assert best.attainment.low > 0.1
    (change,) = best.changes
    assert change.key == ("policies", "scaling")
    assert change.value["name"] == "keda" and change.value["threshold"] < 100
    assert change.value["polling_s"] == 20.0  # what the ladder does not set stays


def test_the_best_threshold_stays(tmp_path: Path) -> None:
    answer = advised(tmp_path, scaled(38.0), BUSY, 0.012, 6, "scaling.settings")
    assert answer.proposals == () and answer.tried.num_changes == 5


@pytest.mark.parametrize(
    ("fleet", "workload", "tpot_s", "found"),
    [
        (replicas(4), LONG_PROMPTS, 0.0085, "prefill and decode apart in chat: 2 for prefill, 2 for decode"),
        (pair(3, 1), LONG_ANSWERS, 0.009, "prefill and decode together in chat"),
    ],
    ids=["apart", "together"],
)
def test_prefill_and_decode_are_put_apart_or_together(
    fleet: Document, workload: Mapping[str, Any], tpot_s: float, found: str, tmp_path: Path
) -> None:
    best = advised(tmp_path, fleet, workload, tpot_s, 2, "disaggregation").proposals[0]
    assert best.name == found and best.attainment.low > 0.3 and best.usd_per_month.mean == 0
    file = tmp_path / "changed.yaml"
    file.write_text(patched((tmp_path / "fleet.yaml").read_text(), best.diff))
    hw.load({**strict_yaml.read(file)[0], "workload": dict(workload)})


@pytest.mark.parametrize(
    ("fleet", "workload", "tpot_s"),
    [(pair(2, 2), LONG_PROMPTS, 0.0085), (replicas(4), LONG_ANSWERS, 0.009)],
    ids=["apart", "together"],
)
def test_what_is_better_stays_as_it_is(
    fleet: Document, workload: Mapping[str, Any], tpot_s: float, tmp_path: Path
) -> None:
    answer = advised(tmp_path, fleet, workload, tpot_s, 2, "disaggregation")
    assert answer.proposals == () and answer.tried.num_changes > 0
