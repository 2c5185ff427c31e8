"""vLLM's own scheduler and the simulator decide the same, for every ordering: `make vllm-cpu`, a minute."""

from __future__ import annotations

import os
from pathlib import Path
from subprocess import run

import pytest

from iterations import ENV, ORDERINGS, Engine, arrivals, in_vllm, simulated

VLLM = os.environ.get("HEADWAY_VLLM", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not VLLM, reason="HEADWAY_VLLM names no vllm; `make vllm-cpu`")]
REQUESTS = arrivals(200, 6.0, 300, 90)
ENGINES = {"seats": Engine(8, 4000), "memory": Engine(8, 33)}


def test_same_iterations_by_every_ordering(tmp_path: Path) -> None:
    """200 requests, where seats are short and where memory is; vLLM without Headway runs beside `fcfs`."""
    model = tmp_path / "model"
    python = str(Path(VLLM).with_name("python"))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | ENV
    run([python, str(Path(__file__).with_name("tiny_model.py")), str(model)], check=True, env=env)
    pairs = [(limit, name) for limit in ENGINES for name in (*ORDERINGS, "vLLM's own")]
    orderings, engines = [ORDERINGS.get(name) for _, name in pairs], [ENGINES[limit] for limit, _ in pairs]
    got = dict(zip(pairs, in_vllm(Path(VLLM), model, REQUESTS, orderings, engines), strict=True))
    expected = {pair: simulated(REQUESTS, ORDERINGS.get(pair[1], "fcfs"), ENGINES[pair[0]]) for pair in pairs}
    differ = [pair for pair in pairs if got[pair] != expected[pair]]
    print({pair: len(each) for pair, each in got.items()})  # noqa: T201  # shown by pytest -s
    assert not differ
    assert len({str(each) for each in expected.values()}) > len(pairs) // 2, "orderings decide differently"
