"""Melange against its own program with a variable for each slice, and against what its answers must satisfy."""

from __future__ import annotations

from itertools import product
from math import inf

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headway import catalog
from headway.core.errors import HeadwayError
from headway.planning.combos.estimate import FluidEstimate
from headway.planning.combos.problem import ComboPlan, ComboService, GpuCombo, Group, Offer, ServiceSlo, WorkloadPattern
from headway_papers.reproduce.cauchy.melange import Instance, MelangeProblem, SizeBucket, Sized, buckets, plan, sized

GPUS = ("a10", "a100", "h100")


def instance(gpu: str, usd: float, *most_rps: float) -> Instance:
    return Instance(GpuCombo("llama", usd, aggregated=Group(gpu)), most_rps)


def brute_force(problem: MelangeProblem) -> float:
    """Every slice on every type of instance; the instances that this takes; the least price. One service."""
    (service,) = problem.services
    slices = [b for b in range(len(service.buckets)) for _ in range(problem.slices)]
    best = inf
    for where in product(range(len(service.instances)), repeat=len(slices)):
        loads = np.zeros(len(service.instances))
        for b, k in zip(slices, where, strict=True):
            most = service.instances[k].most_rps[b]
            loads[k] += service.buckets[b].rps / problem.slices / most if most else inf
        if not np.isfinite(loads).all():
            continue
        num = np.ceil(loads - 1e-7)
        if all(num[k] <= problem.limits.get(GPUS[k], inf) for k in range(len(num))):
            best = min(best, sum(n * each.combo.usd_per_hour for n, each in zip(num, service.instances, strict=True)))
    return best


@st.composite
def problems(draw: st.DrawFn) -> MelangeProblem:
    num_buckets, num_gpus = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    rates = [draw(st.integers(1, 24)) / 4 for _ in range(num_buckets)]
    most = st.lists(st.integers(0, 9), min_size=num_buckets, max_size=num_buckets)
    instances = tuple(instance(GPUS[k], draw(st.integers(1, 9)), *draw(most)) for k in range(num_gpus))
    limits = {GPUS[k]: draw(st.integers(0, 4)) for k in range(num_gpus) if draw(st.booleans())}
    sizes = tuple(SizeBucket(100.0 * (b + 1), 50.0, rate) for b, rate in enumerate(rates))
    return MelangeProblem((Sized("chat", sizes, instances),), limits, draw(st.integers(1, 3)))


@pytest.mark.ci
@settings(deadline=None, max_examples=120)
@given(problems())
def test_the_mix_costs_what_brute_force_finds(problem: MelangeProblem) -> None:
    found, wanted = plan(problem), brute_force(problem)
    assert all(found.gpus.get(gpu, 0) <= limit for gpu, limit in problem.limits.items())
    assert found.usd_per_hour == sum(each.count * each.usd_per_hour for each in found.combos)
    got = found.services[0]
    if wanted == inf:
        assert found.status == "short" and got.shortfall_rps > 0 and "left out" in found.why
        assert got.goodput_rps >= (got.demand_rps - got.shortfall_rps) * (1 - 1e-6)
    else:
        assert found.status == "optimal" and found.objective == pytest.approx(wanted)
        assert got.goodput_rps >= got.demand_rps * (1 - 1e-6) and got.shortfall_rps == 0


def test_a_mix_is_cheaper_than_any_one_type() -> None:
    """Small requests are cheap on small GPUs, long ones on large GPUs: what Melange is about."""
    sizes = (SizeBucket(50, 50, 8.0), SizeBucket(4000, 500, 2.0))
    small, large = instance("a10", 1.0, 4.0, 0.25), instance("h100", 4.0, 10.0, 2.0)
    both = plan(MelangeProblem((Sized("chat", sizes, (small, large)),)))
    alone = [plan(MelangeProblem((Sized("chat", sizes, (each,)),))).usd_per_hour for each in (small, large)]
    assert both.usd_per_hour == 6.0 and alone == [10.0, 8.0]
    assert {each.combo.label: each.count for each in both.combos} == {"<1 x a10>": 2, "<1 x h100>": 1}
    assert both.tokens_per_usd == pytest.approx((8 * 100 + 2 * 4500) * 3600 / 6)
    assert both.planner == "melange" and msgspec.json.decode(msgspec.json.encode(both), type=ComboPlan) == both


