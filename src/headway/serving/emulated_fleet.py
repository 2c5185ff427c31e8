"""A scenario's fleet as emulated engines on this machine: `headway serve --emulated`."""

from __future__ import annotations

import dataclasses
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from headway.config.scenario import Scenario
from headway.config.spec import PoolSpec
from headway.core.errors import HeadwayError, unknown
from headway.core.fleet import Combo, Pool, unit_of
from headway.gateway.fleet.starting import Processes
from headway.gateway.settings import Judge

_PORTS = range(18_000, 32_000)
"""Above, systems give ports to whoever asks for any."""
_MORE = 8
"""Replicas that scaling may add where nothing says how many there can be."""


def emulated(chosen: Scenario, file: Path, options: Sequence[str] = ()) -> Scenario:
    """The scenario of a file, with every replica a process that emulates its engine, whatever the file says of them.

    A cascade without a judge is judged by confidence. `options`: further ones of `headway emulate`, for all of them.
    HeadwayError where there are not enough ports.
    """
    spec, fleet, starter = chosen.spec, chosen.fleet, _Starter(chosen, file, options)
    pools = [starter.start(said, pool, pool) for said, pool in zip(spec.fleet, fleet.pools, strict=True)]
    combos = []
    for each, combo in zip(spec.combos, fleet.combos, strict=True):
        said = {key: part for key in ("prefill", "decode", "aggregated") if (part := getattr(each, key)) is not None}
        parts = zip(said.items(), combo.parts, strict=True)
        combos.append(replace(each, **{key: starter.start(part, pool, combo) for (key, part), pool in parts}))
    cascade = spec.cascade
    if cascade is not None and cascade.judge is None:
        cascade = replace(cascade, judge=Judge(by="confidence"))
    made = replace(spec, fleet=tuple(pools), combos=tuple(combos), cascade=cascade)
    return dataclasses.replace(chosen, spec=made)


class _Starter:
    """Who gives each pool its command and its ports."""

    def __init__(self, chosen: Scenario, file: Path, options: Sequence[str]) -> None:
        self._chosen, self._file, self._options = chosen, file, options
        self._next = _PORTS.start

    def start(self, said: PoolSpec, pool: Pool, unit: Pool | Combo) -> PoolSpec:
        """The pool, by itself or as a part of a combo, as processes."""
        ports = self._ports(self._most(unit) * (1 if unit is pool else pool.replicas))
        how = Processes(command=(*self._command(pool), "--port", "{port}"), ports=ports)
        return replace(said, endpoints=(), kubernetes=None, slots="", processes=how)

    def _command(self, pool: Pool) -> list[str]:
        policies, cascade = self._chosen.spec.policies, self._chosen.spec.cascade
        command = [sys.executable, "-m", "headway", "emulate", "--scenario", str(self._file), "--pool", pool.name]
        if policies.ordering_at != "gateway" and policies.ordering == "priority":
            command += ["--scheduling-policy", "priority"]
        if cascade is not None and (cascade.judge is None or cascade.judge.by == "confidence"):
            command += ["--confidence", "0:1"]
        return [*command, *self._options]

    def _most(self, unit: Pool | Combo) -> int:
        """Replicas, or combos, that there may be at a time."""
        spec = self._chosen.spec
        if unit.max_replicas is not None:
            return max(unit.max_replicas, unit.replicas)
        num_gpus: dict[tuple[str, str], int] = {}
        for pool in unit_of(unit):
            at = pool.region, pool.gpu.name
            num_gpus[at] = num_gpus.get(at, 0) + pool.parallel.num_gpus
        limits = [n // num_gpus[r, g] for r, g, n in self._chosen.fleet.gpu_limits if (r, g) in num_gpus]
        if limits:
            return max(min(limits), unit.replicas)
        is_planned = spec.cascade is not None and spec.cascade.replan is not None
        return unit.replicas + (_MORE if spec.policies.scaling is not None or is_planned else 0)

    def _ports(self, num: int) -> tuple[int, int]:
        """As many free ones in a row. HeadwayError where there are none."""
        first = self._next
        for port in range(first, _PORTS.stop):
            if port - first == num:
                self._next = port
                return first, port - 1
            if not _is_free(port):
                first = port + 1
        raise HeadwayError(f"no {num} free ports in a row between {_PORTS.start} and {_PORTS.stop}")


def _is_free(port: int) -> bool:
    with socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def pool_of(chosen: Scenario, name: str | None) -> Pool:
    """The pool, or part of a combo, of that name; no name: the only one. HeadwayError where that is none."""
    pools = {pool.name: pool for pool in chosen.fleet.all_pools}
    if name is None and len(pools) > 1:
        raise HeadwayError(f"--pool is missing; expected one of {', '.join(pools)}")
    if name is not None and name not in pools:
        raise unknown("pool", name, pools)
    return pools[name or next(iter(pools))]
