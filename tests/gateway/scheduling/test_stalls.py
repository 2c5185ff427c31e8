"""Engines and requests that are silent, on a clock that the test sets: who is suspected, and who is aborted."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

pytest.importorskip("httptools")

from driver_alone import Driven
from headway.catalog import engine, gpu, model
from headway.core.fleet import Pool
from headway.core.record import Outcome
from headway.gateway.scheduling import stalls
from headway.gateway.scheduling.in_flight import InFlightRequest, ReleaseReason
from headway.gateway.scheduling.replica import LiveReplica
from headway.gateway.scheduling.stalls import PERIOD_S, StallWatch
from headway.gateway.settings import Outliers, TimeLimits
from headway.gateway.upstream.dialects import Load
from headway.gateway.upstream.outliers import OutlierDetector
from headway.perf.engine_times import pool_times

LIMITS = TimeLimits()
PACE = pool_times(Pool("p", model("qwen3-8b"), gpu("h100"), engine("vllm-0.15")))


class Connection:
    """Notes why it was aborted."""

    why = ""
    is_reusable = False

    def abort(self, why: str) -> None:
        self.why = why


class Watched:
    """Replicas that a stall watch looks at."""

    def __init__(self, num_replicas: int = 2, is_warm: bool = True) -> None:
        self.driven = Driven(num_replicas)
        self.suspected: list[tuple[float, int, float]] = []
        self.now = 0.0
        detector = OutlierDetector(Outliers())
        self.watch = StallWatch(LIMITS, detector, self, {"p": PACE}, self.driven.driver.has_alternative)
        if is_warm:
            request = self.add_request(-1)
            request.live.generated_tokens, request.live.first_token_s = 1, 0.01
            self.watch.finished(request, 0.01)
            request.detach()
            self.driven.driver.requests.clear()

    def suspect(self, replica: LiveReplica, timeout_s: float) -> None:
        self.suspected.append((self.now, replica.id, timeout_s))

    def add_request(self, id: int) -> InFlightRequest:
        request = self.driven.arrive(id)
        request.connection = Connection()  # type: ignore[assignment]
        return request

    def run(self, seconds: float, progress: tuple[InFlightRequest, ...] = ()) -> None:
        """Let time pass; these requests get a token in each period."""
        end_s = self.now + seconds
        while self.now < end_s - 1e-9:
            self.now += PERIOD_S
            self.driven.clock.now = self.now
            for request in progress:
                request.live.generated_tokens += 1
            requests = list(self.driven.driver.requests.values())
            for _ in self.watch.check(requests, self.now):
                pass


@pytest.fixture(autouse=True, params=[1, 500])
def part(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many requests are compared at once makes no difference."""
    monkeypatch.setattr(stalls, "_PART", request.param)


def _why(request: InFlightRequest) -> str:
    connection: Any = request.connection
    return str(connection.why)


def test_an_engine_that_is_silent_to_all_of_its_requests_is_suspected() -> None:
    watched = Watched()
    requests = watched.add_request(0), watched.add_request(1)
    first = next(each for each in requests if each.replica is watched.driven.replicas[0])
    watched.run(3.0, (first,))
    assert not watched.suspected
    watched.run(0.5, (first,))
    ((when_s, replica, timeout_s),) = watched.suspected
    assert when_s <= 3.5 and replica == 1 and timeout_s == pytest.approx(1.0), "the canary's answer is due by 4.5 s"
    watched.run(6.0, (first,))
    assert [each[1] for each in watched.suspected] == [1, 1], "again after as long a time"


def test_a_pool_that_has_answered_nothing_has_longer() -> None:
    watched = Watched(is_warm=False)
    watched.add_request(0)
    watched.run(LIMITS.cold_s)
    assert not watched.suspected
    watched.run(1.0)
    assert watched.suspected


def test_long_prompts_have_as_long_as_the_model_expects() -> None:
    watched = Watched()
    request = watched.driven.arrive(0, prompt_tokens=15_000)
    expected_s = PACE.prefill_s(15_000)
    assert LIMITS.factor * expected_s > LIMITS.silence_s
    watched.run(LIMITS.factor * expected_s - 0.5)
    assert not watched.suspected and request.outcome is None
    watched.run(2.0)
    assert watched.suspected


def test_a_client_that_does_not_read_is_no_silence_of_the_engine() -> None:
    watched = Watched()
    request = watched.add_request(0)
    watched.run(1.0, (request,))
    request.answer.waits_for_client = True
    watched.run(100.0)
    assert not watched.suspected and not _why(request)


def test_requests_that_an_engine_has_forgotten_are_aborted() -> None:
    """It passes the one-token request, generates for none of the others, and another replica could serve them."""
    watched = Watched()
    request = watched.add_request(0)
    watched.run(6.0)
    assert not _why(request)
    watched.run(1.0)
    assert _why(request) == "sent no token for 6 s"


def test_one_stuck_request_is_aborted_later_and_not_while_the_engine_has_a_queue() -> None:
    watched = Watched(1)
    stuck, other = watched.add_request(0), watched.add_request(1)
    watched.driven.replicas[0].update_load(Load(running=1, waiting=3))
    watched.driven.replicas[0]._stale_s = 1e9
    watched.run(200.0, (other,))
    assert not _why(stuck)
    watched.driven.replicas[0].update_load(Load(running=2, waiting=0))
    watched.run(1.0, (other,))
    assert _why(stuck) == "sent no token for 60 s", "four times as long where there is no other replica"


