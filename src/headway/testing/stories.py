"""Random requests, fleets and pools for policy tests: plain values for `strict_views`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any

from headway.core.record import Ended, Outcome
from headway.core.request import Phase, Segment
from headway.core.view import REPLICA_FIELDS, OracleReplicaView

_REGIONS = ("", "east", "west")
_TENANTS = ("", "acme", "globex")
_LORAS = ("sql", "legal", "chat")
_POOLS = ("main", "batch")


def draw_request(rng: Random, id: int, now: float) -> dict[str, Any]:
    """A request with some tokens generated and more to come; each optional value is present or None."""
    arrival_s = now - rng.choice((0.0, rng.expovariate(0.1)))
    generated = rng.choice((0, 0, rng.randrange(3000)))
    output = generated + rng.randrange(1, 3000)
    reasoning = rng.choice((0, min(generated + rng.randrange(60), output), rng.randrange(output + 1)))
    return {
        "id": id,
        "arrival_s": arrival_s,
        "tier_since_s": arrival_s,
        "prompt_tokens": rng.choice((1, rng.randrange(1, 100_000))),
        "model": "",
        "tier": rng.randrange(4),
        "region": rng.choice(_REGIONS),
        "tenant": rng.choice(_TENANTS),
        "lora": Random(id).choice(("", *_LORAS)),
        "session_id": rng.choice((None, rng.randrange(12))),
        "prefix": tuple(Segment(rng.randrange(6), rng.randrange(1, 900)) for _ in range(rng.randrange(4))),
        "slo_ttft_s": rng.choice((None, rng.uniform(0.1, 5))),
        "slo_tpot_s": rng.choice((None, rng.uniform(0.01, 1))),
        "slo_e2e_s": rng.choice((None, rng.uniform(1, 300))),
        "deadline_s": rng.choice((None, arrival_s + rng.uniform(-1, 300))),
        **progress(generated, reasoning),
        "turn": rng.choice((0, rng.randrange(100_000))),
        "attempt": rng.randrange(3),
        "replica": -1,
        "output_tokens": output,
        "reasoning_tokens": reasoning,
        "quality": rng.choice(((), (("m", rng.uniform(0, 100)), ("n", rng.uniform(0, 100))))),
    }


def progress(generated: int, reasoning: int) -> dict[str, Any]:
    """The attributes of a request after `generated` output tokens, of which the first `reasoning` are reasoning."""
    return {
        "generated_tokens": generated,
        "answer_tokens": max(generated - reasoning, 0),
        "phase": Phase.REASONING if generated < reasoning else Phase.ANSWERING,
    }


def draw_placed(rng: Random, request: dict[str, Any], replica: int) -> dict[str, Any]:
    is_waiting = rng.random() < 0.5
    has_kv = not is_waiting or rng.random() < 0.5
    flags = {"is_waiting": is_waiting, "is_running": not is_waiting and rng.random() < 0.7, "has_kv": has_kv}
    return {**request, **flags, "is_moving": rng.random() < 0.1, "replica": replica}


@dataclass(frozen=True)
class LinearTimes:
    """`core.view.EngineTimes` that are linear in tokens and sequences."""

    token_s: float
    base_s: float
    sequence_s: float
    context_token_s: float

    def prefill_s(self, tokens: int, /) -> float:
        return self.base_s + tokens * self.token_s

    def step_s(self, num_decoding: int, context_tokens: int, /) -> float:
        return self.base_s + num_decoding * self.sequence_s + context_tokens * self.context_token_s


_TIMES = (LinearTimes(2e-5, 0.008, 5e-5, 4e-8), LinearTimes(1e-4, 0.02, 1e-4, 1.5e-7))
"""Times of a fast and of a slow engine."""
_HUGE = 10**15
_LARGEST_LOAD = {"idle": 0, "equal": 0, "ordinary": 400, "huge": _HUGE}


def draw_replica(
    rng: Random, id: int, mood: str, placed: Sequence[dict[str, Any]] = (), drains: float = 0.0
) -> dict[str, Any]:
    """A replica that is `idle`, `equal` to all others, `ordinary`, or reports `huge` or missing loads."""
    most = _LARGEST_LOAD[mood]
    level = 7 if mood == "equal" else 0
    kv_blocks_total = rng.choice((0, 1, _HUGE)) if mood == "huge" else 10_000
    loads = {
        name: level + rng.randrange(most * scale + 1)
        for name, scale in (
            ("num_in_flight", 1),
            ("num_waiting", 1),
            ("num_running", 1),
            ("prefill_tokens_left", 200),
            ("tokens_generated", 200),
            ("output_tokens_left", 200),
            ("kv_blocks_host", 20),
            ("head_demand_blocks", 1),
            ("num_arriving", 1),
        )
    }
    identity = {"id": id, "pool": _POOLS[id // 3 % 2], "model": "", "gpu": "", "region": _REGIONS[id % 3]}
    place: dict[str, Any] = {"role": rng.choice(("mixed", "prefill", "decode")), "combo": rng.randrange(4)}
    place["goodput_rps"] = rng.choice((None, 0.0, rng.uniform(0.1, 50)))
    blocks = {"kv_blocks_used": rng.randrange(kv_blocks_total + 1) if most else level, "block_size_tokens": 16}
    first = rng.randrange(loads["num_in_flight"] + 1)
    queues = rng.choice(((loads["num_in_flight"],), (first, loads["num_in_flight"] - first)))
    return _with_others(
        id,
        {
            **identity,
            **place,
            **loads,
            **blocks,
            "max_num_seqs": 256,
            "queue_lengths": queues,
            "kv_blocks_total": kv_blocks_total,
            "num_by_tier": {tier: rng.randrange(most + 1) for tier in rng.choice(((), (0,), (0, 2)))},
            **_draw_cache(Random(id), loads["prefill_tokens_left"]),
            "is_single_phase": Random(-id).random() < 0.2,
            "times": Random(id).choice((None, *_TIMES)),
            "latency_s": 0.05,
            "is_shared": Random(f"{id}/shared").random() < 0.2,
            "answers_on_pace": mood == "equal" or rng.random() < 0.7,
            "is_draining": rng.random() < drains,
            "requests": [draw_placed(rng, request, id) for request in placed],
            **_draw_loras(Random(id)),
            "paused": _draw_paused(Random(f"{id}/{mood}/paused"), id),
        },
    )


def _with_others(id: int, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a replica, completed with arbitrary values of the right types for the other fields of its view."""
    drawn = {"bool": (False, True), "int": (0, 1, 400), "float": (0.0, 0.5, 30.0)}
    others = {name: getattr(OracleReplicaView, name).fget for name in REPLICA_FIELDS - values.keys()}
    choices = {name: drawn.get(read.__annotations__["return"], (None,)) for name, read in others.items()}
    return values | {name: Random(f"{id}/{name}").choice(choice) for name, choice in choices.items()}


