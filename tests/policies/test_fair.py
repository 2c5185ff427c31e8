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
from tenant_lines import Lines


def ended(request: FakeRequest, output_tokens: int = 0) -> Ended:
    return Ended(
        request.id,
        Outcome.FINISHED,
        "",
        request.tier,
        0,
        0.0,
        None,
        0.0,
        request.prompt_tokens,
        output_tokens,
        tenant=request.tenant,
    )


prompts = st.integers(1, 1000)


@pytest.mark.ci
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


def test_service_of_another_gateway_counts() -> None:
    """Two gateways that tell each other: a tenant that one of them serves goes last at the other, until its answers
    turn out to be short; and what it had while it was alone is not held against it."""
    here, there = FairOrdering(burst_tokens=0), FairOrdering(burst_tokens=0)
    flood, quiet = FakeRequest(1, tenant="flood", prompt_tokens=1000), FakeRequest(2, tenant="quiet")
    for i in range(10):
        there.started(FakeRequest(i, tenant="flood", prompt_tokens=1000), 0.0)
    reported = there.given()
    assert reported == {(0, "flood"): 10_000.0} and there.given() == {}
    for share, service in reported.items():
        here.given_elsewhere(share, service)
    assert here.rank(quiet, 0.0) < here.rank(flood, 0.0)
    late, since = here.rank(flood, 0.0), here.rank(quiet, 0.0)
    assert late[1] - since[1] <= 10_000  # one message, however long the flood has lasted
    here.given_elsewhere((0, "flood"), -4000.0)
    assert late[1] - here.rank(flood, 0.0)[1] == 4000
    for _ in range(100):
        here.given_elsewhere((0, "flood"), 500.0)
    assert here.rank(flood, 0.0)[1] - here.rank(quiet, 0.0)[1] <= 500
    assert here.given() == {}


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


def crowded(**given: Any) -> Fleet:
    """One replica whose iterations compute 1,000 prompt tokens."""
    replica = FakeReplica(0, model="llama", **given)
    return Fleet([replica], window=64, ordering=FairOrdering, ordering_at="gateway", prompt_window=1000)


def test_prompts_that_have_not_started_hold_up_the_flood_and_nobody_else() -> None:
    """Whatever the engine's metrics say, which are old."""
    run = crowded(num_waiting=0, kv_blocks_total=10**6)
    flood = [run.arrive(i, tenant="flood", prompt=400) for i in range(4)]
    assert [live.stage is HELD for live in flood] == [False, False, True, True]
    quiet = run.arrive(4, tenant="quiet", prompt=400)
    assert quiet.stage is not HELD
    run.control.on_prompt_computed(flood[0], 1.0)
    assert flood[2].stage is HELD  # the quiet tenant's prompt is as much work as the flood's
    run.control.on_prompt_computed(quiet, 2.0)
    run.control.on_prompt_computed(quiet, 2.0)  # again, after a preemption
    assert (flood[2].stage is HELD, flood[3].stage is HELD) == (False, True)
    run.finish(flood[1], 3.0)
    assert flood[3].stage is not HELD


def test_a_replica_that_has_started_all_it_has_gets_one_request_of_any_length() -> None:
    run = crowded(kv_blocks_total=10**6)
    long = [run.arrive(i, tenant="flood", prompt=900, output=5) for i in range(2)]
    assert [live.stage is HELD for live in long] == [False, True]
    run.control.on_prompt_computed(long[0], 1.0)
    assert long[1].stage is not HELD


def test_answers_that_are_not_streamed_count_while_the_engine_has_requests_waiting() -> None:
    """Their first token comes with the last: nobody sees whether they have started."""
    run = crowded(kv_blocks_total=10**6)
    flood = [run.arrive(i, tenant="flood", prompt=400, is_streamed=False) for i in range(5)]
    assert not any(live.stage is HELD for live in flood)
    run.effects.replicas[0].num_waiting = 1
    flood.append(run.arrive(5, tenant="flood", prompt=400, is_streamed=False))
    assert flood[5].stage is HELD
    run.effects.replicas[0].num_waiting = 0
    run.control.on_views_refreshed(1.0)
    assert flood[5].stage is not HELD


