"""The pools of a fleet file: the location or start of their replicas, and the abilities of their engines."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from msgspec import Struct
from msgspec.structs import replace

from headway.config.placeholders import resolved
from headway.config.scenario import Scenario
from headway.config.spec import DEFAULT_ENGINE, PolicySpecs, PoolSpec, Spec
from headway.config.strict_yaml import Key, Places
from headway.control.policies import Policies
from headway.core.errors import HeadwayError
from headway.core.fleet import Combo, Pool
from headway.gateway.fleet.specs import InferencePool, Kubernetes, Processes
from headway.gateway.kv_events.address import KvEvents
from headway.gateway.server import web_server
from headway.gateway.server.admin import is_address
from headway.gateway.upstream.dialects import ADAPTERS, Adapter, api_of

Start = Processes | Kubernetes | InferencePool | None
"""The way in which the replicas of a pool are started; None if they run already."""
_TOKEN = re.compile(r"[!-~]+")
_PUBLISHING = ("vllm", "sglang")
"""The APIs of engines that publish KV cache events."""
_LOCATIONS = ("endpoints", "processes", "kubernetes", "inference_pool")
_NO_HANDOVER = {
    "sglang": "an SGLang engine is started for one phase and cannot do the other; expected vLLM",
    "llama.cpp": "llama.cpp's server cannot transfer its KV cache; expected vLLM, SGLang, or `aggregated`",
    "openai": "OpenAI's API cannot transfer a KV cache; expected vLLM, SGLang, or `aggregated`",
}
"""Maps each dialect to the reason why a replica cannot prefill or decode for another replica."""


class DeclaredPool(Struct, frozen=True):
    """A pool, or a part of a combo, with its section of the fleet file."""

    pool: Pool
    spec: PoolSpec
    at: Key
    combo: Combo | None = None

    @property
    def where(self) -> str:
        """The section's name in error messages."""
        return f"{self.at[0]}[{self.at[1]}]" + "".join(f".{key}" for key in self.at[2:])

    @property
    def locations(self) -> list[str]:
        """The keys that locate the replicas or start them. A valid pool has exactly one."""
        return [key for key in _LOCATIONS if getattr(self.spec, key)]

    @property
    def adapter(self) -> Adapter:
        engine = self.spec.engine if isinstance(self.spec.engine, str) else str(self.spec.engine.get("name", ""))
        return ADAPTERS[self.spec.api or api_of(engine)]

    @property
    def start(self) -> Processes | Kubernetes | InferencePool | None:
        """The way in which replicas are started or found; None if the file lists their addresses."""
        return self.spec.processes or self.spec.kubernetes or self.spec.inference_pool

    @property
    def num_ports(self) -> int | None:
        """Number of ports for replicas that are processes."""
        return None if self.spec.processes is None else len(ports(self.spec.processes))

    def bounded(self) -> Pool:
        """The pool limited to as many replicas as it has ports."""
        if self.num_ports is None or self.pool.max_replicas is not None:
            return self.pool
        return replace(self.pool, max_replicas=self.num_ports)


def without_engine(scenario: Scenario) -> list[str]:
    """Pools without `engine` and `api`. Their engines' metrics are not read."""
    return [
        each.pool.name
        for each in declared_pools(scenario)
        if each.spec.engine == DEFAULT_ENGINE and each.spec.api is None and each.spec.endpoints and not each.pool.hosted
    ]


def ports(processes: Processes) -> range:
    return range(processes.ports[0], processes.ports[1] + 1)


def declared_pools(scenario: Scenario) -> list[DeclaredPool]:
    """The pools, then the parts of combos."""
    spec, fleet = scenario.spec, scenario.fleet
    pairs = zip(fleet.pools, spec.fleet, strict=True)
    pools = [DeclaredPool(pool, each, ("fleet", i)) for i, (pool, each) in enumerate(pairs)]
    for i, (combo, each) in enumerate(zip(fleet.combos, spec.combos, strict=True)):
        parts = zip(combo.parts, each.parts.items(), strict=True)
        pools += [DeclaredPool(pool, part, ("combos", i, role), combo) for pool, (role, part) in parts]
    return pools


def bounded_combos(pools: Sequence[DeclaredPool]) -> dict[str, Combo]:
    """The combos by name, each limited to as many replicas as the ports of its parts allow."""
    combos: dict[str, Combo] = {}
    for each in pools:
        if each.combo is None:
            continue
        combo = combos.setdefault(each.combo.name, each.combo)
        if each.num_ports is not None and each.combo.max_replicas is None:
            most = each.num_ports // each.pool.replicas
            combos[combo.name] = replace(combo, max_replicas=min(most, combo.max_replicas or most))
    return combos


