"""The dashboard: access, and what a browser shows as the fleet changes."""

from __future__ import annotations

import json
import re
import threading
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import serving
from browser import Page, opened
from serving import chat, metric, send, until

pytest.importorskip("httptools")

KEY = {"authorization": "Bearer boss"}
ADMIN = sha256(b"boss").hexdigest()


# Who may see it.


def fleet(folder: Path, engines: list[serving.Process], **gateway: Any) -> Path:
    policies = {"routing": "least-loaded", "ordering": "priority", "ordering_at": "gateway", "window": 2}
    urls = [engine.url for engine in engines]
    return serving.fleet_file(folder, urls, policies=policies, gateway=gateway, slo={"e2e_s": 600.0})


@pytest.mark.parametrize(
    ("gateway", "page", "bare", "with_key"),
    [
        ({}, 404, 404, 404),
        ({"admin_keys": [ADMIN]}, 200, 401, 200),
        ({"admin_keys": [ADMIN], "dashboard": "off"}, 404, 404, 404),
        ({"dashboard": "open"}, 200, 200, 200),
    ],
)
def test_access_to_page_and_data(gateway: dict[str, Any], page: int, bare: int, with_key: int, tmp_path: Path) -> None:
    made = serving.gateway(serving.fleet_file(tmp_path, ["http://127.0.0.1:1"], gateway=gateway))
    with serving.closing(made):
        replies = [
            send(made, "/dashboard"),
            send(made, "/dashboard/data"),
            send(made, "/dashboard/data", headers=KEY),
        ]
        assert [reply.status for reply in replies] == [page, bare, with_key]
        texts = [reply.text() for reply in replies]
        if page == 200:
            assert "127.0.0.1" not in texts[0] and "qwen" not in texts[0], "the page itself has no data"
            assert "default-src 'none'" in replies[0].headers["content-security-policy"]
            assert "://" not in texts[0], "nothing comes from elsewhere"
            scripts = re.findall(r"<script>(.*?)</script>", texts[0], re.DOTALL)
            digests = {f"'sha256-{b64encode(sha256(each.encode()).digest()).decode()}'" for each in scripts}
            (allowed,) = re.findall("script-src ([^;]*);", replies[0].headers["content-security-policy"])
            assert digests == set(allowed.split()) and len(scripts) == 2 == texts[0].count("<script"), "no other script"
            assert "Copyright (c) 2022 Leon Sorokin" in scripts[0], "uPlot's licence comes with it"
        wrong = send(made, "/dashboard/data", headers={"authorization": "Bearer no"})
        assert (wrong.status == 200) == (bare == 200)
        wrong.close()


# In a browser.


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[serving.Process, list[serving.Process]]]:
    engines = [serving.emulator(), serving.emulator()]
    with serving.up(serving.gateway(fleet(tmp_path, engines, admin_keys=[ADMIN])), 2, *engines) as made:
        yield made, engines


def shown(page: Page) -> dict[str, Any]:
    """What the page shows of each replica, and in total."""
    return dict(
        page.value("""({
        replicas: Object.fromEntries([...document.querySelectorAll("#fleet tr")].map(row => [row.dataset.replica,
            [row.querySelector(".status").innerText.trim(), row.querySelector(".n").innerText.trim()]])),
        state: at("state").innerText, flight: at("flight")?.innerText, held: at("held")?.innerText,
        tiers: Object.fromEntries([...document.querySelectorAll("#tiers tr")].map(row =>
            [row.dataset.tier, row.querySelector(".ended").innerText])),
        decisions: [...document.querySelectorAll("#decisions code")].map(one => one.innerText),
        charts: Object.values(charts).filter(one => at("charts").contains(one.room))
            .map(one => one.chart.series.length - 1),
        slo: at("slo")?.innerText, cost: at("cost")?.innerText, policies: at("policies").innerText,
        troubles: Object.fromEntries([...document.querySelectorAll("#troubles li")].map(one =>
            [one.querySelector("strong").innerText, [one.children[0].innerText, one.children[2].innerText]])),
        late: !at("late").hidden, asks: !at("login").hidden,
    })""")
    )