def test_a_full_kv_cache_holds_up_the_flood() -> None:
    """Full by control's own count, which knows of no shared prefixes, and by the engine's, which is old."""
    run = crowded(kv_blocks_total=100)  # 1,600 tokens, of which a sixteenth is for others
    replica = run.effects.replicas[0]
    first = run.arrive(0, tenant="flood", prompt=700)
    run.control.on_prompt_computed(first, 0.5)
    replica.tokens_generated, replica.kv_blocks_used = 100, 60
    second = run.arrive(1, tenant="flood", prompt=800)
    assert second.stage is not HELD  # 1,600 tokens by control's count, but the engine has room
    run.control.on_prompt_computed(second, 1.0)
    replica.kv_blocks_used = 95
    held, quiet = run.arrive(2, tenant="flood", prompt=100), run.arrive(3, tenant="quiet", prompt=100)
    assert held.stage is HELD and quiet.stage is not HELD
    run.finish(second, 2.0)
    assert held.stage is not HELD


def test_requests_leave_the_counts_of_prompts_on_every_path() -> None:
    run = Fleet(
        [FakeReplica(i, model="llama", kv_blocks_total=10**6) for i in range(2)],
        window=64,
        ordering=FairOrdering,
        ordering_at="gateway",
        prompt_window=1000,
    )
    lives = [run.arrive(i, tenant="a", prompt=300) for i in range(7)]
    sent = run.service.sent
    assert sent is not None and [sent._at[i].unstarted for i in (0, 1)] == [900, 900]
    moved, crashed = lives[0], [live for live in lives if live.replica == 1 and live.stage is not HELD]
    moved.replica = 1
    run.control.on_moved(moved, 1.0)
    assert sent._at[1].unstarted == 1200 and sent._at[0].unstarted == 900  # the held one has taken its place
    run.control.on_crashed(1, [moved, *crashed], 2.0)
    assert sent._at[1].all == sent._at[1].unstarted == 0
    for live in lives:
        if live.stage is HELD:
            run.control.on_timeout(3.0, live)
        else:
            run.control.on_cancelled(live, 3.0)
    assert sent._at[0].all == sent._at[0].unstarted == 0 and all(live.sent_to is None for live in lives)


def test_a_tenant_below_its_share_is_offered_the_replicas_that_are_soonest() -> None:
    """Those of its pool where no more is to be computed first than at another one and its own prompt."""
    run = Fleet(
        [FakeReplica(i, model="llama", kv_blocks_total=10**6) for i in range(3)],
        window=64,
        ordering=FairOrdering,
        ordering_at="gateway",
        prompt_window=1000,
    )
    for i, prompt in enumerate((500, 400)):  # the first replica is offered first
        run.arrive(i, tenant="flood", prompt=prompt)
    assert [run.arrive(2 + i, tenant=f"quiet {i}", prompt=prompt).replica for i, prompt in enumerate((950, 100))] == [
        0,
        1,
    ]
    assert run.arrive(4, tenant="flood", prompt=100).replica == 1  # others have room or not, and the router chooses


def test_a_full_queue_has_room_for_a_tenant_with_a_short_line() -> None:
    run = behind(window=1)
    for i in range(20):
        run.arrive(i, tenant="flood")
    queue = run.service.hold_queue
    assert queue.is_full(Live(100, 0.0, 1, 1, tenant="flood"), 19)
    assert not queue.is_full(Live(101, 0.0, 1, 1, tenant="quiet"), 19)
    assert not queue.is_full(Live(101, 0.0, 1, 1, tenant="flood"), 21)


# In a simulated fleet.


def simulated(
    folder: Path,
    tenants: dict[str, float],
    quiet_rps: float,
    tokens: tuple[int, int],
    seconds: float = 90,
    engine: dict[str, Any] | None = None,
    **policies: Any,
) -> Any:
    """A run of two H100 with prompts and answers of lognormal lengths with these means."""
    prompts, answers = ({"kind": "lognormal", "mean": mean, "cv": 0.7} for mean in tokens)
    data = {
        "workload": {
            "arrivals": quiet_rps * sum(tenants.values()),
            "duration_s": seconds,
            "prompt_tokens": prompts,
            "output_tokens": answers,
            "tenants": tenants,
        },
        "fleet": [
            {"model": "qwen3-8b", "gpu": "h100", "engine": {"name": "vllm-0.15", **(engine or {})}, "replicas": 2}
        ],
        "policies": {"routing": "least-loaded", **policies},
        "simulation": {"warmup_s": 10, "until_s": seconds},
        "observe": {"period_s": 1},
    }
    path = folder / "flood.yaml"
    path.write_text(yaml.safe_dump(data))
    return scenario.run(scenario.load(path))


