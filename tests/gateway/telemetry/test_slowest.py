"""The slowest requests of the last minutes, against a sort of all of them."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from headway.gateway.telemetry.rolling_stats import NUM_SLOTS, SLOT_S
from headway.gateway.telemetry.slowest import NUM_SLOWEST, SlowestRequests


def live(id: int, arrival_s: float, first_s: float = float("nan"), tokens: int = 3) -> Any:
    return SimpleNamespace(
        id=id, model="m", tier=id % 2, prompt_tokens=7, generated_tokens=tokens, arrival_s=arrival_s,
        first_token_s=first_s, num_sequences=1,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_they_are_the_slowest_of_the_window(seed: int) -> None:
    rng, slowest, ended, now = Random(seed), SlowestRequests(), [], 0.0
    for i in range(3000):
        now += rng.expovariate(5.0)
        taken_s = rng.choice([0.5, 0.5, rng.uniform(0, 9)])  # many take as long
        slowest.add(live(i, now - taken_s), f"id-{i}", "pool/0", now)
        ended.append((now, taken_s))
        if i % 300 == 0:
            begin = (int(now // SLOT_S) - NUM_SLOTS + 1) * SLOT_S
            true = sorted((took_s for at_s, took_s in ended if at_s >= begin), reverse=True)[:NUM_SLOWEST]
            assert [each.e2e_s for each in slowest.last(now)] == pytest.approx(true)
    assert sum(len(slot) for _, slot in slowest._slots) <= (NUM_SLOTS + 1) * NUM_SLOWEST
    assert slowest.last(now + NUM_SLOTS * SLOT_S) == []


def test_what_is_unknown_of_an_unstreamed_answer_is_null() -> None:
    slowest = SlowestRequests()
    slowest.add(live(1, 10.0, 11.0), "streamed", "pool/1", 12.0)
    slowest.add(live(2, 11.5), "whole", "", 12.0)
    streamed, whole = slowest.last(12.0)
    assert (streamed.request, streamed.e2e_s, streamed.ttft_s, streamed.tpot_s) == ("streamed", 2.0, 1.0, 0.5)
    assert (whole.request, whole.replica, whole.ttft_s, whole.tpot_s) == ("whole", "", None, None)
