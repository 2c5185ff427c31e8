"""The dashboard: who may see it, that its numbers are right, and that a browser shows them as they change."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

import serving
from browser import Page, opened
from serving import ask, chat, metric, until

pytest.importorskip("httptools")

from headway.control.decisions import Decision, Decisions
from headway.core.record import Outcome
from headway.gateway.telemetry.rolling_stats import NUM_SLOTS, SLOT_S, RollingStats, quantile

KEY = {"authorization": "Bearer boss"}
ADMIN = sha256(b"boss").hexdigest()


# What is counted.


def live(arrival_s: float, first_s: float, tokens: int, tier: int = 0) -> Any:
    return SimpleNamespace(tier=tier, arrival_s=arrival_s, first_token_s=first_s, generated_tokens=tokens)


def test_quantiles_are_right_to_two_percent() -> None:
    rng, board = Random(1), RollingStats(Decisions())
    times = [rng.lognormvariate(-1.0, 1.5) for _ in range(2_000)]
    for i, ttft_s in enumerate(times):
        end_s = 100 + 100 * i / len(times)
        board.ended(live(end_s - 0.5 - ttft_s, end_s - 0.5, 11), Outcome.FINISHED, end_s, False)
    (row,) = board.shown(200.0)["tiers"]
    times.sort()
    for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        true = times[math.ceil(share * len(times)) - 1]
        assert abs(math.log(row["ttft_s"][name] / true)) < 0.0201
    assert abs(row["tpot_s"]["p50"] / 0.05 - 1) < 0.0201 and row["num"] == 2_000
    assert quantile({}, 0.5) is None


def test_what_is_old_is_forgotten_and_memory_is_bounded() -> None:
    board = RollingStats(Decisions())
    for slot in range(10 * NUM_SLOTS):
        now = slot * SLOT_S
        board.ended(live(now - 1, now - 0.5, 2, tier=slot % 3), Outcome.FINISHED, now, False)
    shown = board.shown(now)
    assert sum(row["num"] for row in shown["tiers"]) == NUM_SLOTS == sum(shown["series"]["requests"])
    assert len(board._slots) <= NUM_SLOTS + 1
    assert board.shown(now + NUM_SLOTS * SLOT_S)["tiers"] == []


def test_outcomes_and_rates() -> None:
    board = RollingStats(Decisions())
    for i in range(60):
        outcome = (Outcome.FINISHED, Outcome.REJECTED, Outcome.CANCELLED)[i % 3]
        board.ended(live(i - 0.2, i - 0.1, 5), outcome, float(i), True)
    shown = board.shown(60.0)
    (row,) = shown["tiers"]
    assert (row["num"], row["failed"]) == (60, 20), "who leaves has not been failed"
    assert row["tpot_s"]["p50"] is None, "whole answers have no pace"
    assert shown["rates"]["requests_per_s"] == pytest.approx(1.0, rel=0.05)
    assert shown["rates"]["tokens_per_s"] == pytest.approx(5.0, rel=0.05)


def test_decisions_are_collected_while_somebody_looks() -> None:
    decisions = Decisions()
    board = RollingStats(decisions)
    assert not decisions.listeners
    board.looked_at(0.0)
    board.looked_at(1.0)
    assert len(decisions.listeners) == 1
    for i in range(200):
        decisions.listeners[0](Decision(float(i), "placed", str(i), "m", 0, "answering"))
    assert [one["request"] for one in board.shown(2.0)["decisions"]][:2] == ["199", "198"]
    assert len(board.shown(2.0)["decisions"]) < 100
    board.ended(live(0, 0, 1), Outcome.FINISHED, 100.0, False)
    assert not decisions.listeners


# Who may see it.


def fleet(folder: Path, engines: list[serving.Process], **gateway: Any) -> Path:
    policies = {"routing": "least-loaded", "ordering": "priority", "ordering_at": "gateway", "window": 2}
    return serving.fleet_file(folder, [engine.url for engine in engines], policies=policies, gateway=gateway)


@pytest.mark.parametrize(
    ("gateway", "page", "bare", "with_key"),
    [
        ({}, 404, 404, 404),
        ({"admin_keys": [ADMIN]}, 200, 401, 200),
        ({"admin_keys": [ADMIN], "dashboard": "off"}, 404, 404, 404),
        ({"dashboard": "open"}, 200, 200, 200),
    ],
)
def test_who_may_look(gateway: dict[str, Any], page: int, bare: int, with_key: int, tmp_path: Path) -> None:
    made = serving.gateway(serving.fleet_file(tmp_path, ["http://127.0.0.1:1"], gateway=gateway))
    with serving.closing(made):
        replies = [ask(made, "/dashboard"), ask(made, "/dashboard/data"), ask(made, "/dashboard/data", headers=KEY)]
        assert [reply.status for reply in replies] == [page, bare, with_key]
        texts = [reply.text() for reply in replies]
        if page == 200:
            assert "127.0.0.1" not in texts[0] and "qwen" not in texts[0], "the page alone tells nothing"
            assert "default-src 'none'" in replies[0].headers["content-security-policy"]
            assert "://" not in texts[0].replace("http://www.w3.org/2000/svg", ""), "nothing comes from elsewhere"
        wrong = ask(made, "/dashboard/data", headers={"authorization": "Bearer no"})
        assert (wrong.status == 200) == (bare == 200)
        wrong.close()


# In a browser.


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[serving.Process, list[serving.Process]]]:
    engines = [serving.emulator(), serving.emulator()]
    with serving.closing(*engines):
        made = serving.gateway(fleet(tmp_path, engines, admin_keys=[ADMIN]))
        with serving.closing(made):
            serving.all_up(made, 2)
            yield made, engines


def shown(page: Page) -> dict[str, Any]:
    """What the page says of each replica, and of all."""
    return dict(
        page.value("""({
        replicas: Object.fromEntries([...document.querySelectorAll("#fleet tr")].map(row => [row.dataset.replica,
            [row.querySelector(".status").innerText.trim(), row.querySelector(".n").innerText.trim()]])),
        state: at("state").innerText, flight: at("flight")?.innerText, held: at("held")?.innerText,
        tiers: Object.fromEntries([...document.querySelectorAll("#tiers tr")].map(row =>
            [row.dataset.tier, row.querySelector(".ended").innerText])),
        decisions: [...document.querySelectorAll("#decisions code")].map(one => one.innerText),
        charts: document.querySelectorAll("#charts svg path").length,
        late: !at("late").hidden, asks: !at("login").hidden,
    })""")
    )


def test_the_page_shows_what_the_json_says_as_it_changes(
    running: tuple[serving.Process, list[serving.Process]], tmp_path: Path
) -> None:
    front, engines = running
    for tier in (0, 0, 2):
        list(chat(front, max_tokens=5, stream=True, headers={"x-headway-tier": str(tier)}).events())
    with opened(f"{front.url}/dashboard", tmp_path) as page:
        until(lambda: shown(page)["asks"])
        for key in ("wrong", "boss"):
            page.value(f'at("key").value = "{key}"; at("login").requestSubmit()')
        until(lambda: shown(page)["state"] == "2 of 2 replicas up")
        streams = [
            chat(front, max_tokens=30_000, ignore_eos=True, stream=True, headers={"x-request-id": f"s{i}"})
            for i in range(3)
        ]
        for stream in streams:
            next(stream.events())
        until(lambda: shown(page)["flight"] == "3")
        data = ask(front, "/dashboard/data", headers=KEY).json()
        seen = shown(page)
        assert seen["replicas"] == {r["name"]: [r["status"], str(r["in_flight"])] for r in data["replicas"]}
        assert sorted(flight for _, flight in seen["replicas"].values()) == ["1", "2"]
        assert seen["tiers"] == {"0": "2", "2": "1"} and seen["charts"] == 6 and not seen["late"]
        assert data["in_flight"] == 3 == sum(metric(engine, "vllm:num_requests_running") for engine in engines)
        assert metric(front, "headway_requests_in_flight") == 3
        until(lambda: shown(page)["decisions"][:1] == ["s2"])

        engines[0].kill()
        until(lambda: shown(page)["replicas"]["pool/0"] == ["down", "0"])
        seen = shown(page)
        assert seen["state"] == "1 of 2 replicas up"
        assert seen["replicas"]["pool/1"] == ["up", "2"] and seen["held"] == "1", "its window is full: one more waits"
        front.kill()
        until(lambda: shown(page)["late"])
        for stream in streams:
            stream.close()


def test_the_page_fits_a_small_screen(running: tuple[serving.Process, list[serving.Process]], tmp_path: Path) -> None:
    front, _ = running
    asked = [threading.Thread(target=lambda: chat(front, max_tokens=3).json()) for _ in range(5)]
    for each in asked:
        each.start()
    for each in asked:
        each.join()
    with opened(f"{front.url}/dashboard", tmp_path) as page:
        until(lambda: shown(page)["asks"])
        page.value('at("key").value = "boss"; at("login").requestSubmit()')
        until(lambda: shown(page)["tiers"] == {"0": "5"})
        for width in (360, 768, 1280):
            page.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
            assert page.value("document.documentElement.scrollWidth") <= width
        for scheme in ("light", "dark"):
            page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            channels = page.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
            assert (sum(channels) > 600) == (scheme == "light")
