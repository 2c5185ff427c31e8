"""The states of a request in flight: a driver that anything happens to keeps to the table of transitions."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("httptools")

from driver_alone import MODEL, Driven
from headway import gateway
from headway.control.live import DECODING, Live
from headway.control.policies import CascadeConfig
from headway.core.view import CascadeView, RequestView
from headway.gateway.scheduling.in_flight import (
    TRANSITIONS,
    IllegalTransitionError,
    InFlightRequest,
    ReleaseReason,
    State,
)

ENDS = [ReleaseReason.FINISHED, ReleaseReason.REFUSED, ReleaseReason.CANCELLED]
FAILURES = [ReleaseReason.FAILED, ReleaseReason.FAILED_BEFORE_FETCH, ReleaseReason.EXHAUSTED]
PREFILLS = [ReleaseReason.PREFILLED, ReleaseReason.PREFILL_NOT_STORED, ReleaseReason.PREFILL_FAILED]
ABORTED = [*ENDS, ReleaseReason.MOVED]
REASONS: dict[State, list[ReleaseReason]] = {
    State.HELD: [ReleaseReason.CANCELLED],
    State.PLACED: [*ENDS, *FAILURES, ReleaseReason.PREFILL_FAILED],
    State.HANDING_OVER: [*ENDS, *PREFILLS, ReleaseReason.FAILED],
    State.SENT: [*ENDS, *FAILURES],
    State.STREAMING: [*ENDS, *FAILURES],
    State.MOVING: ABORTED,
    State.PAUSED: ABORTED,
    State.SCORED: [ReleaseReason.CANCELLED],
    State.ENDED: ENDS,
}
"""Why a relay may release a request, by the state in which it is."""


class _Threshold:
    """A cascade that accepts good answers."""

    def enter(self, request: RequestView, view: CascadeView) -> int:
        return 0

    def accept(self, request: RequestView, score: float, view: CascadeView) -> bool:
        return score >= 50


class _Walk:
    """One driver, to which anything happens in any order. With `is_cascade`, requests are for two models in turn."""

    def __init__(self, seed: int, is_cascade: bool = False) -> None:
        self.random, self.is_cascade = Random(seed), is_cascade
        self.requests: list[InFlightRequest] = []
        self.is_combo = seed % 2 == 0
        second = "mixed" if is_cascade else "decode"  # of a cascade's other model
        roles: Any = ("prefill", second, "decode") if self.is_combo else ()
        policies = {} if self.is_combo else {"window": 1 + seed % 3, "preempt_every_s": 1.0}
        if is_cascade:
            models = (MODEL, "llama-3.1-8b")
            policies |= {"models": models, "cascade": CascadeConfig("cascade", models, _Threshold, 0.1)}
        self.driven = Driven(3, roles, **policies)
        self.is_pair = self.is_combo and (seed % 4 == 0 or seed % 8 == 2)
        if self.is_combo and seed % 4 == 0:
            for each in (*self.driven.replicas, *self.driven.driver.control.services[0].members):
                each.is_single_phase = True
        elif self.is_pair:
            self.driven.driver.roster.place_pairs_at_once()
        for replica in self.driven.replicas:
            replica.client = SimpleNamespace(release=lambda connection: None)  # type: ignore[assignment]

    def step(self) -> None:
        """Do one thing."""
        driver, random = self.driven.driver, self.random
        choice = random.randrange(12)
        replica = random.choice(self.driven.replicas)
        present = list(self.driven.driver.requests.values())
        if not present or (choice < 2 and len(present) < 8):
            model = "cascade" if self.is_cascade else MODEL
            self.requests.append(self.driven.arrive(len(self.requests), model=model))
        elif choice == 2:
            (driver.roster.replica_down if random.random() < 0.5 else driver.roster.replica_up)(replica)
        elif choice == 3 and random.random() < 0.2:
            driver.fail_over(replica)
        elif choice == 4 and random.random() < 0.2:
            self.driven.clock.advance(self.driven.clock.now + random.choice((0.1, 6.0)))
        else:
            placed = [request for request in present if request.state is not State.HELD]
            self._of_request(random.choice(placed or present), choice)

    def _of_request(self, request: InFlightRequest, choice: int) -> None:
        driver, state = self.driven.driver, request.state
        if state is State.PLACED and choice < 9:
            request.connection = SimpleNamespace(abort=lambda why: None)  # type: ignore[assignment]
            request.send()
        elif state in (State.HANDING_OVER, State.SENT, State.STREAMING) and choice < 7:
            assert request.reservation is not None
            request.reservation.count_tokens(1)
            request.live.generated_tokens += 1
            request.live.stage = DECODING
            request.begin_answer()
        elif request.prefill_leg is not None and choice < 10:
            if choice < 9:
                driver.prefill_leg_done(request)
            else:
                driver.release(request, ReleaseReason.PREFILL_LEG_FAILED)
        elif state is State.SCORED and choice < 10:
            driver.scored(request, self.random.choice((20.0, 80.0, None)))
        elif state is State.STREAMING and choice == 8:
            replicas = [each for each in self.driven.replicas if each.model == request.live.model]
            driver.move(request.live, self.random.choice(replicas).id, None, driver.now)
        elif state is State.STREAMING and choice == 9 and not self.is_combo:
            driver.pause(request.live, driver.now)
        elif state is State.HANDING_OVER and choice == 7 and not self.is_pair:
            for decoder in self.driven.replicas[1:]:
                driver.roster.replica_down(decoder)
            driver.release(request, self.random.choice(PREFILLS))
        else:
            reasons = [each for each in REASONS[state] if not (self.is_pair and each in PREFILLS)]
            driver.release(request, self.random.choice(reasons))


def test_whatever_happens_a_request_keeps_to_the_table_and_each_transition_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, enter = set[tuple[State, State]](), InFlightRequest.enter

    def noted(request: InFlightRequest, state: State) -> None:
        seen.add((request.state, state))
        enter(request, state)

    monkeypatch.setattr(InFlightRequest, "enter", noted)
    for seed in range(56):
        walk = _Walk(seed, is_cascade=seed >= 32)
        for _ in range(200):
            walk.step()
            for request in walk.requests:
                held = request.reservation, request.connection, request.prefill_leg
                assert request.state is not State.ENDED or held == (None, None, None)
        for request in walk.requests:
            walk.driven.driver.drop(request)
            assert request.state is State.ENDED
        assert not walk.driven.driver.requests and walk.driven.num_in_flight == [0, 0, 0]
    assert seen == {(before, after) for before, follows in TRANSITIONS.items() for after in follows}


@pytest.mark.parametrize("before", State)
@pytest.mark.parametrize("after", State)
def test_a_state_is_entered_if_the_table_allows_it_and_refused_otherwise(before: State, after: State) -> None:
    request = InFlightRequest(Live(0, 0.0, 1, 1))
    request.state = before
    if after in TRANSITIONS[before]:
        request.enter(after)
        assert request.state is after
    else:
        with pytest.raises(IllegalTransitionError, match=f"{after.name} does not follow {before.name}"):
            request.enter(after)
        assert request.state is before


def test_every_state_leads_to_the_end_and_nothing_follows_it() -> None:
    assert set(TRANSITIONS) == set(State) and not TRANSITIONS[State.ENDED]
    assert all(State.ENDED in follows for state, follows in TRANSITIONS.items() if state is not State.ENDED)


def test_the_state_is_written_in_one_place() -> None:
    written = re.compile(r"\.state\s*=[^=]")
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted(Path(gateway.__file__).parent.rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if written.search(line)
    ]
    assert [each for each in found if "in_flight" in each or "request" in each] == ["in_flight.py: self.state = state"]
