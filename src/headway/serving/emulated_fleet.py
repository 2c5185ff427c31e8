"""A scenario's fleet as emulated engines on this machine: `headway serve --emulated`."""

from __future__ import annotations

import dataclasses
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from headway.config.scenario import Scenario
from headway.config.spec import PoolSpec, Spec
from headway.core.errors import HeadwayError, unknown
from headway.core.fleet import Combo, Pool, unit_of
from headway.gateway.fleet.specs import Processes
from headway.gateway.settings import Judge
from headway.serving.pools import uses_engine_priority

_PORTS = range(18_000, 32_000)
"""Ports of emulated engines, below the ports that operating systems assign to clients."""
_NUM_SCALED_UP = 8
"""Replicas that scaling may add if the scenario sets no limit."""


def emulated(scenario: Scenario, file: Path, options: Sequence[str] = ()) -> Scenario:
    """The scenario of a file, with every replica as a process that emulates its engine.

    A cascade without a judge uses confidence. `options` are further options of `headway emulate`, for all pools. Raises
    HeadwayError without enough free ports.
    """
    spec, fleet = scenario.spec, scenario.fleet
    next_port = _PORTS.start

    def emulated_pool(pool_spec: PoolSpec, pool: Pool, deployment: Pool | Combo) -> PoolSpec:
        """The section of a pool, which is deployed alone or as a part of a combo."""
        nonlocal next_port
        num = _max_deployed(scenario, deployment) * (1 if deployment is pool else pool.replicas)
        ports = _free_ports(next_port, num)
        next_port = ports[1] + 1
        command = (*_command(spec, file, pool), *options, "--port", "{port}")
        processes = Processes(command=command, ports=ports)
        return replace(
            pool_spec,
            endpoints=(),
            endpoints_file="",
            kubernetes=None,
            inference_pool=None,
            slots="",
            processes=processes,
            api_key="",
        )

    pools = [emulated_pool(pool_spec, pool, pool) for pool_spec, pool in zip(spec.fleet, fleet.pools, strict=True)]
    combos = []
    for combo_spec, combo in zip(spec.combos, fleet.combos, strict=True):
        parts = zip(combo_spec.parts.items(), combo.parts, strict=True)
        combos.append(replace(combo_spec, **{key: emulated_pool(part, pool, combo) for (key, part), pool in parts}))
    cascade = spec.cascade
    if cascade is not None and cascade.judge is None:
        cascade = replace(cascade, judge=Judge(by="confidence"))
    spec = replace(spec, fleet=tuple(pools), combos=tuple(combos), cascade=cascade)
    return dataclasses.replace(scenario, spec=spec)


def _command(spec: Spec, file: Path, pool: Pool) -> list[str]:
    command = [sys.executable, "-m", "headway", "emulate", "--scenario", str(file), "--pool", pool.name]
    if uses_engine_priority(spec):
        command += ["--scheduling-policy", "priority"]
    if spec.cascade is not None and (spec.cascade.judge is None or spec.cascade.judge.by == "confidence"):
        command += ["--confidence", "0:1"]
    return command


def _max_deployed(scenario: Scenario, deployment: Pool | Combo) -> int:
    """The largest number of replicas, or combos, at a time."""
    if deployment.max_replicas is not None:
        return max(deployment.max_replicas, deployment.replicas)
    num_gpus = Counter[tuple[str, str]]()
    for pool in unit_of(deployment):
        num_gpus[pool.region, pool.gpu.name] += pool.parallel.num_gpus
    limits = [
        limit // num_gpus[region, gpu] for region, gpu, limit in scenario.fleet.gpu_limits if (region, gpu) in num_gpus
    ]
    if limits:
        return max(min(limits), deployment.replicas)
    spec = scenario.spec
    is_replanned = spec.cascade is not None and spec.cascade.replan is not None
    scales = spec.policies.scaling is not None or is_replanned
    return deployment.replicas + (_NUM_SCALED_UP if scales else 0)


def _free_ports(first: int, num: int) -> tuple[int, int]:
    """The first and the last port of `num` consecutive free ports, not below `first`. Raises HeadwayError if there are
    none."""
    for port in range(first, _PORTS.stop):
        if port - first == num:
            return first, port - 1
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                first = port + 1
    raise HeadwayError(f"no {num} free ports in a row between {_PORTS.start} and {_PORTS.stop}")


def pool_of(scenario: Scenario, name: str | None) -> Pool:
    """The pool, or part of a combo, with this name; without a name, the only pool. Raises HeadwayError if there is
    none."""
    pools = {pool.name: pool for pool in scenario.fleet.all_pools}
    if name is None and len(pools) > 1:
        raise HeadwayError(f"--pool is missing; expected one of {', '.join(pools)}")
    if name is not None and name not in pools:
        raise unknown("pool", name, pools)
    return pools[name or next(iter(pools))]
