"""Small fleets, workloads and scenarios for tests of the simulator.

`pool`, `request` and `play` are for cases made by hand, `scenarios` draws everything at random.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st

from headway.control.observe import Scrape
from headway.control.policies import CascadeConfig, Policies
from headway.core.decision import Move, Release
from headway.core.fleet import (
    Combo,
    Engine,
    Fault,
    Fleet,
    Gpu,
    Handover,
    KvStoreConfig,
    Model,
    Network,
    Pool,
    Provisioning,
    RoleChange,
)
from headway.core.pacer import Pacer
from headway.core.policy import Admission, Migration, Ordering, Router, Scaler
from headway.core.record import Columns, Records
from headway.core.request import Request, Segment
from headway.core.view import AdmissionView, FleetView, PoolsView, RequestView
from headway.metrics.tokens import token_times
from headway.perf.speculation import step_model
from headway.policies import MIGRATIONS, ORDERINGS, ROUTERS, SCALERS
from headway.policies.cascade.thresholds import ThresholdsCascade
from headway.policies.ordering.deadlines import EdfOrdering
from headway.policies.ordering.fcfs import FcfsOrdering
from headway.policies.ordering.tiers import PriorityOrdering
from headway.policies.ordering.time_sharing import RoundRobinOrdering
from headway.policies.routing.round_robin import RoundRobinRouter
from headway.policies.scaling.combos import CombosScaler
from headway.sim import kernel
from headway.sim.cluster import Cluster, Step
from headway.sim.replica_resources import Line
from headway.workload.sources import ClosedLoop, RequestSource, TraceSource
from headway.workload.table import FIELDS, Prefix, Workload

IS_COMPILED = str(kernel.__file__).endswith(tuple(EXTENSION_SUFFIXES))
both_steps = pytest.mark.parametrize("step", ["stretch", "exact"])


def pairs(first: Iterable[Any], second: Iterable[Any], label: Callable[[Any], str] = str) -> list[Any]:
    """Parameters of a test of every pair: each one of `first` meets half of `second` in `make test`, and the other half
    in `make test-ci`."""
    others = list(second)
    return [
        pytest.param(one, other, id=f"{label(one)}-{label(other)}", marks=[pytest.mark.ci] if (i + j) % 2 else [])
        for i, one in enumerate(first)
        for j, other in enumerate(others)
    ]


def num_examples(usual: int) -> int:
    """How many examples a fuzzing test draws: HEADWAY_FUZZ_EXAMPLES, or as many as are quick.

    All with the compiled package, which takes a third of the time, and two fifths without: their code is the same.
    """
    return int(os.environ.get("HEADWAY_FUZZ_EXAMPLES", usual if IS_COMPILED else usual * 2 // 5))


# What exists.

MODEL = Model("llama", "", 32, 4096, 11008, 32, 32, 128, 32000, 100_000)
GPU = Gpu("gpu", 80e9, 2e12, {"bf16": 3e14}, 3e11, 2e10, 2.0, 400.0)
_ENGINE_FIELDS = set(Engine.__struct_fields__) - {"name", "version", "source"}


def pool(name: str = "main", model: Model = MODEL, **given: Any) -> Pool:
    """A pool; what is given are fields of its engine, or of the pool itself."""
    engine = {key: given.pop(key) for key in list(given) if key in _ENGINE_FIELDS}
    return Pool(name, model, GPU, Engine("engine", **engine), **given)


# How long an iteration takes. Each is a `line` for `simulate`: from a pool to its step times.


def seconds(step_s: float, per_prompt_token_s: float = 0.0) -> Callable[[Pool], Line]:
    """Iterations of one length, but for the prompt tokens in them."""

    def line(
        num_decode: int, context: int, chunks: Sequence[tuple[int, int]], *window: int
    ) -> tuple[float, float, None]:
        return step_s + per_prompt_token_s * sum(tokens for tokens, _ in chunks), 0.0, None

    return lambda pool: line


def sloped(pool: Pool) -> Line:
    """Every part of the batch costs something."""
    windowed = pool.model.sliding_window_tokens is not None

    def line(
        num_decode: int,
        context: int,
        chunks: Sequence[tuple[int, int]] = (),
        window_tokens: int = 0,
        num_growing: int = 0,
    ) -> tuple[float, float, None]:
        prompt = sum(tokens for tokens, _ in chunks)
        pairs = sum(tokens * (before + tokens / 2) for tokens, before in chunks)
        base = 0.005 + max(0.010, (num_decode + prompt) * 2e-5) + num_decode * 1e-5 + pairs * 1e-9
        if windowed:
            return base + window_tokens * 1e-7, num_growing * 1e-7, None
        return base + context * 1e-7, num_decode * 1e-7, None

    return line


def _measured(pool: Pool) -> Line:
    return step_model(pool.model, pool.gpu, pool.engine, pool.parallel).line


def kinked(pool: Pool, kink_tokens: int = 400) -> Line:
    """Contexts beyond `kink_tokens` cost more, so a line holds only up to there."""

    def line(
        num_decode: int, context: int, chunks: Sequence[tuple[int, int]] = (), *window: int
    ) -> tuple[float, float, int | None]:
        base = 0.004 + 1e-5 * (num_decode + sum(tokens for tokens, _ in chunks))
        if context > kink_tokens:
            return base + 1e-6 * (context - kink_tokens), num_decode * 1e-6, None
        return base, 0.0, (kink_tokens - context) // num_decode + 1 if num_decode else None

    return line


def launched(pool: Pool) -> Line:
    """Prompts whose launch takes as long as the iteration, or twice as long."""
    gpu = sloped(pool)

    def line(
        num_decode: int, context: int, chunks: Sequence[tuple[int, int]] = (), *window: int
    ) -> tuple[float, float, int | None]:
        a_s, b_s, iterations = gpu(num_decode, context, chunks, *window)
        if not chunks:
            return a_s, b_s, iterations
        return a_s, 0.03 if num_decode + sum(tokens for tokens, _ in chunks) > 60 else 0.012, 1

    return line


# What arrives.


def request(id: int, arrival_s: float = 0.0, prompt: int = 1, output: int = 1, **given: Any) -> Request:
    """A request of so many prompt and output tokens."""
    return Request(id, arrival_s, prompt, output, **given)


def workload(requests: Sequence[Request]) -> Workload:
    """A table of requests, in order of id."""
    models = tuple(dict.fromkeys(r.model for r in requests))
    regions = tuple(dict.fromkeys(r.region for r in requests))
    tenants = tuple(dict.fromkeys(r.tenant for r in requests))
    loras = tuple(dict.fromkeys(r.lora for r in requests))
    codes: dict[str, tuple[str, ...]] = {"model": models, "region": regions, "tenant": tenants, "lora": loras}
    columns: dict[str, Any] = {}
    for name in FIELDS[1:]:
        values = [getattr(r, name) for r in requests]
        if name in codes:
            columns[name] = np.array([codes[name].index(value) for value in values])
        elif name not in ("prefix", "quality", "lengths"):
            absent = float("nan") if name.endswith("_s") or name == "acceptance" else -1
            columns[name] = np.array([absent if value is None else value for value in values])
    for name, kind, absent in (("quality", "quality:", float("nan")), ("lengths", "output_tokens:", -1)):
        for model in dict.fromkeys(model for r in requests for model, _ in getattr(r, name)):
            columns[kind + model] = np.array([dict(getattr(r, name)).get(model, absent) for r in requests])
    segments = [segment for r in requests for segment in r.prefix]
    offsets = np.cumsum([0, *(len(r.prefix) for r in requests)])
    ids, tokens = [segment.id for segment in segments], [segment.tokens for segment in segments]
    prefix = Prefix(offsets.astype("i8"), np.array(ids, "i8"), np.array(tokens, "i4"))
    return Workload(columns, models, regions, prefix, tenants=tenants, loras=loras)


# A run.


@dataclass(frozen=True)
class Scenario:
    """All that a run is made of."""

    requests: tuple[Request, ...]
    pools: tuple[Pool, ...] = (pool(),)
    router: Callable[[], Router] = RoundRobinRouter
    ordering: Callable[[], Ordering] = FcfsOrdering
    ordering_at: Any = "replica"
    window: int | None = None
    faults: tuple[Fault, ...] = ()
    until_s: float | None = None
    scrape: Scrape = field(default_factory=Scrape)
    concurrency: int | None = None
    """Clients of a closed loop; None: requests come when they come."""
    line: Callable[[Pool], Line] | None = sloped
    """None: the step times of `perf`."""
    seed: int = 0
    migration: Callable[[], Migration] | None = None
    scaler: Callable[[], Scaler] | None = None
    combos: tuple[Combo, ...] = ()
    cascade: CascadeConfig | None = None
    admission: Callable[[], Admission] | None = None
    network: Network = field(default_factory=Network)
    provisioning: Provisioning | None = None
    roles: tuple[RoleChange, ...] = ()
    gpu_limits: tuple[tuple[str, str, int], ...] = ()
    kv_store: KvStoreConfig | None = None

    def source(self) -> RequestSource:
        """The requests, as a workload."""
        table = workload(self.requests)
        return TraceSource(table) if self.concurrency is None else ClosedLoop(table, self.concurrency, 0.01)

    def cluster(self, step: Step = "stretch") -> Cluster:
        """A fleet that is about to run it."""
        policies = Policies(
            self.router,
            self.ordering,
            self.ordering_at,
            self.window,
            migration=self.migration,
            admission=self.admission,
            cascade=self.cascade,
            scaler=self.scaler,
        )
        fleet = Fleet(self.pools, self.combos, self.network, self.provisioning, self.gpu_limits, self.kv_store)
        line = self.line or _measured
        return Cluster(fleet, self.source(), policies, self.seed, step, self.scrape, None, line, Pacer())

    def play(self, step: Step = "stretch") -> Records:
        """Run it."""
        return self.run(self.cluster(step))

    def run(self, cluster: Cluster) -> Records:
        """Run it on a cluster of its own."""
        return cluster.run(self.faults, self.until_s, self.roles)


def play(requests: Sequence[Request], *pools: Pool, step: Step = "stretch", **given: Any) -> Records:
    """Run requests on pools; what is given are fields of `Scenario`."""
    return Scenario(tuple(requests), pools or (pool(),), **given).play(step)


def assert_alike(one: Columns, other: Columns) -> None:
    """Two tables hold the same rows in the same order, to the last bit."""
    assert one.keys() == other.keys()
    for name, column in one.items():
        assert column.dtype == other[name].dtype, name
        assert np.array_equal(column, other[name], equal_nan=column.dtype.kind == "f"), name


def by_replica(stretches: Columns) -> Columns:
    """Stretches replica by replica, each in its own order."""
    order = np.argsort(stretches["replica"], kind="stable")
    return {name: column[order] for name, column in stretches.items()}


def assert_agree(scenario: Scenario) -> Records:
    """Both ways of stepping leave the same records."""
    stretch, exact = scenario.play("stretch"), scenario.play("exact")
    assert_alike(stretch.requests, exact.requests)
    assert_alike(stretch.segments, exact.segments)
    assert_alike(by_replica(stretch.stretches), by_replica(exact.stretches))
    assert_alike(stretch.moves, exact.moves)
    assert_alike(stretch.workload, exact.workload)
    assert stretch.replicas == exact.replicas
    assert stretch.end_s == exact.end_s
    return stretch


def times(records: Records, id: int = 0) -> list[float]:
    """The times of a request's tokens."""
    return token_times(records, [id])[id].tolist()  # type: ignore[no-any-return]


