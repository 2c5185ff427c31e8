"""Times of whole programs."""

from __future__ import annotations

import pytest

from headway.metrics.latency import DefaultSlo
from headway.metrics.summary import flatten, summarize
from simulation import play, pool, request, seconds


def test_a_program_takes_from_its_first_arrival_to_its_last_token() -> None:
    requests = [
        request(0, 0.0, 1, 3, session_id=0),
        request(1, 0.0, 1, 2, session_id=1),
        request(2, 10.0, 1, 3, session_id=0),
        request(3, 20.0, 1, 2),
        request(4, 30.0, 1, 500, session_id=2, timeout_s=1.0),
    ]
    records = play(requests, pool(), line=seconds(1.0))
    found = summarize(records, slo=DefaultSlo(program_s=5.0)).programs
    assert found is not None and found.program_s is not None
    assert (found.num_programs, found.program_s.count) == (3, 2)
    assert found.program_s.max == pytest.approx(13.0)
    assert found.program_slo_attainment == pytest.approx(1 / 3)
    later = summarize(records, warmup_s=5.0, slo=DefaultSlo(program_s=5.0)).programs
    assert later is not None and later.num_programs == 1
    assert "program_s.mean" in flatten(summarize(records, slo=DefaultSlo(program_s=5.0)))


def test_without_an_slo_for_programs_there_are_no_such_metrics() -> None:
    records = play([request(0, 0.0, 1, 3, session_id=0)], pool(), line=seconds(1.0))
    assert not any(key.startswith(("program", "num_programs")) for key in flatten(summarize(records)))