def starts(scenario: Scenario, pools: Sequence[DeclaredPool]) -> list[Start]:
    """Maps each pool to the way in which its replicas are started, with absolute folders for logs. Raises HeadwayError
    for impossible settings."""
    places = scenario.places
    found: list[Start] = []
    by_port: dict[int, DeclaredPool] = {}
    for each in pools:
        start = each.start
        if isinstance(start, Processes):
            start = _checked_processes(each, start, scenario.base_dir, places)
            for port in ports(start):
                other = by_port.setdefault(port, each)
                if other.spec.processes is not each.spec.processes:  # shapes of one pool share their ports
                    raise places.error((*each.at, "processes", "ports"), f"{port} is {other.where}'s, too")
        elif start is not None:  # checks the cluster's configuration without a request
            if find_spec("kubernetes") is None:
                raise web_server.not_installed("kubernetes", "kubernetes")
            from headway.gateway.fleet import kubernetes

            with places.at(*each.at, each.locations[0]):
                kubernetes.check(start.context)
        found.append(start)
    return found


def _checked_processes(each: DeclaredPool, processes: Processes, base_dir: Path, places: Places) -> Processes:
    num, at = len(ports(processes)), (*each.at, "processes")
    if not num:
        first, last = processes.ports
        raise places.error((*at, "ports"), f"{first} to {last}; expected the lower one first")
    num_together = 1 if each.combo is None else each.pool.replicas
    deployment = each.pool if each.combo is None else each.combo
    for most, key in ((deployment.replicas, "replicas"), (deployment.max_replicas or 0, "max_replicas")):
        if most * num_together > num:
            what = f"{most}; expected {num // num_together} at most, as many as `processes.ports`"
            raise places.error((*each.at[:2], key), what if each.combo is None else f"{what} of {each.where}")
    if not any("{port}" in word for word in (*processes.command, *processes.env.values())):
        raise places.error((*at, "command"), "has no {port}; expected it where the engine reads its port")
    if which(processes.command[0]) is None:
        raise places.error((*at, "command", 0), f"{processes.command[0]!r}: there is no such program here")
    if not processes.log:
        return processes
    folder = (base_dir / processes.log).absolute()
    if not folder.is_dir():
        raise places.error((*at, "log"), f"{base_dir / processes.log} is no folder; expected an existing one")
    return replace(processes, log=str(folder))


def slot_folder(each: DeclaredPool, base_dir: Path, places: Places) -> Path | None:
    """The folder in which the engines share KV caches. Raises HeadwayError if it is missing, or the engines cannot use
    one."""
    if not each.spec.slots:
        return None
    if each.adapter.api != "llama.cpp":
        what = f"engines that speak {each.adapter.api} have no slots; expected it with `api: llama.cpp` only"
        raise places.error((*each.at, "slots"), what)
    folder = (base_dir / each.spec.slots).absolute()
    if not folder.is_dir():
        what = f"{folder} is no folder; expected the engines' --slot-save-path"
        raise places.error((*each.at, "slots"), what)
    return folder


def kv_events(each: DeclaredPool, base_dir: Path, places: Places) -> KvEvents | None:
    """The addresses at which a pool's engines publish their KV cache events; None if the pool's section has none.
    Raises HeadwayError if the engines publish no events, if an address is invalid, or if the tokenizer of their prompts
    cannot be read."""
    events = each.spec.kv_events
    if events is None:
        return None
    at = (*each.at, "kv_events")
    if each.adapter.api not in _PUBLISHING:
        what = f"engines that speak {each.adapter.api} publish no KV cache events; expected {' or '.join(_PUBLISHING)}"
        raise places.error(at, what)
    try:
        events.check(events.ranks or each.spec.dp)
    except HeadwayError as error:
        raise places.error(at, str(error)) from None
    if events.ranks is None and each.spec.dp > 1:
        events = replace(events, ranks=each.spec.dp)
    if not events.tokenizer:
        return events
    if find_spec("tokenizers") is None:
        raise web_server.not_installed("tokenizers", "tokenizers")
    from headway.gateway.kv_events import local_tokenizer

    path = (base_dir / events.tokenizer).absolute()
    try:
        local_tokenizer.read(path)
    except HeadwayError as error:
        raise places.error((*at, "tokenizer"), str(error)) from None
    return replace(events, tokenizer=str(path))


def engine_key(each: DeclaredPool, base_dir: Path, places: Places) -> str:
    """The key that a pool's engines require. Raises HeadwayError if it cannot be sent in a header."""
    at = (*each.at, "api_key")
    key: str = resolved(each.spec.api_key, at, places, base_dir, os.environ)
    if each.spec.api_key and not _TOKEN.fullmatch(key):
        raise places.error(at, "is empty, or has characters that no header may have; expected a bearer token")
    return key


def engine_model(each: DeclaredPool) -> str:
    """The model's name at a hosted pool, whose list may have hundreds of models; empty for other pools."""
    if each.pool.hosted is None:
        return ""
    return each.spec.served_name or str(each.spec.model)


