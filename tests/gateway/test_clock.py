"""Deadlines: many of them on one timer, and none kept of requests that are over."""

from __future__ import annotations

from types import SimpleNamespace

from driver_alone import ManualClock
from headway.gateway.clock import Deadlines


class _Requests:
    """Requests with deadlines on one clock."""

    def __init__(self) -> None:
        self.clock, self.running = ManualClock(), set[int]()
        self.expired: list[tuple[float, str]] = []
        self.deadlines = Deadlines(self.clock, self.running)

    def add(self, number: int, time_s: float) -> None:
        self.running.add(number)
        self.deadlines.add(
            time_s, lambda now, each: self.expired.append((now, f"request {each.id}")), SimpleNamespace(id=number)
        )


def test_actions_are_called_in_order_with_the_times_for_which_they_were_set() -> None:
    requests = _Requests()
    for number, time_s in enumerate((5.0, 2.0, 9.0, 2.0)):
        requests.add(number, time_s)
    requests.clock.advance(2.5)
    assert requests.expired == [(2.0, "request 1"), (2.0, "request 3")]
    requests.clock.advance(20.0)
    requests.clock.advance(20.0)
    assert requests.expired[2:] == [(5.0, "request 0"), (9.0, "request 2")]


def test_a_request_that_is_over_has_no_deadline() -> None:
    requests = _Requests()
    for number in range(3):
        requests.add(number, 1.0 + number)
    requests.running -= {0, 1}
    for now in (1.0, 2.0, 3.0):
        requests.clock.advance(now)
    assert requests.expired == [(3.0, "request 2")]


def test_an_action_may_add_deadlines() -> None:
    requests = _Requests()
    requests.running.add(0)
    requests.deadlines.add(1.0, lambda now, _: requests.add(1, now + 1.0), SimpleNamespace(id=0))
    for now in (1.0, 2.0):
        requests.clock.advance(now)
    assert requests.expired == [(2.0, "request 1")]


def test_requests_that_are_over_take_no_memory_and_no_timers() -> None:
    requests = _Requests()
    for number in range(10_000):
        requests.add(number, 600.0 + number / 1000)
        requests.running.discard(number - 10)
    assert len(requests.deadlines) < 200 and requests.clock.num_timers == 1