def _draw_paused(rng: Random, replica: int) -> list[dict[str, Any]]:
    return [draw_placed(rng, draw_request(rng, -1 - i, 0.0), replica) for i in range(rng.choice((0, 0, 2)))]


def _draw_cache(rng: Random, prefill_tokens_left: int) -> dict[str, Any]:
    """(share of any request that the replica has cached, share that it can load in addition). Sometimes all or nothing
    is cached."""
    cached = rng.choice((0.0, rng.random(), 1.0))
    shares = {"cached_tokens": cached, "loadable_tokens": rng.choice((0.0, 1.0 - cached)), "kv_transfer_s": 1e-5}
    return {**shares, "expected_cached_tokens": rng.randrange(prefill_tokens_left + 1)}


def _draw_loras(rng: Random) -> dict[str, Any]:
    """Slots for LoRA adapters. No slot, some slots or all slots are in use; engines may report more adapters than
    slots."""
    loras = rng.sample(_LORAS, rng.randrange(3))
    waiting = [name for name in _LORAS if name not in loras and rng.random() < 0.5]
    return {"loras": frozenset(loras), "loras_waiting": frozenset(waiting), "max_loras": rng.choice((0, 1, 2, 4))}


@dataclass(frozen=True)
class FleetStep:
    """One step: an ended request to learn from, then a request to decide on."""

    now: float
    request: dict[str, Any]
    replicas: list[dict[str, Any]]
    ended: Ended | None


