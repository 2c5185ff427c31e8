"""Engines that run an ordering of Headway's are asked whether they do, and others are not used."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import serving
from driver_alone import ManualClock
from headway import serving as composition
from headway.catalog import engine, gpu, model
from headway.core.errors import HeadwayError
from headway.core.fleet import Pool
from headway.core.pacer import Pacer
from headway.gateway.scheduling.replica import LiveReplica
from headway.gateway.upstream.dialects import ADAPTERS, parse_load
from headway.gateway.upstream.errors import EngineError
from headway.policies.ordering.phases import PascalOrdering

PAGE = 'vllm:num_requests_running 1\nheadway:ordering_info{{engine="0",ordering="{}"}} {}\n'


@pytest.mark.parametrize(
    ("page", "ordering"),
    [
        (PAGE.format("pascal", "1.0"), "pascal"),
        (PAGE.format("edf(default_deadline_s=30)", 1), "edf(default_deadline_s=30)"),
        (PAGE.format("a:B(names={'x': [1]})", 1), "a:B(names={'x': [1]})"),
        (PAGE.format("pascal", "0.0") + PAGE.format("fcfs", "1.0"), "fcfs"),
        ("vllm:num_requests_running 1\n", None),
    ],
)
def test_ordering_is_read_from_the_engines_metrics(page: str, ordering: str | None) -> None:
    assert parse_load(ADAPTERS["vllm"], page).ordering == ordering
    assert parse_load(ADAPTERS["sglang"], page).ordering is None


@pytest.mark.parametrize(
    ("page", "share"),
    [
        ('headway:kv_blocks_demanded{engine="0"} 30.0\nheadway:kv_blocks_total{engine="0"} 120.0\n', 0.25),
        ("headway:kv_blocks_demanded 0\nheadway:kv_blocks_total 120\n", 0.0),
        ("headway:kv_blocks_demanded 5\nheadway:kv_blocks_total 0\n", None),
        ("vllm:num_requests_running 1\n", None),
    ],
)
def test_blocks_of_the_first_waiting_request_are_the_engines(page: str, share: float | None) -> None:
    replica = live_replica()
    replica.update_load(read_load(page + PAGE.format("pascal", 1), replica))
    assert replica.load.head_share == share
    assert replica.head_demand_blocks == (0 if share is None else round(share * 100))


class Client:
    """Answers with a page of metrics."""

    page = ""

    async def fetch(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        return 200, self.page.encode()


def live_replica() -> LiveReplica:
    """A replica of 100 blocks that must run `pascal`."""
    clock: Any = ManualClock()
    pool = Pool("p", model("qwen3-8b"), gpu("h100"), engine("vllm-0.15"))
    replica = LiveReplica(
        0,
        pool,
        "http://h:1",
        ADAPTERS["vllm"],
        100,
        PascalOrdering(),
        Pacer(),
        clock,
        5.0,
        engine_ordering="pascal",
    )
    replica.client = Client()  # type: ignore[assignment]
    return replica


def read_load(page: str, replica: LiveReplica) -> Any:
    replica.client.page = page  # type: ignore[attr-defined]
    return asyncio.run(replica.read_load(1.0))


def test_another_ordering_is_refused_at_first_and_logged_later(caplog: pytest.LogCaptureFixture) -> None:
    replica = live_replica()
    with pytest.raises(
        EngineError, match=r"^runs an order of its own, not the ordering pascal; expected vLLM with --sch"
    ):
        read_load("", replica)
    with pytest.raises(EngineError, match=r"^runs pascal\(quantum_tokens=9\), not the ordering pascal; expected"):
        read_load(PAGE.format("pascal(quantum_tokens=9)", 1), replica)
    assert read_load(PAGE.format("pascal", 1), replica).running == 1
    replica.has_served = True
    for _ in range(2):
        assert read_load(PAGE.format("fcfs", 1), replica).running == 1
    orderings = ("an order of its own", "pascal(quantum_tokens=9)", "fcfs")
    assert caplog.messages == [f"p/0 at http://h:1 runs {each}, not the ordering pascal" for each in orderings]


def declared(folder: Path, urls: list[str], ordering: Any = "pascal", **pool: Any) -> Path:
    """A fleet whose engines accept the ordering, as the file says."""
    name = ordering if isinstance(ordering, str) else ordering["name"]
    pool = {"engine": {"name": "vllm-0.15", "orderings": [name]}, **pool}
    return serving.fleet_file(folder, urls, pool=pool, policies={"ordering": ordering})


def test_plan_names_the_ordering_that_engines_must_run(tmp_path: Path) -> None:
    _, plan = composition.load(declared(tmp_path, ["http://h:1"], {"name": "pascal", "quantum_tokens": 9}))
    assert plan.engine_ordering == "pascal(quantum_tokens=9)" and plan.sends_priority
    _, plan = composition.load(declared(tmp_path, ["http://h:1"], "priority"))
    assert plan.engine_ordering == "" and plan.sends_priority


@pytest.mark.parametrize(
    ("ordering", "pool", "words"),
    [
        ("vtc", {}, "vtc orders the gateway's queue only"),
        ("pascal", {"engine": {"name": "sglang", "orderings": ["pascal"]}}, "supports no order but fcfs or priority"),
        ("shortest-remaining", {}, "only a simulation knows"),
    ],
)
def test_orderings_that_no_engine_runs_are_refused(
    tmp_path: Path, ordering: str, pool: dict[str, Any], words: str
) -> None:
    with pytest.raises(HeadwayError) as error:
        composition.load(declared(tmp_path, ["http://h:1"], ordering, **pool))
    assert words in str(error.value)


@pytest.mark.slow
def test_requests_go_to_engines_that_run_the_ordering(tmp_path: Path) -> None:
    right, wrong = serving.emulator("--ordering", "pascal", "--speed", "50"), serving.emulator()
    front = serving.gateway(declared(tmp_path, [wrong.url, right.url]))
    with serving.closing(right, wrong, front):
        serving.all_up(front, 1)
        front.wait_for("runs an order of its own, not the ordering pascal")
        page = serving.send(right, "/metrics").text()
        assert 'headway:kv_blocks_demanded{engine="0"} 0' in page and "headway:kv_blocks_total" in page
