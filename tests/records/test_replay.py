"""A saved run is a workload again: the same requests, with their prefixes, give the same simulation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headway import catalog
from headway import records as files
from headway.control.policies import Policies
from headway.core.fleet import Engine, Fleet, Pool
from headway.core.record import Records
from headway.policies import resolve
from headway.sim.cluster import simulate
from headway.workload.files import from_parquet
from headway.workload.generate import build
from headway.workload.sources import RequestSource, TraceSource
from headway.workload.spec import WorkloadSpec
from headway.workload.table import Prefix, Workload

NUM_REQUESTS = 300


def grouped() -> RequestSource:
    """Prompts that begin with one of eight shared texts, some with a second segment, some bare."""
    rng = np.random.default_rng(3)
    counts = rng.integers(0, 3, NUM_REQUESTS)
    group = np.repeat(rng.integers(0, 8, NUM_REQUESTS), counts)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    second = np.ones(int(offsets[-1]), bool)
    second[offsets[:-1][counts > 0]] = False
    prefix = Prefix(offsets, np.where(second, 100 + group, group), np.where(second, 96, 300).astype("i4"))
    columns = {
        "arrival_s": np.cumsum(rng.exponential(0.05, NUM_REQUESTS)),
        "prompt_tokens": rng.integers(400, 900, NUM_REQUESTS),
        "output_tokens": rng.integers(1, 200, NUM_REQUESTS),
    }
    return TraceSource(Workload(columns, prefix=prefix))


def chats() -> RequestSource:
    """Sessions whose turns repeat what was said before, and wait for the answer."""
    return build(WorkloadSpec(builtin="chat-sessions", num_requests=NUM_REQUESTS, arrivals=4.0), 5, Path())


def run(source: RequestSource) -> Records:
    engine = Engine("simulated", max_num_seqs=32, max_num_batched_tokens=1024, prefix_caching=True)
    pool = Pool(
        "main", catalog.model("llama-3.1-8b"), catalog.gpu("a100-80gb"), engine, replicas=2, kv_capacity_tokens=16_000
    )
    policies = Policies(resolve.router("prefix-affinity"), resolve.ordering("fcfs"))
    return simulate(Fleet((pool,)), source, policies, seed=7)


@pytest.mark.parametrize("source", [grouped, chats], ids=["grouped", "chats"])
def test_workloads_with_prefixes_are_replayed(source: Callable[[], RequestSource], tmp_path: Path) -> None:
    first = run(source())
    assert first.prefixes is not None
    assert np.count_nonzero(first.requests["cached_prompt_tokens"]) > 0.3 * NUM_REQUESTS
    files.save(first, tmp_path, {})
    loaded, _ = files.load(tmp_path)
    workload = from_parquet(tmp_path / "requests.parquet").validate()
    assert loaded.prefixes is not None and workload.prefix is not None
    for name in ("offsets", "ids", "tokens"):
        given = getattr(first.prefixes, name)
        for found in (getattr(loaded.prefixes, name), getattr(workload.prefix, name)):
            assert found.dtype == given.dtype
            np.testing.assert_array_equal(found, given)
    again = run(TraceSource(workload))
    for table in ("requests", "segments", "stretches"):
        for name, column in getattr(first, table).items():
            np.testing.assert_array_equal(getattr(again, table)[name], column, err_msg=f"{table}.{name}")


def test_without_prefixes_there_are_none(tmp_path: Path) -> None:
    columns = {"arrival_s": [0.0, 1.0], "prompt_tokens": [20, 30], "output_tokens": [5, 5]}
    workload = Workload({name: np.array(column) for name, column in columns.items()})
    first = run(TraceSource(workload))
    files.save(first, tmp_path, {})
    assert first.prefixes is None
    assert files.load(tmp_path)[0].prefixes is None
    assert from_parquet(tmp_path / "requests.parquet").prefix is None