@lru_cache(maxsize=48)  # every check of every policy plays the same few stories
def draw_story(seed: int, num_steps: int = 60, drains: float = 0.0) -> tuple[FleetStep, ...]:
    """A short run in which requests arrive, and replicas vanish and return. Sometimes there is only one replica.

    A replica drains with probability `drains`.
    """
    rng = Random(seed)
    steps = []
    now = 0.0
    for i in range(num_steps):
        if i % 6 == 0:
            num_replicas = rng.choice((1, 2, 3, 8, 20))
            ids = rng.sample(range(24), num_replicas)
            mood = rng.choice(tuple(_LARGEST_LOAD))
            present = [draw_request(rng, num_steps + i + k, now) for k in range(rng.choice((1, 6)))]
        now += rng.choice((0.0, rng.expovariate(1.0)))
        homes = [rng.choice(ids) for _ in present]
        placed = {id: [one for one, home in zip(present, homes, strict=True) if home == id] for id in ids}
        replicas = [draw_replica(rng, id, mood, placed[id], drains) for id in ids]
        ended = draw_ended(rng, i, now) if rng.random() < 0.4 else None
        steps.append(FleetStep(now, draw_request(rng, i, now), replicas, ended))
    return tuple(steps)


@lru_cache(maxsize=48)
def draw_migration_story(seed: int, num_steps: int = 60) -> tuple[FleetStep, ...]:
    """Like `draw_story`, with draining replicas. The request of each step is at a replica, and its reasoning ends
    now."""
    story = draw_story.__wrapped__(seed, num_steps, drains=0.15)  # a separate copy, which is changed
    return tuple(_with_phase_over(Random(seed), step) for step in story)


def _with_phase_over(rng: Random, step: FleetStep) -> FleetStep:
    chosen = rng.choice([one for replica in step.replicas for one in replica["requests"]])
    reasoning = max(chosen["generated_tokens"], 1)
    chosen |= {**progress(reasoning, reasoning), "reasoning_tokens": reasoning, "is_moving": False}
    chosen["output_tokens"] = max(chosen["output_tokens"], reasoning + 1)
    return replace(step, request=chosen)


@dataclass(frozen=True)
class AdmissionStep:
    now: float
    arriving: list[dict[str, Any]]
    cancelled_share: float
    """Share of the held requests that are cancelled beforehand."""
    replicas: list[dict[str, Any]]
    ended: Ended | None


def draw_admission_story(seed: int, num_steps: int = 40) -> list[AdmissionStep]:
    """Several hours in which requests of all tiers arrive, and replicas are idle, full or down."""
    rng = Random(seed)
    steps = []
    now = 0.0
    for i in range(num_steps):
        now += rng.choice((1.0, 60.0, rng.expovariate(1e-4)))
        mood = rng.choice(tuple(_LARGEST_LOAD))
        arriving = [draw_request(rng, 10 * i + k, now) for k in range(rng.choice((0, 1, 6)))]
        for request in arriving:
            request |= {
                "arrival_s": now,
                "tier_since_s": now,
                "deadline_s": rng.choice((None, now + rng.expovariate(1e-4))),
            }
        replicas = [draw_replica(rng, id, mood, drains=0.15) for id in range(rng.choice((0, 1, 4)))]
        ended = draw_ended(rng, i, now) if rng.random() < 0.4 else None
        steps.append(AdmissionStep(now, arriving, rng.choice((0.0, 0.0, 0.3)), replicas, ended))
    return steps


@dataclass(frozen=True)
class CascadeStep:
    """One moment of a cascade policy: a request that arrives, and the answer of a stage."""

    now: float
    request: dict[str, Any]
    stages: dict[str, list[dict[str, Any]]]
    stage: int
    """Index of the stage whose answer was judged; never the last stage."""
    score: float
    ended: Ended | None