def test_the_least_is_left_out_where_gpus_are_short() -> None:
    sized_ = Sized("chat", (SizeBucket(50, 50, 4.0), SizeBucket(4000, 500, 1.0)), (instance("a10", 1.0, 4.0, 1.0),))
    found = plan(MelangeProblem((sized_,), {"a10": 1}))
    assert found.status == "short" and found.services[0].shortfall_rps == pytest.approx(1.0)
    assert found.why == "chat: 1 of 5 req/s are left out; 0 are of sizes that no instance serves within the SLO"
    none = plan(MelangeProblem((replace(sized_, instances=(instance("a10", 1.0, 4.0, 0.0),)),)))
    assert "1 are of sizes that no instance serves" in none.why and none.gpus == {"a10": 1}
    nothing = plan(MelangeProblem((replace(sized_, instances=()),)))
    assert nothing.combos == () and nothing.services[0].shortfall_rps == 5.0


def test_services_share_the_gpus() -> None:
    one = Sized("chat", (SizeBucket(50, 50, 4.0),), (instance("a10", 1.0, 4.0), instance("h100", 4.0, 4.0)))
    two = replace(one, service="write")
    assert plan(MelangeProblem((one, two))).gpus == {"a10": 2}
    assert plan(MelangeProblem((one, two), {"a10": 1})).gpus == {"a10": 1, "h100": 1}


@given(st.lists(st.tuples(st.integers(1, 20000), st.integers(1, 9000)), min_size=1, max_size=60), st.floats(0.1, 99))
def test_buckets_hold_every_request(requests: list[tuple[int, int]], rps: float) -> None:
    prompts, outputs = zip(*requests, strict=True)
    found = buckets(prompts, outputs, rps)
    assert sum(each.rps for each in found) == pytest.approx(rps)
    tokens_s = sum(each.rps * (each.prompt_tokens + each.output_tokens) for each in found)
    assert tokens_s == pytest.approx(rps * (np.mean(prompts) + np.mean(outputs)))
    assert len({(each.prompt_tokens, each.output_tokens) for each in found}) == len(found)


def test_profiled_by_the_step_time_model() -> None:
    model, engine = catalog.model("llama-3.1-8b"), catalog.engine("vllm-v0")
    offers = [Offer(catalog.gpu(name), 8, gpus_per_server=2) for name in ("h800", "a800-pcie", "h20")]
    estimate = FluidEstimate({model.name: model}, {each.gpu.name: each.gpu for each in offers}, engine)
    service = ComboService("chat", model, engine, WorkloadPattern("sharegpt", 290, 207), ServiceSlo(5.0, 0.03))
    found = buckets([100, 300, 3000, 300], [50, 200, 200, 900], 40.0)
    assert len(found) == 4
    made = sized(service, found, offers, estimate)
    assert {each.combo.label for each in made.instances} >= {"<1 x h20-96gb>", "<2 x h20-96gb (tp 2)>"}
    for each in made.instances:
        small, *larger = each.most_rps
        assert all(small > most > 0 for most in larger)
    best = plan(MelangeProblem((made,), {each.gpu.name: 8 for each in offers}))
    assert best.status == "optimal" and best.gap is not None and best.gap < 1e-6


def test_values_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="one value for each bucket"):
        Sized("chat", (SizeBucket(1, 1, 1.0),), (instance("a10", 1.0, 1.0, 2.0),))
    pair = Instance(GpuCombo("llama", 1.0, prefill=Group("a10"), decode=Group("a10")), (1.0,))
    with pytest.raises(ValueError, match="aggregated"):
        Sized("chat", (SizeBucket(1, 1, 1.0),), (pair,))
    with pytest.raises(ValueError, match="slices"):
        MelangeProblem((), slices=0)
    with pytest.raises(HeadwayError, match="1 prompts, 2 outputs"):
        buckets([1], [1, 2], 1.0)