def p99_s(ran: Any, tenant: str = "") -> float:
    """Of the TTFT of one tenant, or of all."""
    metrics = ran.summary.tenants[tenant] if tenant else ran.summary
    assert metrics.ttft_s is not None and metrics.num_completed > 100
    return float(metrics.ttft_s.p99)


def num_finished(ran: Any) -> int:
    """Requests that ended after the warm-up, whenever they arrived."""
    rows = ran.records.requests
    return int(((rows["outcome"] == Outcome.FINISHED) & (rows["end_s"] > ran.summary.warmup_s)).sum())


TWENTY = {"quiet": 1, "flood": 20}
FAIR = {"ordering": "fair", "ordering_at": "gateway"}


def test_a_quiet_tenant_hardly_notices_a_flood(tmp_path: Path) -> None:
    """Behind a flood of 20 times its requests, three times what the replicas can serve."""
    few = {"max_num_seqs": 64}
    alone = simulated(tmp_path, {"quiet": 1}, 5, (20, 400), engine=few)
    behind = simulated(tmp_path, TWENTY, 5, (20, 400), engine=few, ordering="fcfs").summary.tenants["quiet"]
    shared = simulated(tmp_path, TWENTY, 5, (20, 400), engine=few, **FAIR)
    assert behind.ttft_s is None or behind.ttft_s.p50 > 5
    assert p99_s(shared, "quiet") < 1.5 * p99_s(alone) and shared.summary.tenants["quiet"].num_unfinished < 50


@pytest.mark.ci
@pytest.mark.parametrize(
    ("tokens", "quiet_rps", "limit"),
    [((2000, 100), 3.0, 2.0), ((2000, 400), 2.0, 2.3), ((1000, 1000), 1.5, 2.3), ((200, 100), 15.0, 2.7)],
)
def test_a_flood_costs_a_quiet_tenant_no_more_than_longer_iterations(
    tmp_path: Path, tokens: tuple[int, int], quiet_rps: float, limit: float
) -> None:
    """Its prompts wait neither for those of the flood nor for KV cache, and the fleet serves as many requests."""
    seconds = 200 if tokens[0] > 500 else 60
    alone = simulated(tmp_path, {"quiet": 1}, quiet_rps, tokens, seconds)
    shared = simulated(tmp_path, TWENTY, quiet_rps, tokens, seconds, **FAIR)
    fcfs = simulated(tmp_path, TWENTY, quiet_rps, tokens, seconds, ordering="fcfs")
    assert p99_s(shared, "quiet") < limit * p99_s(alone)
    assert shared.summary.tenants["flood"].ttft_s.p50 > 5
    assert num_finished(shared) > 0.95 * num_finished(fcfs)


def test_fewer_prompts_at_a_time_make_iterations_short(tmp_path: Path) -> None:
    few = {"ordering": {"name": "fair", "prompt_window": 512}, "ordering_at": "gateway"}
    shared = simulated(tmp_path, TWENTY, 15, (200, 100), 60, **few)
    assert p99_s(shared, "quiet") < 1.5 * p99_s(simulated(tmp_path, {"quiet": 1}, 15, (200, 100), 60))


def test_it_orders_the_gateways_queue_only(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match=r"cannot order by fair at the replica.* with ordering_at gateway"):
        simulated(tmp_path, {"quiet": 1}, 1.0, (20, 400), ordering="fair")
    data: dict[str, Any] = {"workload": {"builtin": "chat"}, "fleet": [{"model": "qwen3-8b", "gpu": "h100"}]}
    data["policies"] = {"ordering": "fair"}
    (tmp_path / "any.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(HeadwayError, match=r"fair orders the gateway's queue only; expected `ordering_at: gateway`"):
        scenario.load(tmp_path / "any.yaml")


def test_weights_change_while_requests_are_in_flight() -> None:
    """The shares of the requests in flight are those of the new weights."""
    ordering = FairOrdering({"a": 1.0})
    lines = Lines(ordering, "a", "b")
    first, _, other = lines.add("a"), lines.add("a"), lines.add("b")
    for _ in range(3):
        lines.start()
    assert not ordering.is_below_share(first)
    ordering.set_weights({"a": 8.0})
    assert ordering.is_below_share(first) and not ordering.is_below_share(other)
    for each in (1, 2, 3):
        ordering.learn(ended(FakeRequest(each, tenant="a" if each < 3 else "b")))
