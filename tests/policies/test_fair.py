"""Fair sharing between tenants: in a queue of its own, behind control, and in a simulated fleet."""

from __future__ import annotations

import pickle
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from control_fakes import Fleet, fleet
from fakes import FakeReplica, FakeRequest
from headway import scenario
from headway.control.live import HELD, Live
from headway.core.errors import HeadwayError
from headway.core.record import Ended, Outcome
from headway.policies.ordering import fair
from headway.policies.ordering.fair import FairOrdering


def ended(request: FakeRequest, output_tokens: int = 0) -> Ended:
    return Ended(
        request.id, Outcome.FINISHED, "", request.tier, 0, 0.0, None, 0.0, request.prompt_tokens, output_tokens,
        tenant=request.tenant,
    )  # fmt: skip


class Lines:
    """Tenants that always have a request waiting, and the order in which the ordering has them start."""

    def __init__(self, ordering: FairOrdering, *tenants: str) -> None:
        self.ordering, self.id = ordering, 0
        self.waiting = {tenant: deque[FakeRequest]() for tenant in tenants}

    def add(self, tenant: str, prompt_tokens: int = 100, tier: int = 0) -> FakeRequest:
        self.id += 1
        request = FakeRequest(
            self.id, arrival_s=float(self.id), prompt_tokens=prompt_tokens, tier=tier, tenant=tenant
        )  # fmt: skip
        self.waiting.setdefault(tenant, deque()).append(request)
        return request

    def start(self) -> FakeRequest:
        heads = [line[0] for line in self.waiting.values() if line]
        first = min(heads, key=lambda request: self.ordering.rank(request, 0.0))
        self.waiting[first.tenant].popleft()
        self.ordering.started(first, 0.0)
        return first


prompts = st.integers(1, 1000)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from("abc"), prompts), min_size=200, max_size=300), st.sampled_from([0, 500]))
def test_services_of_waiting_tenants_differ_by_a_bounded_amount(
    arrivals: list[tuple[str, int]], burst_tokens: int
) -> None:
    """SFQ's bound: over any time in which both wait, |W_a/w_a - W_b/w_b| <= l_a/w_a + l_b/w_b, and here the burst."""
    weights = {"a": 1.0, "b": 2.0, "c": 0.5}
    lines = Lines(FairOrdering(weights, output_weight=0, burst_tokens=burst_tokens))
    for tenant, prompt_tokens in arrivals:
        lines.add(tenant, prompt_tokens)
    bound = {tenant: (1000 + burst_tokens) / weight for tenant, weight in weights.items()}
    served = dict.fromkeys(weights, 0.0)
    histories: list[dict[str, float]] = [dict(served)]
    while all(lines.waiting.get(tenant) for tenant in weights):
        request = lines.start()
        served[request.tenant] += request.prompt_tokens / weights[request.tenant]
        histories.append(dict(served))
    for one, other in (("a", "b"), ("b", "c"), ("a", "c")):
        gaps = [each[one] - each[other] for each in histories]
        assert max(gaps) - min(gaps) <= bound[one] + bound[other]


@given(st.integers(1, 12), st.integers(0, 60), prompts)
def test_nobody_starves(num_floods: int, num_before: int, prompt_tokens: int) -> None:
    """However long the others' lines are, a new tenant's first request starts after at most one of each of them."""
    lines = Lines(FairOrdering(output_weight=0))
    for i in range(200 * num_floods):
        lines.add(f"flood {i % num_floods}", prompt_tokens)
    for _ in range(num_before):
        lines.start()
    quiet = lines.add("quiet", 1000)
    started = [lines.start() for _ in range(num_floods + 1)]
    assert quiet in started


def test_tiers_come_first() -> None:
    """However much service a tenant has had in another tier; and within a tier, tenants take turns."""
    lines = Lines(FairOrdering(burst_tokens=0))
    for _ in range(2):
        lines.add("bulk", 10**6, tier=0)
    for tenant in ("bulk", "bulk", "other", "other"):
        lines.add(tenant, tier=1)
    order = [lines.start() for _ in range(6)]
    assert [request.tier for request in order] == [0, 0, 1, 1, 1, 1]
    assert [request.tenant for request in order[2:]] == ["bulk", "other", "bulk", "other"]


