"""What the orderings that share service promise: bounds on waiting and on the difference of services."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakeRequest
from headway.core.errors import HeadwayError
from headway.core.policy import PeerOrdering
from headway.policies.ordering.attained import LeastAttainedServiceOrdering, VtcOrdering
from headway.policies.ordering.deficit import DeficitRoundRobinOrdering
from headway.policies.ordering.fair import FairOrdering
from tenant_lines import Lines

LONGEST = 1000
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}
prompts = st.integers(1, LONGEST)
seeds = st.integers(0, 10_000)
quanta = st.sampled_from([10.0, 700.0, 5000.0])
SHARING = [VtcOrdering, DeficitRoundRobinOrdering, FairOrdering]


def services(ordering: Any, arrivals: list[tuple[str, int]]) -> list[Counter[str]]:
    """The tokens that each of three tenants had after each start, while all of them wait."""
    lines = Lines(ordering)
    for tenant, prompt_tokens in arrivals:
        lines.add(tenant, prompt_tokens)
    found = [Counter[str]()]
    while all(lines.waiting.get(tenant) for tenant in WEIGHTS):
        request = lines.start()
        found.append(found[-1] + Counter({request.tenant: request.prompt_tokens}))
    return found


@settings(max_examples=40, deadline=None)
@given(seeds, quanta)
def test_services_of_waiting_tenants_stay_within_the_bound(seed: int, quantum: float) -> None:
    """Over any time in which both wait: two requests of each over its weight; of rounds one, and a quantum of each."""
    rng = Random(seed)
    arrivals = [(rng.choice("abc"), rng.randint(1, LONGEST)) for _ in range(150)]
    drr = DeficitRoundRobinOrdering(WEIGHTS, quantum, output_weight=0)
    for ordering, num, more in ((VtcOrdering(WEIGHTS, output_weight=0), 2, 0.0), (drr, 1, 2 * quantum)):
        found = services(ordering, arrivals)
        for one, other in (("a", "b"), ("b", "c"), ("a", "c")):
            gaps = [each[one] / WEIGHTS[one] - each[other] / WEIGHTS[other] for each in found]
            most = num * (LONGEST / WEIGHTS[one] + LONGEST / WEIGHTS[other]) + more
            assert max(gaps) - min(gaps) <= most + 1e-6


@settings(max_examples=60, deadline=None)
@given(seeds, prompts, quanta)
def test_rounds_bound_what_others_start_before_a_tenant(seed: int, own: int, quantum: float) -> None:
    """Each other tenant starts 1 + r quanta and a request at most; r quanta are what the tenant's own last one took
    beyond its quantum."""
    rng, lines = Random(seed), Lines(DeficitRoundRobinOrdering(WEIGHTS, quantum, output_weight=0))
    for _ in range(800):
        lines.add(rng.choice("bc"), rng.randint(1, LONGEST))
    for _ in range(rng.randint(0, 60)):
        lines.start()
    rounds = 0
    for prompt_tokens in (own, 1):
        quiet, started = lines.add("quiet", prompt_tokens), Counter[str]()
        while (request := lines.start()) is not quiet:
            started[request.tenant] += request.prompt_tokens
        for tenant in "bc":
            assert started[tenant] <= (1 + rounds) * quantum * WEIGHTS[tenant] + LONGEST
        rounds = int(own // quantum) + 1


@given(st.integers(1, 12), st.integers(0, 60), prompts)
def test_an_idle_tenant_is_next_for_the_counter(num_floods: int, num_before: int, prompt_tokens: int) -> None:
    """It is lifted to the least counter and goes first at that, so that nothing starts before it."""
    lines = Lines(VtcOrdering(output_weight=0))
    for i in range(num_before + num_floods):
        lines.add(f"flood {i % num_floods}", prompt_tokens)
    for _ in range(num_before):
        lines.start()
    quiet = lines.add("quiet", LONGEST)
    started = [lines.start() for _ in range(num_floods + 1)]
    assert quiet in started


def test_a_round_gives_each_its_quantum_and_takes_back_what_was_beyond() -> None:
    lines = Lines(DeficitRoundRobinOrdering({"b": 2.0}, quantum_tokens=1000, output_weight=0))
    for tenant, tokens, num in (("a", 700, 6), ("b", 1000, 6)):
        for _ in range(num):
            lines.add(tenant, tokens)
    started = [lines.start().tenant for _ in range(9)]
    # Round 0: a takes 1,400 of its 1,000, b 2,000 of its 2,000. Rounds 1 and 2: a has 600, then 900 left.
    assert Counter(started[:4]) == {"a": 2, "b": 2} and Counter(started[4:7]) == {"a": 1, "b": 2}
    assert Counter(started[7:9]) == {"a": 1, "b": 1}


@pytest.mark.parametrize("make", SHARING)
def test_tiers_come_first(make: Any) -> None:
    """However much service the tenant of the urgent tier has had there."""
    ordering = make()
    for i in range(50):
        ordering.started(FakeRequest(i, tenant="bulk", prompt_tokens=10**6), 0.0)
    urgent, other = FakeRequest(50, tenant="bulk"), FakeRequest(51, tenant="other", tier=1)
    assert ordering.rank(urgent, 0.0) < ordering.rank(other, 0.0)


@pytest.mark.parametrize("make", SHARING)
def test_service_of_another_gateway_counts(make: Any) -> None:
    """A tenant that another gateway serves goes last here, until its answers turn out to be short; a tenant that comes
    back is lifted, and what the other one had while it was alone is not held against it."""
    kinds = {FairOrdering: {"burst_tokens": 0}, DeficitRoundRobinOrdering: {"quantum_tokens": 400}}.get(make, {})
    here, there = make(**kinds), make(**kinds)
    assert isinstance(here, PeerOrdering)
    lines = Lines(there)
    for _ in range(10):
        lines.add("flood", 1000)
    for _ in range(10):
        lines.start()
    reported = there.given()
    assert reported == {(0, "flood"): 10_000.0} and there.given() == {}
    for share, service in reported.items():
        here.given_elsewhere(share, service)
    assert here.given() == {}
    assert first(here) == "quiet"
    here.given_elsewhere((0, "flood"), -10_000.0)
    for _ in range(100):
        here.given_elsewhere((0, "flood"), 500.0)
    at = Lines(here)
    for _ in range(40):
        at.add("flood", 100)
        at.add("quiet", 100)
    started = [at.start().tenant for _ in range(40)]
    assert started[0] == "quiet" and 15 <= started.count("quiet") <= 26


def first(ordering: Any) -> str:
    """Which of two tenants goes first, the flood's request having come before."""
    flood, quiet = (FakeRequest(i, arrival_s=float(i), tenant=name) for i, name in enumerate(("flood", "quiet")))
    return "quiet" if ordering.rank(quiet, 0.0) < ordering.rank(flood, 0.0) else "flood"


