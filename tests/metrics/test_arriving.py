"""Tokens and cost until the last arrival."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headway import scenario
from headway.config.strict_yaml import Places
from headway.core.record import Records
from headway.metrics.arriving import while_arriving
from headway.metrics.latency import sample
from headway.metrics.usage import usage


def _run(num: int) -> Records:
    document = {
        "workload": {
            "prompt_tokens": 100,
            "output_tokens": 400,
            "num_requests": num,
            "arrivals": {"kind": "deterministic", "rate": 2.0},
        },
        "fleet": [{"model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm-0.15"}],
    }
    return scenario.run(scenario.assemble(document, Places(), Path())).records


def test_the_drain_is_neither_paid_for_nor_counted() -> None:
    records = _run(20)
    chosen = sample(records, 0.0, None)
    everyone = np.ones(len(chosen), dtype=bool)
    found = while_arriving(chosen, everyone)
    assert found.seconds == pytest.approx(9.5) and records.end_s > 11
    hourly = records.replicas[0].usd_per_hour
    assert found.usd == pytest.approx(9.5 / 3600 * hourly) and found.usd_per_hour == pytest.approx(hourly)
    assert usage(records, 0.0).usd.sum() == pytest.approx(records.end_s / 3600 * hourly), "the whole run"
    assert 0 < found.tokens < 20 * 500
    longer = while_arriving(sample(_run(200), 0.0, None), np.ones(200, dtype=bool))
    assert longer.tokens / longer.seconds == pytest.approx(2.0 * 500, rel=0.03), "what arrives is what is served"
    assert (longer.tokens_per_usd or 0) == pytest.approx(longer.tokens / longer.usd)


def test_tokens_in_time_are_those_of_the_requests_in_time() -> None:
    chosen = sample(_run(20), 0.0, None)
    nobody = np.zeros(len(chosen), dtype=bool)
    first = nobody.copy()
    first[np.argmin(chosen.id)] = True
    assert while_arriving(chosen, nobody).tokens_in_time == 0
    assert while_arriving(chosen, first).tokens_in_time == pytest.approx(500)