def test_idle_time_gives_no_credit_beyond_the_burst() -> None:
    lines = Lines(FairOrdering(output_weight=0, burst_tokens=250))
    for _ in range(100):
        lines.add("flood")
    for _ in range(50):
        lines.start()
    for _ in range(10):
        lines.add("idle so far")
    order = [lines.start().tenant for _ in range(8)]
    # 300 tokens at once, as those from which on 250 are exceeded still start; then in turn.
    assert Counter(order[:3]) == {"idle so far": 3} and Counter(order[3:7]) == {"idle so far": 2, "flood": 2}


def test_the_length_of_answers_is_charged_when_it_is_known() -> None:
    """Of two tenants with equal prompts, one gets answers nine times as long: it starts fewer requests."""
    ordering = FairOrdering(burst_tokens=0)
    lines, lengths, running = Lines(ordering), {"long": 900, "short": 100}, deque[FakeRequest]()
    for _ in range(1000):
        for tenant in lengths:
            lines.add(tenant, 100)
    started: Counter[str] = Counter()
    for _ in range(600):
        running.append(request := lines.start())
        started[request.tenant] += 1
        if len(running) > 8:
            ordering.learn(ended(old := running.popleft(), lengths[old.tenant]))
    assert started["short"] / started["long"] == pytest.approx((100 + 2 * 900) / (100 + 2 * 100), rel=0.1)


def test_its_state_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair, "MAX_IDLE", 50)
    ordering = FairOrdering()
    for i in range(1000):
        request = FakeRequest(i, tenant=f"tenant {i}", prompt_tokens=10)
        ordering.started(request, 0.0)
        ordering.started(request, 0.0)  # placed again after a failure: charged once
        ordering.learn(ended(request, 5))
        ordering.learn(ended(request, 5))
    assert len(ordering._tenants) == len(ordering._idle) == 50 and not ordering._charged
    assert ordering._weight_in_flight == 0.0 and pickle.loads(pickle.dumps(ordering)).rank(request, 0.0)


@pytest.mark.parametrize(
    "arguments",
    [{"weights": {"a": 0}}, {"prompt_weight": 0}, {"output_weight": -1}, {"headroom": 0.9}, {"burst_tokens": -1}],
)
def test_arguments_are_checked(arguments: dict[str, Any]) -> None:
    with pytest.raises(HeadwayError, match=next(iter(arguments))):
        FairOrdering(**arguments)


# Behind control.


def behind(window: int = 4, num: int = 1, **arguments: Any) -> Fleet:
    return fleet(*["mixed"] * num, window=window, ordering=lambda: FairOrdering(**arguments), ordering_at="gateway")


def test_a_flood_does_not_hold_up_another_tenant() -> None:
    run = behind(headroom=0)
    flood = [run.arrive(i, tenant="flood") for i in range(100)]
    quiet = run.arrive(100, tenant="quiet")
    assert quiet.stage is HELD
    run.finish(flood[0], 1.0)
    assert quiet.stage is not HELD and flood[4].stage is HELD


def test_what_never_waited_is_charged() -> None:
    run = behind(headroom=0, burst_tokens=0)
    running = [run.arrive(i, tenant="a") for i in range(4)]  # at once, as there is room
    b, a = run.arrive(4, tenant="b"), run.arrive(5, tenant="a")
    run.finish(running[0], 1.0)
    assert b.stage is not HELD and a.stage is HELD


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 2), st.booleans()), max_size=120))
def test_no_place_is_free_while_a_request_waits(events: list[tuple[str, int, bool]]) -> None:
    """With no headroom; and a request that was cancelled while it waited costs its tenant nothing."""
    run = behind(window=3, num=2, headroom=0)
    lives: list[Live] = []
    for i, (tenant, tier, ends) in enumerate(events):
        running = [live for live in lives if live.stage is not HELD and live.id not in dict(run.effects.ended)]
        if ends and running:
            run.finish(running[0], float(i))
        elif ends and (held := [live for live in lives if live.stage is HELD]):
            run.control.on_timeout(float(i), held[-1])
        else:
            lives.append(run.arrive(i, float(i), tenant=tenant, tier=tier))
        num_in_flight = sum(replica.num_in_flight for replica in run.effects.replicas.values())
        assert num_in_flight == 6 or not any(live.stage is HELD for live in lives)
        assert len(run.service.hold_queue.requests()) == sum(live.stage is HELD for live in lives)


