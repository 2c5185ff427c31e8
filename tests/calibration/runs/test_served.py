"""Headway's own records, read as measured runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headway import scenario
from headway.calibration.runs import served
from headway.core.record import NUM_SEQUENCES
from headway.records import parquet

SCENARIO = """
workload: {num_requests: 40, arrivals: {kind: poisson, rate: 2}, prompt_tokens: 100, output_tokens: 20}
fleet: [{model: llama-3.1-8b, gpu: h100-80gb-sxm}]
"""


def test_answers_of_several_sequences_are_left_out(tmp_path: Path) -> None:
    """Their tokens are those of all sequences: the time between tokens of one is not known from them."""
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    records = scenario.run(scenario.load(tmp_path / "scenario.yaml")).records
    parquet.save(records, tmp_path / "single", {})
    (single,), _, _ = served.read(tmp_path / "single")
    several = np.arange(len(records.requests["request"])) % 2 == 0
    records.requests["generated_tokens"] = np.where(several, 4, 1) * records.requests["generated_tokens"]
    records.requests[NUM_SEQUENCES] = np.where(several, 4, 0)
    parquet.save(records, tmp_path / "mixed", {})
    (mixed,), _, _ = served.read(tmp_path / "mixed")
    assert mixed.output_tokens == single.output_tokens == 20
    assert mixed.notes[-1].startswith("20 requests moved, failed, were not streamed or had several sequences")
