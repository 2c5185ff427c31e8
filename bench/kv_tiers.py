"""When a shared store of KV and keeping KV for the next call pay: `python bench/kv_tiers.py`. Simulations, two minutes.

Four H100 with little memory for KV. The store is tried at several bandwidths, on the built-in agents. Keeping is tried
on programs whose tools take 20 s, beside long documents that come once and push the programs' KV out of memory.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from click import echo

import headway as hw

ROUTERS = ("round-robin", "lmetric")
BLOCK, TOOL_MS = 512, 20_000.0
NUM_PROGRAMS, NUM_CALLS, NUM_DOCUMENTS = 50, 8, 1500


def fleet(kv_tokens: int, **engine: Any) -> dict[str, Any]:
    pool = {
        "model": "llama-3.1-8b", "gpu": "h100-80gb-sxm", "replicas": 4, "kv_capacity_tokens": kv_tokens,
        "engine": {"name": "vllm-0.15", **engine},
    }  # fmt: skip
    cache = {"source": "events", "period_s": 0.1, "delay_s": 0.05}
    return {"fleet": [pool], "observe": {"cache": cache}}


def mixed(path: Path) -> None:
    """Write a trace of programs and documents."""
    chance, lines, block = random.Random(1), [], 0

    def line(session: str, tokens: int, blocks: list[int], **more: Any) -> None:
        lines.append({
            "session_id": session, "input_length": tokens, "output_length": chance.randrange(50, 200),
            "hash_ids": blocks, **more,
        })  # fmt: skip

    for program in range(NUM_PROGRAMS):
        held: list[int] = []
        for call in range(NUM_CALLS):
            new = 12 if not call else 2
            held, block = [*held, *range(block, block + new)], block + new
            when = (
                {"timestamp": chance.uniform(0, 150e3)} if not call else {"delay": chance.uniform(0.5, 1.5) * TOOL_MS}
            )
            line(f"program {program}", len(held) * BLOCK, held, **when)
    for document in range(NUM_DOCUMENTS):
        new = chance.randrange(4, 20)
        line(f"document {document}", new * BLOCK, [*range(block, block + new)], timestamp=chance.uniform(0, 300e3))
        block += new
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))


def show(name: str, scenario: dict[str, Any], router: str) -> None:
    found = hw.simulate({**scenario, "policies": {"routing": router}}).summary
    assert found.ttft_s is not None and found.cached_prompt_share is not None
    echo(
        f"{name:16} {router:12} {found.ttft_s.mean:8.2f} s mean TTFT {found.ttft_s.p99:8.2f} s P99"
        f" {found.cached_prompt_share:7.1%} cached"
    )


def main() -> None:
    stores()
    keeping()


def stores() -> None:
    agents = {"workload": {"builtin": "agents", "arrivals": 1.0, "num_requests": 2500}, **fleet(120_000)}
    for router in ROUTERS:
        show("no store", agents, router)
        for gb_per_s in (0.5, 2.0, 5.0, 12.5, 50.0):
            store = {"capacity_bytes": 1e12, "bytes_per_s": gb_per_s * 1e9}
            show(f"store {gb_per_s:g} GB/s", {**agents, "kv_store": store}, router)


def keeping() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "mixed.jsonl"
        mixed(trace)
        for router in ("session-affinity", "lmetric"):
            for keep_s in (0.0, 5.0, 20.0, 40.0):
                own = fleet(200_000, kv_keep_s=keep_s, kv_keep_share=0.9)
                show(f"kept {keep_s:g} s", {"workload": {"trace": str(trace)}, **own}, router)


if __name__ == "__main__":
    main()