def test_the_gateways_own_pauses_are_no_silence() -> None:
    """Silence is counted in checks."""
    watched = Watched()
    watched.add_request(0)
    watched.run(2.0)
    watched.now += 100.0
    watched.run(0.5)
    assert not watched.suspected


def test_ended_requests_are_forgotten() -> None:
    watched = Watched()
    request = watched.add_request(0)
    watched.run(1.0)
    request.end(Outcome.FINISHED)
    watched.driven.driver.requests.clear()
    watched.run(1.0)
    assert not watched.watch._stays and not watched.watch._silent_s


class Arrivals:
    """Requests to one replica that come all the time; `tokens` get what a stream has after so many seconds."""

    def __init__(self, watched: Watched, tokens: Callable[[float], int], every_s: float = 0.5) -> None:
        self._watched, self._tokens, self._every_s = watched, tokens, every_s
        self.requests: list[tuple[float, InFlightRequest]] = []

    def run(self, seconds: float) -> list[str]:
        """Let time pass; why requests were aborted in it."""
        watched, end_s = self._watched, self._watched.now + seconds
        while watched.now < end_s - 1e-9:
            if watched.now % self._every_s < PERIOD_S / 2:
                self.requests.append((watched.now, watched.add_request(len(self.requests))))
            for arrival_s, request in self.requests:
                live = request.live
                live.generated_tokens = self._tokens(watched.now + PERIOD_S - arrival_s)
                if live.generated_tokens and live.first_token_s != live.first_token_s:
                    live.first_token_s = watched.now
            watched.run(PERIOD_S)
        return [_why(request) for _, request in self.requests if _why(request)]


def test_streams_that_stall_are_aborted_though_new_ones_get_their_first_tokens() -> None:
    watched = Watched(1)
    watched.watch._has_alternative = lambda request, replica: True
    arrivals = Arrivals(watched, lambda age_s: min(int(age_s * 20), 5))
    assert not arrivals.run(3.0) and not watched.suspected
    aborted = arrivals.run(3.5)
    assert watched.suspected and watched.suspected[0][0] <= 6.0
    assert set(aborted) == {"sent no token for 4 s"}


@pytest.mark.parametrize("step_s", [0.02, 0.5, 2.5])
def test_a_slow_engine_that_goes_on_is_not_suspected(step_s: float) -> None:
    watched = Watched(1)
    arrivals = Arrivals(watched, lambda age_s: int(age_s / step_s))
    assert not arrivals.run(60.0) and not watched.suspected


@pytest.mark.parametrize("waiting", [0, 3])
def test_streams_may_pause_while_an_engine_computes_long_prompts_first(waiting: int) -> None:
    """By what the step model says of the prompts, or by the engine's own queue."""
    watched = Watched(1)
    (replica,) = watched.driven.replicas
    replica.update_load(Load(running=6, waiting=waiting))
    replica._stale_s = 1e9
    streams = [watched.add_request(id) for id in range(6)]
    watched.run(5.0, tuple(streams))
    expected_s = 0.0
    while expected_s < 0.6 and not waiting:
        watched.driven.arrive(100 + len(watched.driven.driver.requests), prompt_tokens=15_000)
        expected_s = PACE.prefill_s(replica.prefill_tokens_left)
    first = [watched.add_request(200 + id) for id in range(20)]
    for each in first:  # new requests get their first tokens, one a check
        each.live.first_token_s = watched.now
        watched.run(PERIOD_S, (each,))
    assert not watched.suspected and not any(map(_why, streams))


def test_two_streams_do_not_stand_for_their_engine() -> None:
    """They may wait for tools of their own; the engine generates for new ones."""
    watched = Watched(1)
    stuck = [watched.add_request(id) for id in range(2)]
    watched.run(2.0, tuple(stuck))
    for id in range(40):
        new = watched.add_request(100 + id)
        new.live.first_token_s = watched.now
        watched.run(PERIOD_S, (new,))
        watched.driven.driver.release(new, ReleaseReason.FINISHED)
    assert not watched.suspected and not any(map(_why, stuck))


def test_a_full_engine_is_not_suspected() -> None:
    """256 streams, each of which gets its tokens in bursts, seconds apart."""
    watched, random = Watched(1), Random(0)
    streams = [watched.add_request(id) for id in range(256)]
    for _ in range(240):
        watched.run(PERIOD_S, tuple(random.sample(streams, 8)))
    assert not watched.suspected and not any(map(_why, streams))


def test_a_check_of_many_requests_lets_other_work_be_done_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "_PART", 3)
    watched = Watched()
    requests = [watched.add_request(i) for i in range(8)]
    parts = watched.watch.check(requests, PERIOD_S)
    assert sum(1 for _ in parts) == 2, "after three and after six"
    parts = watched.watch.check(requests, 2 * PERIOD_S)
    next(parts)
    requests[7].detach()  # a request that has ended meanwhile is not compared
    assert sum(1 for _ in parts) == 3, "of the silent ones, too"
    assert not watched.suspected
