"""Energy by hand, as a conserved quantity, and within what GPUs can take."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from msgspec import structs

from headway import catalog, records
from headway.core.fleet import Hosted, Parallel, Pool
from headway.core.record import STRETCH_COLUMNS, Columns, Records, ReplicaPower, ReplicaRecord
from headway.metrics.summary import summarize
from headway.metrics.usage import usage
from headway.perf.power import replica_power
from simulation import play, pool, request

HOUR = 3600.0
POWER = ReplicaPower(
    limit_w=1000.0, idle_w=100.0, active_w=200.0, memory_w=300.0, compute_w=800.0, weights_s=0.01,
    experts=((0.008, 0.5),), micro_batches=1, context_s=1e-6, window_s=2e-6, window_tokens=50, token_s=1e-4,
    sequence_s=5e-5, tokens_per_sequence=1,
)  # fmt: skip
ROW = {"num_decode": 4, "prefill_tokens": 0, "context_tokens": 1000, "iterations": 10, "a_s": 0.05, "advances": 1}


def stretches(*rows: dict[str, float]) -> Columns:
    return {name: np.array([row.get(name, 0) for row in rows], dtype=np.float64) for name in STRETCH_COLUMNS} | {
        "replica": np.array([row.get("replica", 0) for row in rows], dtype=np.int64)
    }


def run_of(*rows: dict[str, float], powers: tuple[ReplicaPower | None, ...] = (POWER,), end_s: float = HOUR) -> Records:
    """Records of replicas that are up from the start to the end."""
    replicas = tuple(
        ReplicaRecord(i, "p", "m", "g", "r", 1, 1.0, 1.0, 1000, 8, ((0.0, end_s),), power=each)
        for i, each in enumerate(powers)
    )
    return Records({}, (), (), {}, {}, stretches(*rows), replicas, end_s)


def joules(run: Records, warmup_s: float = 0.0) -> float:
    return float(usage(run, warmup_s).joules.sum())


def test_an_example_by_hand() -> None:
    """Ten iterations of 50 ms in which four sequences decode over 1,000 tokens, which grow by four each time."""
    context = 10 * 1000 + 4 * 45
    experts_s = 0.008 * (1 - 0.5**4)
    read_s = 10 * (0.01 + experts_s) + 1e-6 * context + 2e-6 * 10 * 4 * 50
    products_s = 10 * 4 * (1e-4 + 5e-5)
    more = 200 * 0.5 + 300 * read_s + 800 * (products_s * 0.5) ** 0.5
    assert joules(run_of(ROW)) == pytest.approx(100 * HOUR + more)
    prompt = {"prefill_tokens": 400, "iterations": 1, "a_s": 0.05}
    capped = (1000 - 100) * 0.05  # 400 tokens take 40 ms at peak FLOP/s: more than the limit allows
    assert joules(run_of(prompt)) == pytest.approx(100 * HOUR + capped)


def test_energy_adds_up_over_replicas_and_time() -> None:
    first, second = {**ROW, "b_s": 0.0}, {**ROW, "start_s": 0.5, "context_tokens": 1040, "tick": 10}
    whole = run_of({**ROW, "iterations": 20})
    assert joules(run_of(first, second)) == pytest.approx(joules(whole))
    both = run_of(first, {**ROW, "replica": 1}, powers=(POWER, structs.replace(POWER, active_w=50.0)))
    alone = (run_of(first), run_of(ROW, powers=(structs.replace(POWER, active_w=50.0),)))
    assert joules(both) == pytest.approx(sum(map(joules, alone)))
    late = run_of(first, second)
    assert joules(late, warmup_s=0.5) + joules(run_of(first, end_s=0.5)) == pytest.approx(joules(late))


def test_a_fleet_without_requests_takes_idle_power_also_while_it_starts() -> None:
    idle = run_of(powers=(POWER, POWER), end_s=2 * HOUR)
    starting = structs.replace(idle.replicas[0], up=((HOUR, 2 * HOUR),), down=((HOUR, 1.5 * HOUR),), origin="new")
    idle.replicas = (starting, idle.replicas[1])
    assert joules(idle) == pytest.approx(100 * (1 + 2) * HOUR)
    assert usage(idle, 0.0).energy_kwh([0, 1]) == pytest.approx(0.3)
    assert usage(idle, 0.0).kwh_per_day(2 * HOUR) == pytest.approx(0.3 * 12)


@pytest.mark.parametrize("seed", range(10))
def test_power_is_between_idle_and_the_limit(seed: int) -> None:
    rng = Random(seed)
    rows = [
        {
            **ROW,
            "num_decode": rng.randrange(500),
            "prefill_tokens": rng.randrange(9000),
            "start_s": 10.0 * i,
            "context_tokens": rng.randrange(10**6),
            "iterations": rng.randrange(1, 100),
            "a_s": rng.uniform(1e-3, 0.09),
            "b_s": rng.choice([0.0, 1e-6]),
        }
        for i in range(50)
    ]
    run = run_of(*rows, end_s=600.0)
    busy_s = float(usage(run, 0.0).busy_s[0])
    assert 100 * 600 < joules(run) <= 100 * 600 + 900 * busy_s * (1 + 1e-9)


def test_energy_is_unknown_without_the_power_of_a_replica() -> None:
    assert usage(run_of(ROW, powers=(None,)), 0.0).energy_kwh([0]) is None
    mixed = usage(run_of({**ROW, "replica": 1}, powers=(POWER, None)), 0.0)
    assert mixed.energy_kwh([0, 1]) == pytest.approx(0.1) and np.isnan(mixed.joules[1])


def test_more_requests_on_the_same_fleet_never_take_less_energy() -> None:
    found = [
        joules(play([request(i, 0.05 * i, 300, 40) for i in range(num)], pool(replicas=2))) for num in (1, 10, 40, 80)
    ]
    assert found == sorted(found)


def test_work_of_a_replica_by_hand() -> None:
    """Llama-3.1-8B on an H100: 16 bits for each parameter but the embeddings, 131,072 bytes of KV a token."""
    gpu, model = catalog.gpu("h100"), catalog.model("llama-3.1-8b")
    found = replica_power(Pool("p", model, gpu, catalog.engine("vllm-0.25")))
    assert found is not None and found.limit_w == 700 and not found.experts
    head = 128256 * 4096
    layers = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336)
    assert found.weights_s == pytest.approx(2 * (layers + head) / 3.35e12)
    assert found.token_s == pytest.approx(2 * layers / 989.4e12, rel=1e-3)  # norms count as parameters
    assert found.sequence_s == pytest.approx(2 * head / 989.4e12)
    assert found.context_s == pytest.approx(131072 / 3.35e12) and found.window_s == 0
    pair = replica_power(Pool("p", model, gpu, catalog.engine("vllm-0.25"), Parallel(2)))
    assert pair is not None and pair.limit_w == 1400 and pair.idle_w == 2 * found.idle_w
    assert pair.weights_s == pytest.approx(found.weights_s / 2) and pair.context_s == pytest.approx(found.context_s / 2)


def test_every_micro_batch_reads_the_weights_of_its_stages() -> None:
    model, engine = catalog.model("llama-3.1-8b"), catalog.engine("vllm-0.25")
    one, stages = (replica_power(Pool("p", model, catalog.gpu("h100"), engine, Parallel(1, pp))) for pp in (1, 2))
    assert one is not None and stages is not None
    assert stages.weights_s == pytest.approx(one.weights_s) and stages.token_s == pytest.approx(one.token_s / 2)


def test_a_hosted_pool_and_a_gpu_without_watts_have_no_power() -> None:
    assert replica_power(pool(hosted=Hosted(tokens_per_s=50.0))) is None
    unknown = structs.replace(pool(), gpu=structs.replace(catalog.gpu("h100"), watts=0.0))
    assert replica_power(unknown) is None


def test_records_keep_the_power_of_replicas(tmp_path: Path) -> None:
    run = play([request(0, 0.0, 300, 40)], pool())
    records.save(run, tmp_path, {})
    again, _ = records.load(tmp_path)
    assert again.replicas == run.replicas and again.replicas[0].power is not None
    found, before = summarize(again), summarize(run)
    assert found.energy_kwh == before.energy_kwh is not None
    assert found.joules_per_output_token == pytest.approx(before.energy_kwh * 3.6e6 / 40)