def test_the_page_follows_the_data(running: tuple[serving.Process, list[serving.Process]], tmp_path: Path) -> None:
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
        data = send(front, "/dashboard/data", headers=KEY).json()
        seen = shown(page)
        assert seen["replicas"] == {r["name"]: [r["status"], str(r["in_flight"])] for r in data["replicas"]}
        assert sorted(flight for _, flight in seen["replicas"].values()) == ["1", "2"]
        assert seen["tiers"] == {"0": "2", "2": "1"} and seen["charts"] == [2, 2, 2] and not seen["late"]
        assert seen["slo"] == "100%" and seen["cost"] == f"${data['cost']['usd_per_hour']:.2f}"
        assert seen["policies"].startswith("routing least-loaded · ordering priority at the gateway")
        assert data["in_flight"] == 3 == sum(metric(engine, "vllm:num_requests_running") for engine in engines)
        assert {each["prefix_cache"]["state"] for each in data["replicas"]} == {"guess"}
        cells = "#fleet td[data-label='prefix cache'] .pill"
        assert page.value(f'[...document.querySelectorAll("{cells}")].map(e => e.textContent).join()') == "guess,guess"
        assert metric(front, "headway_requests_in_flight") == 3
        until(lambda: shown(page)["decisions"][:1] == ["s2"])

        engines[0].kill()
        until(lambda: shown(page)["replicas"]["pool/0"] == ["down", "0"])
        seen = shown(page)
        assert seen["state"] == "1 of 2 replicas up"
        until(lambda: shown(page)["troubles"].get("pool/0", [""])[0] == "down")
        _, why = shown(page)["troubles"]["pool/0"]
        assert why.startswith("gets no requests: ") and len(why) > 25, "the reason in words"
        assert seen["replicas"]["pool/1"] == ["up", "2"] and seen["held"] == "1", "its window is full"
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
        rows = "[...document.querySelectorAll('#slowest tr')].map(row => row.dataset.request)"
        slowest = send(front, "/dashboard/data", headers=KEY).json()["slowest"]
        assert page.value(rows) == [each["request"] for each in slowest][:10] and len(slowest) == 5
        assert {each["replica"] for each in slowest} <= {"pool/0", "pool/1"} and slowest[0]["ttft_s"] is None
        for width in (360, 768, 1280):
            page.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
            assert page.value("document.documentElement.scrollWidth") <= width
        for scheme in ("light", "dark"):
            page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            channels = page.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
            assert (sum(channels) > 600) == (scheme == "light")


def test_a_replica_in_trouble_is_not_only_as_predicted(
    running: tuple[serving.Process, list[serving.Process]], tmp_path: Path
) -> None:
    """Its medians may be as predicted while one term is off: the table says what the list of troubles does."""
    front, _ = running
    drift = [{"text": "time outside the engine's batch 31% slower than the profile since 12:08"}]
    with opened(f"{front.url}/dashboard", tmp_path) as page:
        cells = page.value(
            f"[[{json.dumps(drift)}, 1], [[], 0.8]].map(([drift, itl]) => "
            "predicted({ttft: 1, itl, correction: null, drift}).textContent)"
        )
    assert cells[0].startswith("as predicted") and cells[0].endswith("time outside the engine's batch 31% slower")
    assert cells[1].startswith("1.25× slower than predicted") and "first token as predicted" in cells[1]


def test_the_autopilot_has_a_panel(running: tuple[serving.Process, list[serving.Process]], tmp_path: Path) -> None:
    front, _ = running
    past = [{"time_s": 0, "change": "ordering: edf", "outcome": "rolled back", "reason": "it loses", "pairs": 2}]
    state = {
        "stage": "staged",
        "stopped": False,
        "change": "routing: headway",
        "version": "fleet.v2.yaml",
        "share": 0.25,
        "pairs": 2,
        "gain": -0.031,
        "reason": "",
        "past": past,
        "drift": ["fast/0: decode"],
        "note": "",
    }
    with opened(f"{front.url}/dashboard", tmp_path) as page:
        assert page.value("at('autopilot-card').hidden")
        said = page.value(
            f"autopilot({{autopilot: {json.dumps(state)}}}), [...at('autopilot').children].map(one => "
            "[...one.children].map(each => each.textContent))"
        )
    assert [each[:2] for each in said] == [
        ["staged", "routing: headway"],
        ["drift", "fast/0: decode"],
        ["rolled back", "ordering: edf"],
    ]
    assert said[0][2].startswith("fleet.v2.yaml serves 25% of the time: −3.1 points") and "2 pairs" in said[0][2]
    assert said[2][2] == "1970-01-01 00:00 UTC: it loses"