def check_pools(pools: Sequence[DeclaredPool], places: Places) -> None:
    """Raises HeadwayError if a pool's replicas or roles are not supported, or two pools share a workload."""
    first_of: dict[str, DeclaredPool] = {}
    workloads: dict[tuple[str, str, str, str], DeclaredPool] = {}
    for each in pools:
        _check_locations(each, places)
        if each.pool.role != "mixed" and not each.adapter.transfers_kv and not each.adapter.dual_dispatch:
            raise places.error(each.at, _NO_HANDOVER.get(each.adapter.api, _NO_HANDOVER["openai"]))
    for each in pools:
        if each.combo is not None:
            other = first_of.setdefault(each.combo.name, each)
            if other.locations != each.locations:
                what = f"the replicas of {other.where} have `{other.locations[0]}`; expected the same for both"
                raise places.error((*each.at, each.locations[0]), what)
        if each.combo is not None and each.spec.inference_pool is not None:
            what = "an InferencePool's pods are alike; expected `endpoints` or `kubernetes` for each part of a combo"
            raise places.error((*each.at, "inference_pool"), what)
        if (how := each.spec.kubernetes) is not None:
            other = workloads.setdefault((how.context, how.namespace, how.kind, how.name), each)
            if other is not each:
                raise places.error((*each.at, "kubernetes", "name"), f"{how.name} is {other.where}'s, too")


def _check_locations(each: DeclaredPool, places: Places) -> None:
    if not each.locations:
        what = "missing; expected where the pool's replicas listen, http://host:port, or `processes` or `kubernetes`"
        raise places.error((*each.at, "endpoints"), what)
    if len(each.locations) > 1:
        what = f"the pool has `{each.locations[0]}`, too; expected one of the two"
        raise places.error((*each.at, each.locations[1]), what)
    for i, url in enumerate(each.spec.endpoints):
        if not is_address(url):
            raise places.error((*each.at, "endpoints", i), f"{url!r}; expected http://host:port")
        if url in each.spec.endpoints[:i]:
            what = f"{url!r} is here a second time; expected one address for each replica"
            raise places.error((*each.at, "endpoints", i), what)


def check_roles(pools: Sequence[DeclaredPool], places: Places) -> None:
    """Raises HeadwayError if roles cannot change. Role changes number replicas by their endpoints, and both roles need
    KV transfers."""
    for each in pools:
        if each.combo is None:
            continue
        if not each.adapter.transfers_kv:
            reason = _NO_HANDOVER.get(each.adapter.api, _NO_HANDOVER["openai"])
            raise places.error(("roles",), f"{each.where}: {reason}")
        if not each.spec.endpoints:
            what = f"{each.where} has no `endpoints`, so its replicas have no numbers beforehand; the roles of"
            raise places.error(("roles",), f"{what} started replicas are set by POST /workers/ID/role")


def check_phases(pools: Sequence[DeclaredPool], policies: Policies, places: Places) -> None:
    """Raises HeadwayError if the parts of a combo speak different dialects, or policies need both phases of an engine
    with only one."""
    apis: dict[str, str] = {}
    for each in pools:
        if each.combo is None or each.pool.role == "mixed":
            continue
        if (api := apis.setdefault(each.combo.name, each.adapter.api)) != each.adapter.api:
            what = f"speaks {each.adapter.api}, and the other part {api}; expected the same, to transfer KV caches"
            raise places.error(each.at, what)
        if not each.adapter.dual_dispatch:
            continue
        what = f"the engines of {each.where} ({api}) are started for one phase and cannot do the other"
        if getattr(policies.router(), "answers_in_place", False):
            hint = "this router lets an idle replica serve the whole request; expected another, or `within: strict`"
            raise places.error(("policies", "routing"), f"{what}, and {hint}")
        if policies.migration is not None:
            raise places.error(("policies", "migration"), f"{what}, so no request can move; expected none")


def require_starts(pools: Sequence[DeclaredPool], key: Key, places: Places) -> None:
    """Raises HeadwayError at `key` if a pool lists endpoints, because `key` needs replicas that can be started."""
    for each in pools:
        if each.start is None or isinstance(each.start, InferencePool):
            what = f"{each.where} has `{each.locations[0]}`, where nothing can be started"
            raise places.error(key, f"{what}; expected `processes` or `kubernetes`")


def uses_engine_priority(spec: Spec) -> bool:
    """Whether the engines get the requests' tiers, and order their own queues by them."""
    return spec.policies.ordering_at != "gateway" and ordering_name(spec.policies) != "fcfs"


def is_run_by_plugin(spec: Spec) -> bool:
    """Whether the engines run the ordering through `headway.vllm.Scheduler`."""
    return spec.policies.ordering_at != "gateway" and ordering_name(spec.policies) not in ("fcfs", "priority")


def ordering_name(policies: PolicySpecs) -> str:
    ordering = policies.ordering
    one = ordering[0] if isinstance(ordering, list) else ordering
    return one if isinstance(one, str) else str(one.get("name"))
