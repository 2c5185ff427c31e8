"""Cauchy's Eq. 17 and 18 against values computed by hand and against the paper's figures."""

from __future__ import annotations

import pytest

from headway import catalog
from headway.planning.combos.cost_efficiency import stated
from headway_papers.reproduce.cauchy.network import kv_network_bytes_per_s, network_claims

LLAMA = catalog.model("llama-3.1-8b")


def test_the_network_of_equation_18_by_hand_and_as_the_paper_says() -> None:
    # 8B: 131,072 * 312e12 / (524,288 * 2048 + 15,569,256,448) = 4.0894e19 / 16,642,998,272 = 2.457 GB/s
    # 70B: 327,680 * 312e12 / (2,621,440 * 2048 + 155,692,564,480) = 1.0224e20 / 161,061,273,600 = 0.635 GB/s
    small, large = network_claims()
    assert small.formula_bytes_per_s == pytest.approx(2.457157e9, rel=1e-6)
    assert large.formula_bytes_per_s == pytest.approx(0.634766e9, rel=1e-6)
    assert (small.claimed_bytes_per_s, large.claimed_bytes_per_s) == (10e9, 5e9)
    assert (round(small.num_gpus_to_match), round(large.num_gpus_to_match)) == (4, 8)
    assert kv_network_bytes_per_s(stated(LLAMA), 2048, 312e12, num_gpus=4) == pytest.approx(9.8286e9, rel=1e-4)
    assert kv_network_bytes_per_s(stated(LLAMA), 2048, 312e12, batch=4) == small.formula_bytes_per_s / 4
    # Eq. 17: the cache of a prompt within the time that its prefill takes
    costs = stated(LLAMA)
    prefill_s = (costs.c1 * 2048**2 + costs.c2 * 2048) / 312e12
    assert costs.c4 * 2048 / prefill_s == pytest.approx(small.formula_bytes_per_s)