def draw_cascade_story(seed: int, num_steps: int = 30) -> list[CascadeStep]:
    """Two to four models, idle, busy or down, and answers of any score."""
    rng = Random(seed)
    models = ("m", "n", "o", "p")[: rng.choice((2, 3, 4))]
    steps = []
    now = 0.0
    for i in range(num_steps):
        now += rng.expovariate(1.0)
        mood = rng.choice(tuple(_LARGEST_LOAD))
        stages = {
            model: [draw_replica(rng, 10 * first + k, mood) for k in range(rng.choice((0, 1, 3)))]
            for first, model in enumerate(models)
        }
        score = rng.choice((0.0, 100.0, rng.uniform(0, 100)))
        ended = draw_ended(rng, i, now) if rng.random() < 0.4 else None
        steps.append(CascadeStep(now, draw_request(rng, i, now), stages, rng.randrange(len(models) - 1), score, ended))
    return steps


@dataclass(frozen=True)
class PoolsStep:
    now: float
    pools: list[dict[str, Any]]
    arrived: dict[tuple[str, str, int], tuple[int, int]]
    ended: Ended | None


def draw_pools_story(seed: int, num_steps: int = 30) -> list[PoolsStep]:
    """A few pools over time, idle, ordinary or overloaded, whose replicas start, drain and stop."""
    rng, rng_down = Random(seed), Random(seed + 1)
    named = [_draw_pool(rng, name) for name in rng.sample(("a", "b", "c", "west"), rng.choice((1, 2, 4)))]
    steps = []
    now = 0.0
    arrived: dict[tuple[str, str, int], tuple[int, int]] = {}
    for i in range(num_steps):
        now += rng.choice((1.0, rng.expovariate(0.01)))
        mood = rng.choice(tuple(_LARGEST_LOAD))
        pools = []
        for first, pool in enumerate(named):
            num_up = rng.randrange(pool["max_replicas"] + 1)
            replicas = [draw_replica(rng, 100 * first + k, mood, drains=0.15) for k in range(num_up)]
            of_pool = {"pool": pool["name"], **{key: pool[key] for key in ("model", "gpu", "region")}}
            num_starting = rng.randrange(pool["max_replicas"] - num_up + 1)
            num_serving = sum(not replica["is_draining"] for replica in replicas)
            num_queued, num_down = rng.choice((0, 0, rng.randrange(200))), rng_down.randrange(2)
            counts = {"num_starting": num_starting, "num_serving": num_serving}
            counts |= {"num_queued": num_queued, "num_down": num_down, "num_failed": rng_down.randrange(2)}
            pools.append({**pool, **counts, "replicas": [r | of_pool for r in replicas]})
        for key in (("m", "", 0), ("n", "east", 0), ("n", "east", 2)):
            num, tokens = arrived.get(key, (0, 0))
            arrived[key] = num + rng.randrange(50), tokens + rng.randrange(20_000)
        steps.append(PoolsStep(now, pools, dict(arrived), draw_ended(rng, i, now) if rng.random() < 0.4 else None))
    return steps


def _draw_pool(rng: Random, name: str) -> dict[str, Any]:
    fewest = rng.choice((0, 1, 3))
    most = fewest + rng.choice((0, 1, 6))
    identity = {"name": name, "model": rng.choice(("m", "n")), "gpu": "h100", "region": rng.choice(("", "east"))}
    goodput_rps = rng.choice((None, 0.0, rng.uniform(0.1, 50)))
    made_of = {"goodput_rps": goodput_rps, "usd_per_hour": rng.uniform(0.5, 20), "gpus": {"h100": rng.choice((1, 4))}}
    return {**identity, **made_of, "min_replicas": fewest, "max_replicas": most}


def draw_ended(rng: Random, id: int, now: float) -> Ended:
    outcome = rng.choice(tuple(Outcome))
    generated = 0 if outcome is Outcome.REJECTED else rng.randrange(1, 2000)
    replica = -1 if outcome is Outcome.REJECTED else rng.randrange(24)
    first_token_s = now - 1.0 if generated else None
    return Ended(
        id,
        outcome,
        "",
        tier=rng.randrange(4),
        replica=replica,
        arrival_s=now - 2.0,
        first_token_s=first_token_s,
        end_s=now,
        prompt_tokens=rng.randrange(1, 9000),
        generated_tokens=generated,
    )
