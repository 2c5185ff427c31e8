"""Starts in a region that lacks a model's weights, the third of the paper's sources (7.1).

A scenario's pools begin with at least one replica. A region without a model is therefore created by emptying the
scenario's pools in that region.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from headway import scenario
from headway.config.strict_yaml import Places
from headway.core.record import ReplicaRecord
from headway_papers.reproduce.tasks import Measurement


def lacking(document: Mapping[str, Any], region: str, seed: int, data: str = "") -> Measurement:
    """Starts in a region that begins without replicas: their number by source, and the seconds of the first two.

    `first_s`: of the first start and of the next one that begins after its end; None if missing.
    """
    chosen = scenario.assemble({**document, "seed": seed}, Places(), Path(data))
    pools = tuple(
        structs.replace(pool, replicas=0, min_replicas=0) if pool.region == region else pool
        for pool in chosen.fleet.pools
    )
    emptied = replace(chosen, fleet=structs.replace(chosen.fleet, pools=pools))
    replicas = [each for each in scenario.Simulator().records(emptied).replicas if each.region == region]
    starts = sorted((each.up[0][0], _ready_s(each), each.origin) for each in replicas)
    first = starts[:1]
    later = [each for each in starts if first and each[0] >= first[0][1]][:1]
    seconds = [ready_s - began_s for began_s, ready_s, _ in (*first, *later)]
    return {"sources": Counter(origin for *_, origin in starts), "first_s": [*seconds, None, None][:2]}


def _ready_s(replica: ReplicaRecord) -> float:
    """When a replica began to serve: the end of its start, or the start of its paid time."""
    began_s = replica.up[0][0]
    return next((to_s for since_s, to_s in replica.down if since_s == began_s), began_s)
