"""What is computed in each iteration: by the simulator, and by vLLM's scheduler for the same arrivals."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import run
from typing import Any

from headway.core.request import Request
from headway.policies import resolve
from headway.sim.replica import Replica
from replica_state import watched
from simulation import Scenario, pool, seconds

Iterations = list[list[tuple[int, int]]]
"""Of each iteration: (request, tokens computed), by request."""

BLOCK = 32
ORDERINGS: dict[str, Any] = {
    "fcfs": "fcfs",
    "pascal": {"name": "pascal", "quantum_tokens": 20, "demotion_tokens": 150},
    "pascal-by-quanta": {"name": "pascal", "quantum_tokens": 20, "demotion_tokens": 150, "by_quanta": True},
    "priority": "priority",
    "priority-first": "priority-first",
    "tier-promotion": {"name": "tier-promotion", "quota_s": 30.0, "preemptive": True},
    "tiers-and-phases": {"name": "tiers-and-phases", "quantum_tokens": 20},
    "edf": "edf",
    "edf-preemptive": {"name": "edf", "preemptive": True},
    "deadline-priority": "deadline-priority",
    "shortest-remaining": "shortest-remaining",
    "shortest-to-answer": "shortest-to-answer",
    "round-robin": {"name": "round-robin", "quantum_tokens": 15},
    "fewest-quanta": {"name": "fewest-quanta", "quantum_tokens": 15},
}
"""Every ordering that an engine can run."""


@dataclass(frozen=True)
class Engine:
    """One engine's limits."""

    seats: int
    blocks: int
    budget: int = 4096
    """Tokens of an iteration. The simulator counts those of requests that it displaces in it, and vLLM does not; so it
    is large enough for both."""


def arrivals(num: int, mean_gap_s: float, most_prompt: int, most_output: int, seed: int = 5) -> list[Request]:
    """Requests of all lengths, tiers and deadlines; two of three reason."""
    chance, now, made = random.Random(seed), 0.0, []
    for id in range(num):
        now += chance.expovariate(1 / mean_gap_s)
        output = chance.randint(3, most_output)
        reasoning = chance.choice([0, chance.randint(1, output - 1), chance.randint(1, output - 1)])
        made.append(
            Request(
                id,
                now,
                chance.randint(5, most_prompt),
                output,
                tier=chance.randint(0, 3),
                reasoning_tokens=reasoning,
                deadline_s=now + chance.uniform(10, 5 * most_output),
            )
        )
    return made


def simulated(requests: Sequence[Request], ordering: Any, engine: Engine) -> Iterations:
    """The iterations of one replica, of a second each, until all requests have ended."""
    given: dict[str, Any] = {
        "max_num_seqs": engine.seats,
        "max_num_batched_tokens": engine.budget,
        "block_size_tokens": BLOCK,
        "kv_capacity_tokens": engine.blocks * BLOCK,
    }
    scenario = Scenario(tuple(requests), (pool(**given),), ordering=resolve.ordering(ordering), line=seconds(1.0))
    seen: Iterations = []

    def look(replica: Replica) -> None:
        batch = replica.batch
        decoding = [(id, 1) for id in batch.decoding] if replica.timeline.advances else []
        seen.append(sorted([*decoding, *((live.id, tokens) for live, tokens in batch.chunks)]))

    scenario.run(watched(scenario.cluster("exact"), look))
    return seen


def described(requests: Sequence[Request]) -> list[dict[str, Any]]:
    """The same requests as vLLM gets them."""
    return [
        {
            "id": each.id,
            "arrival_s": each.arrival_s,
            "prompt_tokens": each.prompt_tokens,
            "tier": each.tier,
            "output_tokens": each.output_tokens,
            "reasoning_tokens": each.reasoning_tokens,
            "headway_output_tokens": each.output_tokens,
            "headway_reasoning_tokens": each.reasoning_tokens,
            "headway_deadline_s": (each.deadline_s or each.arrival_s) - each.arrival_s,
        }
        for each in requests
    ]


def in_vllm(
    vllm: Path, model: Path, requests: Sequence[Request], orderings: Sequence[Any], engines: Sequence[Engine]
) -> list[Iterations]:
    """The same by vLLM's own scheduler, for each pair of an ordering and an engine. None = vLLM without Headway."""
    runs = []
    for ordering, engine in zip(orderings, engines, strict=True):
        # vLLM keeps one block for itself.
        sent = described(requests)
        one = {"seats": engine.seats, "blocks": engine.blocks + 1, "budget": engine.budget, "requests": sent}
        runs.append(one if ordering is None else {**one, "ordering": ordering})
    python = str(vllm.with_name("python"))
    script = Path(__file__).parents[1] / "vllm_cpu" / "lockstep.py"
    source = Path(resolve.__file__).parents[2]
    folders = f"{source}{os.pathsep}{Path(__file__).parent}"
    env = os.environ | ENV | {"PYTHONPATH": folders}
    done = run([python, str(script), str(model)], input=json.dumps(runs), capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    return [[[(id, tokens) for id, tokens in batch] for batch in answer] for answer in answers]


ENV = {
    "VLLM_TARGET_DEVICE": "cpu",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
