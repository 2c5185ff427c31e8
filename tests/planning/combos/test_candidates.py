"""Which combos there are, which direction stays, and what the step-time model says that they serve."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from headway import catalog
from headway.core.errors import HeadwayError
from headway.planning.combos.candidates import Efficiencies, better_directions, enumerate_combos, group, select
from headway.planning.combos.estimate import FluidEstimate, InstanceSpeed
from headway.planning.combos.problem import (
    ComboCandidate,
    ComboService,
    Counts,
    GpuCombo,
    Group,
    Offer,
    Selection,
    ServiceSlo,
    WorkloadPattern,
)
from headway.workload.generate import generate
from headway.workload.spec import WorkloadSpec

LLAMA, QWEN, LARGE = catalog.model("llama-3.1-8b"), catalog.model("qwen1.5-14b"), catalog.model("llama-3.1-70b")
ENGINE = catalog.engine("vllm-v0")
NAMES = ("h800-80gb-sxm", "a800-80gb-pcie", "h20-96gb")
SHAREGPT = WorkloadPattern("sharegpt", 290, 207)
LONGWRITER = WorkloadPattern("longwriter", 337, 1330)


def offers(limit: int | None = 8, names: tuple[str, ...] = NAMES, per_server: int = 2) -> list[Offer]:
    return [Offer(catalog.gpu(name), limit, gpus_per_server=per_server) for name in names]


def service(pattern: WorkloadPattern = SHAREGPT, slo: ServiceSlo | None = None) -> ComboService:
    return ComboService(pattern.name or "", LLAMA, ENGINE, pattern, slo or ServiceSlo(5.0, 0.03))


def test_the_catalog_has_table_1() -> None:
    table = {"h800-sxm": (989, 3350, 2.69), "a10": (125, 600, 0.75), "rtx4090": (165, 1008, 0.69)}
    table |= {"a800-pcie": (312, 1935, 1.19), "mi210": (181, 1638, 1.40), "h20-nvl": (148, 4000, 1.50)}
    for name, (tflops, gb_per_s, usd) in table.items():
        gpu = catalog.gpu(name)
        assert gpu.peak_flops["bf16"] / 1e12 == pytest.approx(tflops, rel=2e-3)
        assert (gpu.bandwidth_bytes_per_s / 1e9, gpu.usd_per_hour) == (pytest.approx(gb_per_s, rel=1e-3), usd)


@pytest.mark.parametrize(
    ("name", "r_in", "r_out", "rps"),
    [
        ("cnn-dailymail", 702, 42, 54),
        ("sharegpt", 290, 207, 50),
        ("longwriter", 337, 1330, 6),
    ],
)
def test_the_datasets_have_the_papers_means_and_rates(name: str, r_in: float, r_out: float, rps: float) -> None:
    made = generate(msgspec.convert({"builtin": name, "num_requests": 100_000}, WorkloadSpec), 3)
    assert made.prompt_tokens.mean() == pytest.approx(r_in, rel=0.015)
    assert made.output_tokens.mean() == pytest.approx(r_out, rel=0.015)
    assert len(made) / made.arrival_s[-1] == pytest.approx(rps, rel=0.015)
    assert abs(np.corrcoef(made.prompt_tokens, made.output_tokens)[0, 1]) < 0.02


def test_gpus_of_a_phase_are_one_instance_where_a_server_holds_them() -> None:
    offer = offers()[0]
    shapes = {num: group(LLAMA, ENGINE, offer, num) for num in (1, 2, 3, 4, 6)}
    assert {num: (each.tp, each.instances) for num, each in shapes.items()} == {
        1: (1, 1),
        2: (2, 1),
        3: (1, 3),
        4: (2, 2),
        6: (2, 3),
    }
    whole_node = replace(offer, gpus_per_server=None)
    assert (group(LLAMA, ENGINE, whole_node, 8).tp, group(LLAMA, ENGINE, whole_node, 6).tp) == (8, 2)


def test_a_model_that_fits_in_no_shape_says_why() -> None:
    with pytest.raises(HeadwayError, match=r"1 x a800-80gb-pcie: llama-3.1-70b .* needs .* GiB"):
        group(LARGE, ENGINE, offers()[1], 1)
    found, rejected = enumerate_combos(LARGE, ENGINE, offers(per_server=4), Counts((4,), (4,), (1, 3, 4)))
    assert found and all(each.tp == 4 for combo in found for each in combo.groups)
    assert {each.what for each in rejected} >= {f"{num} x {name}" for name in NAMES for num in (1, 3)}


def test_memory_that_holds_the_model_but_no_request_serves_nothing() -> None:
    speeds = InstanceSpeed(LARGE, catalog.gpu("a800-pcie"), ENGINE, 2)
    long = WorkloadPattern(None, speeds.kv_tokens, 100)
    assert (
        speeds.decode_rps(long, ServiceSlo())
        == speeds.aggregated_rps(long, ServiceSlo())
        == 0
        < speeds.prefill_rps(long, ServiceSlo())
    )
    assert speeds.prefill_rps(WorkloadPattern(None, speeds.kv_tokens + 1, 1), ServiceSlo()) == 0


def test_every_combo_once_and_within_limits() -> None:
    found, rejected = enumerate_combos(LLAMA, ENGINE, offers(limit=3))
    assert len(set(found)) == len(found)
    assert all(num <= 3 for combo in found for num in combo.gpus.values())
    disaggregated = {
        (c.prefill.gpu, c.prefill.num_gpus, c.decode.gpu, c.decode.num_gpus) for c in found if c.prefill and c.decode
    }
    wanted = {(a, i, b, j) for a in NAMES for b in NAMES for i in (1, 2) for j in (1, 2, 3) if a != b or i + j <= 3}
    assert disaggregated == wanted
    assert {c.aggregated.num_gpus for c in found if c.aggregated} == {1, 2}
    assert any("more GPUs of a type" in each.reason for each in rejected)
    for combo in found:
        assert combo.usd_per_hour == pytest.approx(
            sum(num * catalog.gpu(gpu).usd_per_hour for gpu, num in combo.gpus.items())
        )


def test_a_type_with_a_limit_of_0_is_rejected() -> None:
    some = [*offers()[:2], Offer(catalog.gpu("h20"), 0)]
    found, rejected = enumerate_combos(LLAMA, ENGINE, some)
    assert found and not any("h20-96gb" in combo.gpus for combo in found)
    assert any(each.what == "1 x h20-96gb" and "there are 0" in each.reason for each in rejected)


def test_the_better_direction_of_each_pair_stays() -> None:
    found, _ = enumerate_combos(LLAMA, ENGINE, offers())
    efficiency = Efficiencies(service(), offers()).closed_form
    kept, rejected = better_directions(found, efficiency)
    assert set(kept) | {c for c in found if c.label in {r.what for r in rejected}} == set(found)
    directions = {(c.phases[0].gpu, c.phases[1].gpu) for c in kept if c.aggregated is None}
    assert ("h800-80gb-sxm", "h20-96gb") in directions and ("h20-96gb", "h800-80gb-sxm") not in directions
    for first, second in directions:
        assert first == second or (second, first) not in directions
    best = {
        pair: max(efficiency(c) or 0 for c in found if (c.phases[0].gpu, c.phases[1].gpu) == pair)
        for pair in {(c.phases[0].gpu, c.phases[1].gpu) for c in found}
    }
    assert all(best[pair] >= best[pair[::-1]] for pair in directions)


def test_the_filter_keeps_one_direction_of_a_tie_and_of_infinite_ones() -> None:
    a, b = (Group(name) for name in "ab")
    both = [GpuCombo("m", 1.0, prefill=a, decode=b), GpuCombo("m", 1.0, prefill=b, decode=a)]
    assert len(better_directions(both, lambda _: 1.0)[0]) == 1
    assert len(better_directions(both, lambda _: None)[0]) == 1
    assert better_directions(both, lambda each: None if each is both[1] else 9.0)[0] == (both[1],)


def test_candidates_are_ranked_by_served_tokens_per_dollar() -> None:
    some = offers()
    estimate = FluidEstimate({LLAMA.name: LLAMA}, {o.gpu.name: o.gpu for o in some}, ENGINE)
    chosen = select([service()], some, estimate)
    values = [each.tokens_per_usd or inf for each in chosen.candidates]
    assert values == sorted(values, reverse=True) and len(values) > 50
    for each in chosen.candidates:
        assert each.tokens_per_usd == pytest.approx(each.goodput_rps * 497 * 3600 / each.combo.usd_per_hour)
        assert each.step_tokens_per_usd is not None and each.shape_tokens_per_usd is not None
        assert 0 < each.step_tokens_per_usd < 1.05 * each.shape_tokens_per_usd  # kernels fall short of the peaks
    assert select([service()], some, estimate, top=4).candidates == chosen.candidates[:4]
    assert msgspec.json.decode(msgspec.json.encode(chosen), type=Selection) == chosen


def test_the_papers_selection_is_the_top_four_pairs_of_types_by_its_closed_form() -> None:
    some = offers()
    estimate = FluidEstimate({LLAMA.name: LLAMA}, {o.gpu.name: o.gpu for o in some}, ENGINE)
    every = select([service()], some, estimate).candidates
    found = select([service()], some, estimate, top=4, ranking="eq15")
    types = [tuple(group.gpu for group in each.combo.phases) for each in found.candidates]
    assert len(set(types)) == len(found.candidates) == 4
    worst = min(each.closed_form_tokens_per_usd or 0.0 for each in found.candidates)
    for each in every:
        own = tuple(group.gpu for group in each.combo.phases)
        if own in types:  # of its types, the size that serves the most per dollar stays
            kept = found.candidates[types.index(own)]
            assert (kept.tokens_per_usd or inf) >= (each.tokens_per_usd or inf)
        else:
            assert (each.closed_form_tokens_per_usd or 0.0) <= worst * (1 + 1e-9)
    assert len(found.candidates) + len(found.rejected[service().name]) >= len(every)


def test_the_closed_form_may_keep_the_direction_that_serves_less() -> None:
    """An H20 decodes faster than an H800 in small batches; in large ones it is bound by FLOPs and slower."""
    h20, h800 = (InstanceSpeed(LLAMA, catalog.gpu(name), ENGINE, 1) for name in ("h20", "h800"))
    assert h20.step_s(LONGWRITER, 16) < h800.step_s(LONGWRITER, 16)
    assert h20.step_s(LONGWRITER, 128) > 1.3 * h800.step_s(LONGWRITER, 128)
    some = offers()
    estimate = FluidEstimate({LLAMA.name: LLAMA}, {o.gpu.name: o.gpu for o in some}, ENGINE)
    writer, one_each = service(LONGWRITER, ServiceSlo(1.0, 0.03)), Counts((1,), (1,), ())
    pair = ("h800-80gb-sxm", "h20-96gb")
    kept = {}
    for directions in ("closed-form", "estimate", "both"):
        found = select([writer], some, estimate, one_each, directions=directions).candidates  # type: ignore[arg-type]
        served = {tuple(group.gpu for group in each.combo.groups): each.tokens_per_usd or 0.0 for each in found}
        kept[directions] = {types: served[types] for types in (pair, pair[::-1]) if types in served}
    assert list(kept["closed-form"]) == [pair] and list(kept["estimate"]) == [pair[::-1]]
    assert kept["both"][pair[::-1]] > 1.5 * kept["both"][pair]


def test_only_the_likely_sizes_of_each_pair_are_profiled() -> None:
    some = offers()
    estimate = FluidEstimate({LLAMA.name: LLAMA}, {o.gpu.name: o.gpu for o in some}, ENGINE)
    every = select([service()], some, estimate).candidates
    for num in (1, 3):
        few = select([service()], some, estimate, per_pair=num)
        types = {tuple(group.gpu for group in each.combo.groups) for each in every}
        assert len(types) == 9  # three mixed pairs, three of one type, three that do both
        for pair in types:
            of_pair = [each for each in every if tuple(group.gpu for group in each.combo.groups) == pair]
            assert [each for each in few.candidates if each in of_pair] == of_pair[:num]
        assert len(few.candidates) + sum("best sizes" in each.reason for each in few.rejected["sharegpt"]) == len(every)


def test_combos_without_goodput_are_rejected() -> None:
    some = offers()
    estimate = FluidEstimate({LLAMA.name: LLAMA}, {o.gpu.name: o.gpu for o in some}, ENGINE)
    chosen = select([service(slo=ServiceSlo(tpot_s=1e-4))], some, estimate)
    assert chosen.candidates == ()
    assert any("no request is in time" in each.reason for each in chosen.rejected["sharegpt"])
    with pytest.raises(HeadwayError, match="twice"):
        select([service(), service()], some, estimate)
    with pytest.raises(HeadwayError, match="twice"):
        enumerate_combos(LLAMA, ENGINE, [*some, some[0]])


def test_estimates_rise_with_instances_and_fall_with_tighter_slos() -> None:
    some = offers(None)
    estimate = FluidEstimate({LLAMA.name: LLAMA}, {o.gpu.name: o.gpu for o in some}, ENGINE)
    prefill = Group("h800-80gb-sxm", 1, 1)
    pairs = [GpuCombo(LLAMA.name, 1.0, prefill=prefill, decode=Group("h20-96gb", 1, n)) for n in (1, 2, 3, 400)]
    goodput = [estimate.goodput_rps(pair, LONGWRITER, ServiceSlo()) for pair in pairs]
    assert goodput[1] == pytest.approx(2 * goodput[0]) and goodput[2] == pytest.approx(3 * goodput[0])
    assert goodput[3] < 399 * goodput[0]  # prefill, or the network, is what limits now
    speeds = InstanceSpeed(LLAMA, catalog.gpu("h20"), ENGINE, 1)
    slos = [ServiceSlo(ttft, tpot) for ttft, tpot in ((None, None), (1.0, 0.03), (0.2, 0.02), (0.1, 0.012))]
    for answers in (speeds.prefill_rps, speeds.decode_rps, speeds.aggregated_rps):
        values = [answers(LONGWRITER, slo) for slo in slos]
        assert all(a >= b for a, b in pairwise(values)) and values[-1] > 0
    assert speeds.aggregated_rps(LONGWRITER, ServiceSlo(tpot_s=1e-4)) == 0
    assert speeds.prefill_rps(LONGWRITER, ServiceSlo(ttft_s=1e-4)) == 0
    assert speeds.decode_rps(WorkloadPattern(None, 100, 1), ServiceSlo(tpot_s=1e-4)) == inf


def test_doing_both_on_one_gpu_is_slower_than_either_alone() -> None:
    for name in NAMES:
        speeds = InstanceSpeed(QWEN, catalog.gpu(name), ENGINE, 1)
        for pattern in (SHAREGPT, LONGWRITER):
            alone = speeds.prefill_rps(pattern, ServiceSlo()), speeds.decode_rps(pattern, ServiceSlo())
            assert speeds.aggregated_rps(pattern, ServiceSlo()) == pytest.approx(1 / (1 / alone[0] + 1 / alone[1]))


def test_a_slow_network_limits_a_pair_and_no_aggregated_combo() -> None:
    gpus = {name: catalog.gpu(name) for name in NAMES}
    slow = FluidEstimate({LLAMA.name: LLAMA}, gpus, ENGINE, network_bytes_per_s=131_072 * 290 * 2.0)
    pair = GpuCombo(LLAMA.name, 1.0, prefill=Group(NAMES[0]), decode=Group(NAMES[2]))
    assert slow.goodput_rps(pair, SHAREGPT, ServiceSlo()) == pytest.approx(2.0)
    whole = GpuCombo(LLAMA.name, 1.0, aggregated=Group(NAMES[0]))
    fast = FluidEstimate({LLAMA.name: LLAMA}, gpus, ENGINE)
    assert slow.goodput_rps(whole, SHAREGPT, ServiceSlo()) == fast.goodput_rps(whole, SHAREGPT, ServiceSlo())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: GpuCombo("m", 1.0, prefill=Group("a")), "prefill and decode"),
        (lambda: GpuCombo("m", 1.0, Group("a"), Group("b"), Group("c")), "prefill and decode"),
        (lambda: GpuCombo("m", -1.0, aggregated=Group("a")), "usd_per_hour"),
        (lambda: Offer(catalog.gpu("h20"), -1), "limit"),
        (lambda: Offer(catalog.gpu("h20"), usd_per_hour=-1.0), "usd_per_hour"),
        (lambda: Offer(catalog.gpu("h20"), gpus_per_server=0), "gpus_per_server"),
        (lambda: Offer(catalog.gpu("h20"), interruptions_per_hour=-1.0), "interruptions_per_hour"),
        (lambda: Counts(prefill=(0,)), "counts"),
        (lambda: WorkloadPattern(None, 0, 3), "prompt_tokens"),
        (lambda: ServiceSlo(ttft_s=0.0), "ttft_s"),
    ],
)
def test_invalid_values_are_refused(make: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()  # type: ignore[operator]


def test_a_free_type_is_ranked_first() -> None:
    some = [replace(offer, usd_per_hour=0.0 if offer.gpu.name == "h20-96gb" else None) for offer in offers()]
    estimate = FluidEstimate({LLAMA.name: LLAMA}, {o.gpu.name: o.gpu for o in some}, ENGINE)
    first: ComboCandidate = select([service()], some, estimate).candidates[0]
    assert first.tokens_per_usd is None and set(first.combo.gpus) == {"h20-96gb"}


def test_interruptions_cost_the_time_until_the_combo_serves_again() -> None:
    spot = Offer(catalog.gpu("h20"), 8, 0.5, 2, interruptions_per_hour=0.2, restart_s=180.0)
    steady = Offer(catalog.gpu("a800-pcie"), 8, 1.0, 2)
    found, _ = enumerate_combos(LLAMA, ENGINE, [spot, steady], Counts((1,), (1, 4), (1, 2)))
    usd = {each.label: each.usd_per_hour for each in found}
    assert usd["<1 x h20-96gb>"] == pytest.approx(0.5 * (1 + 0.2 * 180 / 3600))
    assert usd["<2 x h20-96gb (tp 2)>"] == pytest.approx(1.0 * (1 + 0.2 * 180 / 3600)), "one instance, one interruption"
    assert usd["<1 x a800-80gb-pcie>"] == 1.0
    mixed = usd["<1 x a800-80gb-pcie, 4 x h20-96gb (tp 2)>"]
    assert mixed == pytest.approx(3.0 * (1 + 2 * 0.2 * 180 / 3600)), "either of the two stops all, and all is paid for"


def test_cheap_gpus_with_frequent_interruptions_are_not_chosen() -> None:
    def share_of_spot(interruptions_per_hour: float) -> bool:
        spot = Offer(catalog.gpu("h20"), 8, 0.9, 2, interruptions_per_hour)
        both = [spot, Offer(catalog.gpu("a800-pcie"), 8, None, 2)]
        estimate = FluidEstimate({LLAMA.name: LLAMA}, {offer.gpu.name: offer.gpu for offer in both}, ENGINE)
        return "h20-96gb" in select([service()], both, estimate).candidates[0].combo.gpus

    assert share_of_spot(0.0) and not share_of_spot(60.0)


def test_selection_estimates_with_the_network_of_the_service() -> None:
    slow = replace(service(), network_bytes_per_s=131_072 * 290 * 2.0)
    split = GpuCombo(LLAMA.name, 1.0, prefill=Group(NAMES[0]), decode=Group(NAMES[2]))
    tokens = (SHAREGPT.prompt_tokens + SHAREGPT.output_tokens) * 3600
    assert Efficiencies(slow, offers()).estimated(split) == pytest.approx(2.0 * tokens)
    fast = Efficiencies(service(), offers()).estimated(split)
    assert fast is not None and fast > 2.5 * tokens
