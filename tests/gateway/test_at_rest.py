"""At rest, whatever happened: each admitted request was recorded once and settled once, and nothing is reserved."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("httptools")

import serving
from combo_fleets import pair_file
from counted_gateway import check_idle, gateway_before_held, run_steps
from gateway_in_process import Inside
from headway.core.record import Outcome
from headway.gateway.accounts.budgets import StoredAccount
from headway.gateway.accounts.store import StoredKey
from headway.gateway.scheduling.in_flight import InFlightRequest, ReleaseReason, State
from headway.limits.budgets import Budget
from keys import digest
from workers_in_process import hire

NUM_ENGINES, KEY = 4, "ann's"
NUM_DAYS, NUM_STEPS = 8, 60
STEPS = {"ask": 16, "word": 24, "end": 4, "refuse": 1, "reset": 1, "close": 1, "leave": 4, "expire": 2, "abandon": 1}
STEPS |= {"drain": 3, "move and end": 3, "settle": 4}
"""How often each step is taken, of 64."""


def _steps(seed: int) -> list[tuple[str, Any]]:
    random, steps = Random(seed), []
    for what in random.choices([*STEPS], [*STEPS.values()], k=NUM_STEPS):
        which = random.randrange(30) if what in ("leave", "expire") else random.randrange(NUM_ENGINES)
        steps.append((what, random.random() < 0.8 if what == "ask" else which))
    return steps


class _Books:
    """The ends of a gateway's requests, as telemetry and accounts are told of them."""

    def __init__(self, inside: Inside) -> None:
        gateway, self.account = inside.gateway, StoredAccount("key", Budget(tokens=1 << 40))
        assert gateway.charges is not None
        accounts = gateway.charges.accounts
        accounts._keys[digest(KEY)] = StoredKey(digest(KEY), "ann", "", self.account.budget)
        accounts._key_accounts[digest(KEY)] = self.account
        self.arrived: list[InFlightRequest] = []
        self.recorded: list[tuple[InFlightRequest, Outcome, int]] = []
        """(request, outcome, tokens of the prompt and the answer)."""
        self.settled: list[InFlightRequest] = []
        arrived, ended, settle = gateway.driver.arrived, gateway.telemetry.request_ended, gateway.admission.settle

        def note_arrival(request: InFlightRequest) -> None:
            self.arrived.append(request)
            arrived(request)

        def note_end(request: InFlightRequest, outcome: Outcome, now: float) -> None:
            self.recorded.append((request, outcome, request.live.prompt_tokens + request.live.generated_tokens))
            ended(request, outcome, now)

        def note_settling(request: InFlightRequest) -> None:
            self.settled.append(request)
            settle(request)

        gateway.driver.arrived = note_arrival  # type: ignore[method-assign]
        gateway.telemetry.request_ended = note_end  # type: ignore[method-assign]
        gateway.admission.settle = note_settling  # type: ignore[method-assign]

    def check(self) -> None:
        """Every request ended once, and the account has the tokens of those that an engine began."""
        assert sorted(map(id, self.arrived)) == sorted(id(each) for each, _, _ in self.recorded)
        assert sorted(map(id, self.arrived)) == sorted(map(id, self.settled))
        for request, outcome, _ in self.recorded:
            assert request.state is State.ENDED and request.outcome is outcome
            assert (request.reservation, request.connection, request.prefill_leg) == (None, None, None)
            assert request.budget_hold is None and request.move_target is None
        charged = sum(tokens for request, outcome, tokens in self.recorded if _has_cost(request, outcome))
        account = self.account
        assert (account.used_tokens, account.reserved_tokens) == (charged, 0)
        assert account.reserved_usd == pytest.approx(0.0, abs=1e-9)
        for each in (self.arrived, self.recorded, self.settled):
            each.clear()  # type: ignore[attr-defined]
        account.used_tokens = 0


def _has_cost(request: InFlightRequest, outcome: Outcome) -> bool:
    """Whether an engine began the request, and did not merely refuse it."""
    live = request.live
    return live.placed_s == live.placed_s and (outcome is not Outcome.REJECTED or live.generated_tokens > 0)


@pytest.fixture(scope="module", params=["one process", "two workers", "pairs", "pairs, two workers"])
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Inside, _Books]]:
    folder = tmp_path_factory.mktemp("fleet")

    def write(folder: Path, urls: list[str], **sections: Any) -> Path:
        store = {"store": str(folder / "keys.sqlite"), "refresh_s": 3600.0}
        sections["gateway"] |= {"api_keys": [digest(KEY)], "key_store": store}
        if "pairs" in request.param:
            return pair_file(folder, urls[::2], urls[1::2], 2, **sections)
        return serving.fleet_file(folder, urls, **sections)

    with gateway_before_held(folder, NUM_ENGINES, write) as made:
        workers = hire(made, 2) if "workers" in request.param else []
        made.post = partial(made.post, headers=[("authorization", f"Bearer {KEY}")])  # type: ignore[method-assign]
        assert made.gateway.charges is not None
        made.run(made.until(lambda: made.gateway.charges.accounts.is_up))  # type: ignore[union-attr]
        yield made, _Books(made)
        for worker in workers:
            made.run(worker.stop())


async def _turns(num: int) -> None:
    """Let the event loop turn."""
    for _ in range(num):
        await asyncio.sleep(0)


def _control_does(inside: Inside, what: str, which: int) -> bool:
    """Steps that neither a client nor an engine takes. Whether it is such a step."""
    gateway, driver = inside.gateway, inside.gateway.driver
    replica = gateway.replicas[which % NUM_ENGINES]
    if what == "expire" and driver.requests:
        request = list(driver.requests.values())[which % len(driver.requests)]
        driver.release(request, ReleaseReason.CANCELLED)
    elif what == "abandon":
        driver.fail_over(replica)
    elif what in ("drain", "move and end"):
        driver.drain(replica, True)
        driver.drain(replica, False)
        for request in list(driver.requests.values()) if what == "move and end" else ():
            if request.state is State.MOVING:
                driver.release(request, ReleaseReason.CANCELLED)
    return what in ("expire", "abandon", "drain", "move and end")


def test_each_request_is_recorded_and_settled_once_and_nothing_stays_reserved(kept: tuple[Inside, _Books]) -> None:
    inside, books = kept
    for seed in range(NUM_DAYS):
        inside.run(run_steps(inside, _steps(seed), lambda replica, here: "", partial(_control_does, inside)))
        inside.run(_turns(100))  # the last messages of workers
        check_idle(inside)
        books.check()