@pytest.mark.parametrize("make", [VtcOrdering, DeficitRoundRobinOrdering])
def test_a_correction_from_elsewhere_is_no_credit(make: Any) -> None:
    """Sums of a gateway that has forgotten a tenant begin anew."""
    ordering = make(output_weight=0)
    lines = Lines(ordering)
    for _ in range(20):
        lines.add("a", 1000)
        lines.add("b", 1000)
    for _ in range(10):
        lines.start()
    ordering.given_elsewhere((0, "a"), -1e9)
    assert 8 <= [lines.start().tenant for _ in range(20)].count("a") <= 12 + (make is not VtcOrdering) * 8


def test_programs_are_no_tenants_of_other_gateways() -> None:
    assert not isinstance(LeastAttainedServiceOrdering(), PeerOrdering)


@pytest.mark.parametrize("make", SHARING)
def test_the_length_of_answers_counts(make: Any) -> None:
    """Of two tenants with equal prompts, one gets answers nine times as long: it starts fewer requests."""
    ordering = make(**({"burst_tokens": 0} if make is FairOrdering else {}))
    lines, lengths, started = Lines(ordering), {"long": 900, "short": 100}, Counter[str]()
    running: list[FakeRequest] = []
    for _ in range(900):
        for tenant in lengths:
            lines.add(tenant, 100)
    for _ in range(600):
        running.append(request := lines.start())
        started[request.tenant] += 1
        if len(running) > 8:
            old = running.pop(0)
            ordering.ended(replace(old, generated_tokens=lengths[old.tenant]))
    assert started["short"] / started["long"] == pytest.approx((100 + 2 * 900) / (100 + 2 * 100), rel=0.15)


@pytest.mark.parametrize("make", SHARING)
def test_a_tenant_below_its_part_of_the_requests_in_flight_is_known(make: Any) -> None:
    ordering = make({"quiet": 3.0})
    for i in range(8):
        ordering.started(FakeRequest(i, tenant="flood"), 0.0)
    for i in range(3):
        ordering.started(FakeRequest(10 + i, tenant="quiet"), 0.0)
    quiet, flood = FakeRequest(20, tenant="quiet"), FakeRequest(21, tenant="flood")
    assert ordering.is_below_share(quiet) and not ordering.is_below_share(flood)
    for i in range(8):
        ordering.ended(FakeRequest(i, tenant="flood"))
    assert ordering.is_below_share(flood) and not ordering.is_below_share(quiet)


@pytest.mark.parametrize("make", [VtcOrdering, DeficitRoundRobinOrdering])
@pytest.mark.parametrize("bad", [{"weights": {"a": 0}}, {"headroom": 0.9}, {"prompt_window": 0}, {"prompt_weight": 0}])
def test_arguments_are_checked(make: Any, bad: dict[str, Any]) -> None:
    with pytest.raises(HeadwayError, match=next(iter(bad))):
        make(**bad)
