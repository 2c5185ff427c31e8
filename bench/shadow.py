"""What a shadowed candidate adds to a request: calls of Headway's functions, and CPU time of a placement.

`python bench/shadow.py`: a gateway of this process with scripted engines, without and with a candidate. Calls are those
of one request, as `tests/gateway/test_hot_path.py` counts them. A placement is the CPU time of the candidate's
decisions, the mean over all requests of the best run; its share is of what a request takes without a candidate.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from gateway_in_process import Inside
from headway.control.shadow import ShadowPlan
from headway.gateway.scheduling.shadows import Shadows
from headway.policies.resolve import router
from traced_calls import traced

BODY = json.dumps({"model": "qwen3-8b", "messages": [{"role": "user", "content": "say hello"}], "max_tokens": 9})


def _shadow(inside: Inside, candidate: str) -> None:
    """Have a candidate's router decide beside."""
    gateway = inside.gateway
    policies = gateway.plan.policies.__class__(router(candidate), gateway.plan.policies.ordering)
    gateway.shadows = Shadows(ShadowPlan("candidate.yaml", policies, ("routing",)), 0)
    for service in gateway.driver.control.services:
        service.follow(gateway.shadows.new(service.model))


async def _seconds(inside: Inside, num: int) -> float:
    """CPU seconds of this process for one request."""
    began_s = time.process_time()
    for _ in range(num):
        await inside.post(json.loads(BODY))
    return (time.process_time() - began_s) / num


def _placement_s(inside: Inside, num: int) -> float:
    """Seconds of the candidate for each of so many placements."""
    (shadow,) = inside.gateway.shadows.of.values()
    before_s = shadow.spent_s
    inside.run(_seconds(inside, num))
    return (shadow.spent_s - before_s) / num


async def _calls(inside: Inside) -> int:
    found = []
    for _ in range(3):
        with traced() as calls:
            await inside.post(json.loads(BODY))
            await asyncio.sleep(0.02)
        found.append(len(calls))
    return min(found)


@click.command()
@click.option("--replicas", default=8, show_default=True)
@click.option("--routing", default="least-loaded", show_default=True)
@click.option("--candidates", default="least-loaded,round-robin,headway", show_default=True)
@click.option("--requests", default=1000, show_default=True)
@click.option("--runs", default=7, show_default=True)
def main(replicas: int, routing: str, candidates: str, requests: int, runs: int) -> None:
    """Print what each candidate adds."""
    made: dict[str, Inside] = {}
    try:
        for name in ("", *candidates.split(",")):
            folder = Path(tempfile.mkdtemp())
            made[name] = Inside(folder, replicas, policies={"routing": routing}, gateway={"scrape_period_s": 3600.0})
            for engine in made[name].engines:
                engine.keeps_bodies = False
            if name:
                _shadow(made[name], name)
        calls = {name: inside.run(_calls(inside)) for name, inside in made.items()}
        alone_s = min(made[""].run(_seconds(made[""], requests)) for _ in range(runs))
        click.echo(f"{'without':>14}  {calls['']:4} calls  {1e6 * alone_s:7.1f} us a request")
        for name in candidates.split(","):
            placement_s = min(_placement_s(made[name], requests) for _ in range(runs))
            (shadow,) = made[name].gateway.shadows.of.values()
            click.echo(
                f"{name:>14}  {calls[name]:4} calls  {1e6 * placement_s:7.1f} us a placement"
                f" ({100 * placement_s / alone_s:.1f}%), decides about one of {shadow.every}"
            )
    finally:
        for inside in made.values():
            inside.close()


if __name__ == "__main__":
    main()