def test_headroom_is_for_tenants_below_their_share() -> None:
    run = behind(window=8, headroom=0.25)
    flood = [run.arrive(i, tenant="flood") for i in range(20)]
    assert sum(live.stage is not HELD for live in flood) == 6
    quiet = [run.arrive(100 + i, tenant="quiet") for i in range(3)]
    assert [live.stage is HELD for live in quiet] == [False, False, True]


def test_unfinished_prompts_hold_up_the_flood_and_nobody_else() -> None:
    """A replica with a queue of its own and an iteration's prompt tokens to compute gets no more of them."""
    run = Fleet([FakeReplica(0, model="llama")], window=64, ordering=FairOrdering, ordering_at="gateway",
                prompt_window=1000)  # fmt: skip
    flood = [run.arrive(0, tenant="flood")]
    replica = run.effects.replicas[0]
    replica.prefill_tokens_left, replica.num_waiting = 5000, 3
    flood.append(run.arrive(1, tenant="flood"))
    quiet = run.arrive(2, tenant="quiet")
    assert flood[1].stage is HELD and quiet.stage is not HELD
    replica.prefill_tokens_left = 10
    run.control.on_prompt_computed(flood[0], 1.0)
    assert flood[1].stage is not HELD


def test_a_full_queue_has_room_for_a_tenant_with_a_short_line() -> None:
    run = behind(window=1)
    for i in range(20):
        run.arrive(i, tenant="flood")
    queue = run.service.hold_queue
    assert queue.is_full(Live(100, 0.0, 1, 1, tenant="flood"), 19)
    assert not queue.is_full(Live(101, 0.0, 1, 1, tenant="quiet"), 19)
    assert not queue.is_full(Live(101, 0.0, 1, 1, tenant="flood"), 21)


# In a simulated fleet.


def simulated(folder: Path, tenants: dict[str, float], arrivals: float, **policies: Any) -> Any:
    lengths = {"kind": "lognormal", "mean": 20, "cv": 0.7}, {"kind": "lognormal", "mean": 400, "cv": 0.7}
    data = {
        "workload": {
            "arrivals": arrivals, "duration_s": 90, "prompt_tokens": lengths[0], "output_tokens": lengths[1],
            "tenants": tenants,
        },
        "fleet": [
            {"model": "qwen3-8b", "gpu": "h100", "engine": {"name": "vllm-v1", "max_num_seqs": 64}, "replicas": 2}
        ],
        "policies": {"routing": "least-loaded", **policies},
        "simulation": {"warmup_s": 10, "until_s": 90}, "observe": {"period_s": 1},
    }  # fmt: skip
    path = folder / "flood.yaml"
    path.write_text(yaml.safe_dump(data))
    return scenario.run(scenario.load(path)).summary


def test_a_quiet_tenant_hardly_notices_a_flood(tmp_path: Path) -> None:
    """Behind a flood of 20 times its requests, three times what the replicas can serve."""
    alone = simulated(tmp_path, {"quiet": 1}, 5).ttft_s.p99
    tenants = {"flood": 20, "quiet": 1}
    behind = simulated(tmp_path, tenants, 105, ordering="fcfs").tenants["quiet"]
    shared = simulated(tmp_path, tenants, 105, ordering="fair", ordering_at="gateway").tenants["quiet"]
    assert behind.ttft_s is None or behind.ttft_s.p50 > 5
    assert shared.ttft_s.p99 < 1.5 * alone and shared.num_unfinished < 50


def test_it_orders_the_gateways_queue_only(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match=r"cannot order by fair at the replica.* with ordering_at gateway"):
        simulated(tmp_path, {"quiet": 1}, 1.0, ordering="fair")
    data: dict[str, Any] = {"workload": {"builtin": "chat"}, "fleet": [{"model": "qwen3-8b", "gpu": "h100"}]}
    data["policies"] = {"ordering": "fair"}
    (tmp_path / "any.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(HeadwayError, match=r"fair orders the gateway's queue only; expected `ordering_at: gateway`"):
        scenario.load(tmp_path / "any.yaml")