def moves(records: Records) -> list[dict[str, Any]]:
    """The rows of the table of moves."""
    columns = {name: column.tolist() for name, column in records.moves.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def by_request(requests: Columns) -> Columns:
    """The request table in order of id."""
    order = np.argsort(requests["request"], kind="stable")
    return {name: column[order] for name, column in requests.items()}


# Policies beside the registered ones.


class ByAge:
    """Tiers count less the longer a request waits: ranks move with time."""

    quantum: int | None = None
    preemptive: bool = True
    PERIOD_S = 0.75

    def rank(self, request: RequestView, now: float) -> tuple[int, float]:
        return request.tier * 3 - self._periods(request, now), request.arrival_s

    def next_change(self, request: RequestView, now: float) -> float:
        return request.arrival_s + (self._periods(request, now) + 1) * self.PERIOD_S

    def _periods(self, request: RequestView, now: float) -> int:
        """Whole periods since arrival, by the same arithmetic as the times of change."""
        n = int((now - request.arrival_s) / self.PERIOD_S)
        while request.arrival_s + (n + 1) * self.PERIOD_S <= now:
            n += 1
        while n > 0 and request.arrival_s + n * self.PERIOD_S > now:
            n -= 1
        return n


class Demoting:
    """Requests that have given 40 tokens go behind all others, and turns are short: ranks move with tokens."""

    quantum: int | None = 15
    preemptive: bool = True

    def rank(self, request: RequestView, now: float) -> tuple[bool, int, float]:
        return request.generated_tokens >= 40, request.turn, request.arrival_s

    def next_change_tokens(self, request: RequestView) -> int | None:
        return 40 - request.generated_tokens if request.generated_tokens < 40 else None


class Restless:
    """Requests go elsewhere all the time: copied live, or stopped for it."""

    def __init__(self, interval_s: float | None = 0.05, stage_blocks: int | None = 3, share: float = 0.3) -> None:
        self.interval_s = interval_s
        self._stage_blocks = stage_blocks
        self._share = share

    def moves(self, view: FleetView) -> list[Move]:
        chosen = []
        for replica in view.replicas:
            for request in sorted(replica.requests, key=lambda request: request.id):
                if view.random.random() < self._share:
                    target = view.random.choice(view.replicas).id
                    chosen.append(Move(request.id, target, self._stage_blocks))
        return chosen

    def at_phase(self, request: RequestView, view: FleetView) -> Move | None:
        paced = [replica for replica in view.replicas if replica.answers_on_pace]
        target = min(paced or view.replicas, key=lambda r: (r.queue_lengths[0], r.kv_blocks_used + r.kv_blocks_host))
        return Move(request.id, target.id, None if view.random.random() < 0.7 else 2)


class Patient:
    """Tier 3 waits until there is little to do, or for three seconds."""

    interval_s = 0.3

    def holds(self, request: RequestView) -> bool:
        return request.tier == 3

    def release(self, view: AdmissionView) -> list[Release]:
        calm = all(replica.num_in_flight < 3 for replica in view.replicas)
        late = [request for request in view.held if view.now - request.arrival_s > 3.0]
        chosen = list(view.held)[:2] if calm else late
        return [Release(request.id, 0 if request in late else None) for request in chosen]


class Breathing:
    """Replicas come and go."""

    interval_s = 0.2

    def scale(self, view: PoolsView) -> dict[str, int]:
        return {pool.name: view.random.randint(pool.min_replicas, min(pool.max_replicas, 4)) for pool in view.pools}


@dataclass(frozen=True)
class Made:
    """A maker of policies that says what it makes."""

    policy: Callable[..., Any]
    arguments: tuple[Any, ...] = ()

    def __call__(self) -> Any:
        return self.policy(*self.arguments)


ROUTER_MAKERS = tuple(ROUTERS.values())
ORDERING_MAKERS: tuple[Callable[[], Ordering], ...] = (
    *ORDERINGS.values(),
    Made(RoundRobinOrdering, (20,)),
    Made(EdfOrdering, (2.0, True)),
    Made(PriorityOrdering, (False,)),
    ByAge,
    Demoting,
)


# Scenarios at random.

_models = st.sampled_from((MODEL, MODEL, msgspec.structs.replace(MODEL, sliding_window_tokens=50)))
_pools = st.builds(
    pool,
    model=_models,
    replicas=st.sampled_from((1, 1, 2, 3)),
    kv_capacity_tokens=st.sampled_from((600, 700, 850, 1200, 5000, 100_000)),
    batching=st.sampled_from(("chunked", "chunked", "prefill-first", "whole-prompt", "request-level")),
    max_num_seqs=st.sampled_from((1, 3, 8, 40)),
    max_num_batched_tokens=st.sampled_from((40, 64, 200, 2048)),
    block_size_tokens=st.sampled_from((1, 4, 16)),
    watermark=st.sampled_from((0.0, 0.0, 0.01, 0.1)),
    prefix_caching=st.booleans(),
    preemption=st.sampled_from(("swap", "recompute")),
    host_memory_bytes=st.sampled_from((0.0, 1e8, 1e9, 1e9)),
    kv_offload_bytes=st.sampled_from((0.0, 0.0, 1e8, 4e8, 1e10)),
    kv_keep_s=st.sampled_from((0.0, 0.0, 0.5, 3.0)),
    kv_keep_share=st.sampled_from((0.1, 0.5, 1.0)),
    schedule_lag=st.sampled_from((0, 0, 1)),
    launch_overhead_s=st.sampled_from((0.0, 0.003, 0.02)),
    request_overhead_s=st.sampled_from((0.0, 0.0, 0.0, 0.0625)),
    tokenize_s_per_token=st.sampled_from((0.0, 0.0, 2e-4)),
    response_overhead_s=st.sampled_from((0.0, 0.0, 0.0, 0.03125)),
    max_num_waiting=st.sampled_from((None, None, 3)),
    region=st.sampled_from(("", "east", "west")),
    network_bytes_per_s=st.sampled_from((1e8, 2e9, 12.5e9)),
    start_s=st.sampled_from((0.0, 0.25, 1.5)),
    max_replicas=st.just(4),
)
_handovers = st.builds(
    Handover,
    mode=st.sampled_from(("bulk", "layerwise")),
    degree=st.sampled_from((1, 8)),
    stream_bytes_per_s=st.sampled_from((None, 1e8)),
    stream_overhead_s=st.sampled_from((0.0, 0.001)),
    landing=st.sampled_from(("gpu", "host")),
    first_token=st.sampled_from(("prefill", "decode", "sent")),
)


@st.composite
def _combos(draw: st.DrawFn, like: Pool) -> Combo:
    """Prefill and decode replicas of one model."""
    parts = [
        msgspec.structs.replace(
            draw(_pools),
            name=role,
            model=like.model,
            role=role,
            replicas=draw(st.integers(1, 2)),
            handover=draw(_handovers),
        )
        for role in ("prefill", "decode")
    ]
    goodput_rps = draw(st.sampled_from((None, 2.0, 20.0)))
    return Combo("combo", tuple(parts), draw(st.integers(1, 2)), max_replicas=3, goodput_rps=goodput_rps)


_migrations = st.one_of(
    st.none(),
    st.sampled_from(tuple(MIGRATIONS.values())),
    st.builds(
        lambda *given: Made(Restless, given),
        st.sampled_from((None, 0.05, 0.25)),
        st.sampled_from((None, 1, 3, 50)),
        st.sampled_from((0.05, 0.5)),
    ),
)
_scalers = st.sampled_from((None, None, Breathing, *SCALERS.values(), Made(CombosScaler, (0.2, 0.5, 1.5, 0.25, 0.125))))
_faults = st.builds(Fault, st.floats(0.0, 3.0), st.integers(0, 5), st.sampled_from((None, 0.25, 1.0, 1.0)))
_breaks = st.builds(
    Fault, st.floats(0.0, 3.0), st.integers(0, 5), st.sampled_from((None, 0.0, 0.125, 1.0)), st.integers(1, 3)
)
_role_changes = st.builds(
    RoleChange,
    st.floats(0.0, 3.0),
    st.integers(0, 5),
    st.sampled_from(("mixed", "prefill", "decode")),
    st.sampled_from((0.0, 0.0, 0.25, 1.5)),
)
_kv_stores = st.sampled_from(
    (
        None,
        None,
        KvStoreConfig(capacity_bytes=4e8, bytes_per_s=1e9, latency_s=0.0625),
        KvStoreConfig(capacity_bytes=1e11),
    )
)
_scrapes = st.sampled_from((Scrape(), Scrape(), Scrape(0.125, 0.0625, 0.2)))
_prompts = st.one_of(st.sampled_from((1, 16, 17, 100)), st.integers(1, 400))
_outputs = st.one_of(st.sampled_from((1, 2, 17)), st.integers(1, 150))
_SHARED_TOKENS = (33, 64, 5, 200)


@st.composite
def _request(draw: st.DrawFn, id: int, gap_s: float, before: Sequence[Request]) -> Request:
    """The next request; it may begin as others did, or take up what an earlier one said."""
    arrival_s = (before[-1].arrival_s if before else 0.0) + gap_s * draw(st.one_of(st.just(0.0), st.floats(0.0, 3.0)))
    prompt, output = draw(_prompts), draw(_outputs)
    prefix: tuple[Segment, ...] = ()
    shares = draw(st.sampled_from(("nothing", "nothing", "start", "session")))
    earlier = [r for r in before if r.output_id is not None and r.prompt_tokens < 300]
    if shares == "start":
        group = draw(st.integers(0, 3))
        tokens = min(_SHARED_TOKENS[group], prompt)
        prefix = (Segment(group if tokens == _SHARED_TOKENS[group] else 1000 + id, tokens),)
    elif shares == "session" and earlier:
        last = draw(st.sampled_from(earlier))
        assert last.output_id is not None
        prefix = (*last.prefix, Segment(last.output_id, last.output_tokens))
        prompt += last.prompt_tokens + last.output_tokens
    known = sum(segment.tokens for segment in prefix)
    if shares != "nothing" and known < prompt:
        prefix += (Segment(2000 + id, prompt - known),)
    return request(
        id,
        arrival_s,
        prompt,
        output,
        tier=draw(st.integers(0, 3)),
        reasoning_tokens=draw(st.one_of(st.just(0), st.integers(0, output))),
        session_id=draw(st.sampled_from((None, 1, 2))),
        prefix=prefix,
        output_id=3000 + id if prefix and draw(st.booleans()) else None,
        timeout_s=draw(st.one_of(st.none(), st.none(), st.floats(0.05, 3.0))),
        region=draw(st.sampled_from(("", "", "east", "west"))),
    )


@st.composite
def _requests(draw: st.DrawFn) -> tuple[Request, ...]:
    gap_s = draw(st.sampled_from((0.001, 0.02, 0.02, 0.1)))
    requests: list[Request] = []
    for id in range(draw(st.one_of(st.integers(1, 8), st.integers(16, 40), st.integers(24, 48)))):
        requests.append(draw(_request(id, gap_s, requests)))
    return tuple(requests)


def _coinciding(scenario: Scenario, step_s: float) -> Scenario:
    """The same with all times multiples of half an iteration, of one length: many things happen at once."""

    def rounded(time_s: float) -> float:
        return round(2 * time_s / step_s) * step_s / 2

    return replace(
        scenario,
        requests=tuple(
            msgspec.structs.replace(
                r,
                arrival_s=rounded(r.arrival_s),
                timeout_s=None if r.timeout_s is None else rounded(r.timeout_s),
            )
            for r in scenario.requests
        ),
        faults=tuple(msgspec.structs.replace(f, at_s=rounded(f.at_s)) for f in scenario.faults),
        roles=tuple(msgspec.structs.replace(change, at_s=rounded(change.at_s)) for change in scenario.roles),
        line=seconds(step_s),
    )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Anything that the simulator models, under pressure."""
    pools = [draw(_pools)]
    if draw(st.integers(0, 3)) == 3:
        pools.append(msgspec.structs.replace(draw(_pools), name="other", model=pools[0].model))
    combos = [draw(_combos(pools[0]))] if draw(st.integers(0, 2)) == 2 else []
    if combos and draw(st.booleans()):
        pools = []
    requests, cascade = draw(_requests()), None
    if pools and draw(st.integers(0, 3)) == 3:
        larger = msgspec.structs.replace(pools[0].model, name="larger")
        pools.append(msgspec.structs.replace(draw(_pools), name="larger", model=larger))
        cascade = CascadeConfig(
            "cascade",
            (MODEL.name, "larger"),
            Made(ThresholdsCascade, (50,)),
            draw(st.sampled_from((0.0, 0.25))),
            0.0,
            1.0,
            20.0,
        )
        requests = tuple(
            msgspec.structs.replace(
                r,
                quality=((MODEL.name, draw(st.floats(0, 100))), ("larger", 90.0)),
                lengths=(("larger", draw(_outputs)),) if draw(st.booleans()) else (),
            )
            for r in requests
        )
    num_replicas = sum(p.replicas for p in pools)
    num_replicas += sum(c.replicas * sum(part.replicas for part in c.parts) for c in combos)
    faults = draw(st.one_of(st.just([]), st.lists(_faults, max_size=3)))
    roles = []
    if combos:
        faults += draw(st.one_of(st.just([]), st.lists(_breaks, max_size=6)))
        roles = draw(st.one_of(st.just([]), st.lists(_role_changes, max_size=6)))
    scenario = Scenario(
        requests=requests,
        cascade=cascade,
        pools=tuple(pools),
        combos=tuple(combos),
        router=draw(st.sampled_from(ROUTER_MAKERS)),
        ordering=draw(st.sampled_from(ORDERING_MAKERS)),
        ordering_at=draw(st.sampled_from(("replica", "replica", "gateway", "both"))),
        window=draw(st.sampled_from((None, None, None, 2, 6, 20))),
        faults=tuple(msgspec.structs.replace(f, replica=f.replica % num_replicas) for f in faults),
        roles=tuple(msgspec.structs.replace(change, replica=change.replica % num_replicas) for change in roles),
        until_s=draw(st.sampled_from((None, None, None, 1.0))),
        scrape=draw(_scrapes),
        concurrency=draw(st.one_of(st.none(), st.none(), st.integers(1, 10))),
        line=draw(st.sampled_from((sloped, kinked, launched, launched, None))),
        seed=draw(st.integers(0, 3)),
        migration=draw(_migrations),
        admission=draw(st.sampled_from((None, None, Patient))),
        provisioning=draw(st.sampled_from((None, Provisioning(0.25, 0.5, 1.0)))),
        scaler=draw(_scalers),
        kv_store=draw(_kv_stores),
    )
    return _coinciding(scenario, draw(st.sampled_from((0.25, 0.03125)))) if draw(st.integers(0, 3)) == 3 else scenario
