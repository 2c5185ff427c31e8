"""The reference engine against cases worked out by hand, and the fast engine against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway import catalog
from headway.control.policies import Policies
from headway.core.fleet import Engine, Fleet, Pool
from headway.core.record import Records
from headway.metrics.tokens import token_times
from headway.policies import resolve
from headway.sim.cluster import simulate
from headway.workload.sources import TraceSource
from headway.workload.table import Workload
from oracles.reference_engine import Job, ReferenceEngine

BATCHINGS = ("chunked", "prefill-first", "whole-prompt", "request-level")
Requests = list[tuple[float, int, int]]


def one_second(num_decode: int, context_tokens: int, chunks: Any) -> float:
    return 1.0


def served(requests: Requests, **engine: Any) -> list[tuple[float | None, list[float], int]]:
    jobs = ReferenceEngine(one_second, **engine).run(requests)
    return [(job.admitted_s, job.token_s, job.preemptions) for job in jobs]


def test_a_prompt_is_cut_into_chunks_beside_decodes() -> None:
    engine = {"max_num_batched_tokens": 10}
    assert served([(0.0, 4, 4), (1.0, 20, 2)], **engine) == [
        (0.0, [1.0, 2.0, 3.0, 4.0], 0),
        (1.0, [4.0, 5.0], 0),  # chunks of 9, 9 and 2
    ]


def test_prefill_first_lets_decodes_wait() -> None:
    engine = {"batching": "prefill-first", "max_num_batched_tokens": 10}
    assert served([(0.0, 4, 3), (1.0, 20, 2), (1.0, 3, 2)], **engine) == [
        (0.0, [1.0, 4.0, 5.0], 0),
        (1.0, [2.0, 4.0], 0),  # alone, being over the budget
        (2.0, [3.0, 4.0], 0),
    ]


def test_whole_prompts_join_the_decoding_batch() -> None:
    engine = {"batching": "whole-prompt", "max_num_batched_tokens": 10}
    assert served([(0.0, 4, 4), (1.0, 20, 2), (1.0, 3, 2)], **engine) == [
        (0.0, [1.0, 2.0, 3.0, 4.0], 0),
        (1.0, [2.0, 3.0], 0),
        (2.0, [3.0, 4.0], 0),
    ]


def test_a_request_level_batch_runs_to_its_end() -> None:
    engine = {"batching": "request-level", "max_num_seqs": 2}
    assert served([(0.0, 4, 3), (0.0, 4, 1), (0.5, 4, 1)], **engine) == [
        (0.0, [1.0, 2.0, 3.0], 0),
        (0.0, [1.0], 0),
        (3.0, [4.0], 0),
    ]


def test_the_last_admitted_gives_way_and_prefills_anew() -> None:
    # Blocks of 4, 3 of them. After [1.0] both hold one full block; at 1.0 the first takes the third block.
    engine = {"block_size_tokens": 4, "num_blocks": 3}
    assert served([(0.0, 4, 3), (0.0, 4, 3)], **engine) == [
        (0.0, [1.0, 2.0, 3.0], 0),
        (0.0, [1.0, 4.0, 5.0], 1),  # the one free block at 2.0 is too few for its 5 tokens
    ]


def test_the_watermark_is_left_free() -> None:
    engine = {"block_size_tokens": 4, "num_blocks": 4, "watermark": 0.5}
    assert [admitted for admitted, _, _ in served([(0.0, 4, 2), (0.0, 8, 1)], **engine)] == [0.0, 2.0]


def test_an_idle_replica_jumps_to_the_next_arrival() -> None:
    assert served([(5.0, 1, 1), (100.0, 1, 2)]) == [(5.0, [6.0], 0), (100.0, [101.0, 102.0], 0)]


# The fast engine.


def seconds(num_decode: int, context_tokens: int, chunks: Any) -> float:
    prefill = sum(tokens * (1.0 + 1e-3 * before) for tokens, before in chunks)
    return 0.0071 + 1.3e-5 * num_decode + 1.7e-7 * context_tokens + 1.1e-5 * prefill


def line(num_decode: int, context: int, chunks: Any, *window: int) -> tuple[float, float, int | None]:
    return seconds(num_decode, context, chunks), 1.7e-7 * num_decode, None


request = st.tuples(
    st.one_of(st.just(0.0), st.floats(0.0, 0.3), st.floats(0.0, 5.0)),
    st.integers(1, 120),
    st.one_of(st.integers(1, 5), st.integers(1, 150)),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Requests, dict[str, Any]]:
    """Requests that fit the replica, each alone, and the replica."""
    requests = sorted(draw(st.lists(request, min_size=1, max_size=25)), key=lambda r: r[0])
    block = draw(st.sampled_from((1, 4, 16)))
    watermark = draw(st.sampled_from((0.0, 0.02)))
    largest = max(-(-(prompt + output) // block) for _, prompt, output in requests)
    spare = draw(st.one_of(st.integers(2, 8), st.integers(2, 300)))
    return requests, {
        "max_num_seqs": draw(st.integers(1, 12)),
        "max_num_batched_tokens": draw(st.sampled_from((6, 16, 50, 128, 8192))),
        "block_size_tokens": block,
        "num_blocks": int(largest * 1.05) + spare,
        "watermark": watermark,
    }


def simulated(requests: Requests, batching: Any, step: Any, replica: dict[str, Any]) -> Records:
    names = ("arrival_s", "prompt_tokens", "output_tokens")
    columns = dict(zip(names, map(np.array, zip(*requests, strict=True)), strict=True))
    settings_of = {key: value for key, value in replica.items() if key != "num_blocks"}
    engine = Engine("simulated", batching=batching, **settings_of)
    kv_capacity_tokens = replica["num_blocks"] * replica["block_size_tokens"]
    model, gpu = catalog.model("llama-3.1-8b"), catalog.gpu("a100-80gb")
    pool = Pool("main", model, gpu, engine, kv_capacity_tokens=kv_capacity_tokens)
    policies = Policies(resolve.router("round-robin"), resolve.ordering("fcfs"))
    source = TraceSource(Workload(columns))
    return simulate(Fleet((pool,)), source, policies, seed=0, step=step, line=lambda pool: line)


def assert_agrees(jobs: list[Job], records: Records) -> None:
    ended = records.requests
    times = token_times(records, range(len(jobs)))
    row = {int(id): i for i, id in enumerate(ended["request"])}
    for job in jobs:
        assert ended["preemptions"][row[job.id]] == job.preemptions
        assert ended["admitted_s"][row[job.id]] == pytest.approx(job.admitted_s, abs=1e-9)
        assert len(times[job.id]) == len(job.token_s) == job.output_tokens
        assert np.allclose(times[job.id], job.token_s, rtol=0, atol=1e-9)


@pytest.mark.parametrize("step", ["stretch", "exact"])
@pytest.mark.parametrize("batching", BATCHINGS)
@settings(max_examples=30, deadline=None)
@given(case=cases())
def test_the_fast_engine_agrees(batching: str, step: str, case: tuple[Requests, dict[str, Any]]) -> None:
    requests, replica = case
    jobs = ReferenceEngine(seconds, batching, **replica).run(requests)
    assert_agrees(jobs, simulated(requests, batching, step, replica))
