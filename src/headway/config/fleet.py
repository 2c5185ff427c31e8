"""Builds the fleet of a specification: looks up names in the catalog, and checks models, limits and settings."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from headway.catalog import engine_on, gpu, model, model_of_config
from headway.catalog.coefficients import Coefficients, Overhead
from headway.catalog.hf import GGUF
from headway.catalog.load import coefficients_in, repository_of
from headway.config import strict_yaml
from headway.config.fallback import check_hosted, check_simulated, with_fallbacks
from headway.config.own_hardware import OwnHardware, own_hardware
from headway.config.spec import DEFAULT_ENGINE, ComboSpec, PoolSpec, Spec
from headway.config.speculative import with_speculation
from headway.config.strict_yaml import Key, Places
from headway.core.errors import HeadwayError, unknown
from headway.core.fleet import GREEDY, Combo, Engine, Fleet, Gpu, Model, Parallel, Pool, Role, Sampling
from headway.limits.schedules import check as check_schedule
from headway.perf import memory
from headway.perf.lora import slots_bytes
from headway.perf.params import is_mixture, kernel_dtype

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
"""A Hugging Face repository: organisation and name."""

_PROXIED_GPU = "unknown"
_HOSTED_GPU = "hosted"
_HOSTED_CONCURRENT = 1 << 16
_PROXIED_CONTEXT_TOKENS = 1 << 24
"""Context limit of pools that are only served: the gateway sets none, as the engine has its own."""

_AT_LEAST_1 = frozenset(("max_num_seqs", "max_num_batched_tokens", "block_size_tokens"))
"""Settings of an engine that are 1 or more; other numbers are 0 or more."""


WEIGHT_DTYPES = {
    "none": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8",
    "awq": "w4a16",
    "gptq": "w4a16",
    "int4": "w4a16",
    "mxfp4": "int4",
}
"""The model's `dtype` for each `quantization`."""


_LIKE_16_BITS = "4-bit products as 16-bit ones with fewer bytes"
UNMEASURED_WEIGHTS = {
    "fp8_block": "8-bit products with a scale for each block as with one for all",
    "awq": _LIKE_16_BITS,
    "gptq": _LIKE_16_BITS,
    "int4": _LIKE_16_BITS,
}
"""Maps each `quantization` to weight types that no kernel table has, and the source of their step times."""


def fleet_of(spec: Spec, base_dir: Path, places: Places) -> Fleet:
    """Every pool and combo; paths are relative to `base_dir`. Raises HeadwayError for an invalid pool."""
    own = own_of(spec, places)
    pools = tuple(_pool(pool, ("fleet", i), f"pool-{i}", base_dir, places, own) for i, pool in enumerate(spec.fleet))
    combos = tuple(_combo(combo, ("combos", i), base_dir, places, own) for i, combo in enumerate(spec.combos))
    if (sampling := _sampling(spec)) is not None:
        pools = tuple(_with_sampling(pool, sampling) for pool in pools)
        combos = tuple(
            replace(combo, parts=tuple(_with_sampling(part, sampling) for part in combo.parts)) for combo in combos
        )
    if not pools and not combos:
        raise places.error((), "no replicas; expected `fleet`, `combos`, or both")
    limits = tuple((limit.region, own.gpu(limit.gpu).name, limit.count) for limit in spec.gpu_limits)
    fleet = _with_distinct_names(Fleet(pools, combos, spec.network, spec.provisioning, limits, spec.kv_store))
    _check_kv_store(fleet, places)
    _check(fleet, places)
    return with_fallbacks(fleet, spec, places)


def _check_kv_store(fleet: Fleet, places: Places) -> None:
    """Raise HeadwayError if a pool that should use the store does not exist or has no prefix cache."""
    named = fleet.kv_store.pools if fleet.kv_store is not None else ()
    pools = {pool.name: pool for pool in fleet.all_pools}
    for i, name in enumerate(named):
        if name not in pools:
            raise unknown("pool", name, pools, places.where(("kv_store", "pools", i)))
        if not pools[name].engine.prefix_caching or pools[name].hosted is not None:
            raise places.error(("kv_store", "pools", i), f"{name} has no prefix cache; set prefix_caching: true")


def _sampling(spec: Spec) -> Sampling | None:
    """The workload's sampling parameters; None: use the models' defaults."""
    chosen = spec.workload.sampling
    return GREEDY if chosen == "greedy" else chosen


def _with_sampling(pool: Pool, sampling: Sampling) -> Pool:
    return replace(pool, model=replace(pool.model, sampling=sampling))


def own_of(spec: Spec, places: Places) -> OwnHardware:
    """The GPUs, models and engines defined in the scenario."""
    return own_hardware(spec.gpus, spec.models, spec.engines, places)


def coefficients_of(
    spec: Spec, fleet: Fleet, base_dir: Path, places: Places, only_known: bool = False
) -> dict[str, Coefficients]:
    """Step-time coefficients by pool. `only_known` skips pools that name no GPU, which are errors otherwise."""
    specs: list[tuple[Key, PoolSpec]] = [(("fleet", i), pool) for i, pool in enumerate(spec.fleet)]
    for i, combo in enumerate(spec.combos):
        specs += [(("combos", i, key), part) for key, part in combo.parts.items()]
    if not only_known:
        check_simulated(specs, places)
    pairs, own = zip(specs, fleet.all_pools, strict=True), own_of(spec, places)
    return {
        pool.name: _coefficients(pool_spec, pool, at, base_dir, places, own)
        for (at, pool_spec), pool in pairs
        if pool.hosted is None and (pool_spec.gpu or not only_known)
    }


def _coefficients(
    spec: PoolSpec, pool: Pool, at: Key, base_dir: Path, places: Places, own: OwnHardware
) -> Coefficients:
    """Coefficients from the pool's own file, else from the catalog; marked uncalibrated if the pool has unmeasured
    parts."""
    if not spec.gpu:
        raise places.error((*at, "gpu"), "missing; expected a GPU, without which replicas can be served, not simulated")
    if spec.coefficients is None:
        found = own.coefficients(pool.gpu.name, pool.engine.name, pool.engine.version)
    else:
        with places.at(*at, "coefficients"):
            found = coefficients_in(base_dir / spec.coefficients, pool.gpu.name, pool.engine.name)
    return with_unmeasured(found, spec, pool.model)


def with_unmeasured(found: Coefficients, spec: PoolSpec, shape: Model | None = None) -> Coefficients:
    """The coefficients, marked uncalibrated if the pool has parts that were not measured on any GPU."""
    unmeasured = [UNMEASURED_WEIGHTS[spec.quantization]] if spec.quantization in UNMEASURED_WEIGHTS else []
    if shape is not None:
        unmeasured += [note for note in unmeasured_of(shape) if spec.quantization is None or note != _LIKE_16_BITS]
    if spec.speculative is not None:
        unmeasured.append(f"drafts by {spec.speculative.method}")
    if not unmeasured:
        return found
    return replace(found, calibrated=False, estimated=(*found.estimated, *unmeasured))


def unmeasured_of(shape: Model) -> list[str]:
    """The parts of a model whose step times are not based on measurements: layers and weight types."""
    notes = list(shape.unmodelled)
    dtypes = {shape.dtype, *(part for each in shape.layers for part in (each.mixer_dtype, each.mlp_dtype) if part)}
    if any(map(is_mixture, (*dtypes, shape.embedding_dtype))):
        notes.append("products of GGUF's types with the efficiencies of other types")
    elif any(kernel_dtype(each) == "int4" for each in dtypes) and (shape.moe is None or shape.dtype != "int4"):
        notes.append(_LIKE_16_BITS)
    return notes


def _combo(spec: ComboSpec, at: Key, base_dir: Path, places: Places, own: OwnHardware) -> Combo:
    if list(spec.parts) not in (["prefill", "decode"], ["aggregated"]):
        raise places.error(at, "expected `prefill` and `decode`, or `aggregated`")
    roles: dict[str, Role] = {"prefill": "prefill", "decode": "decode", "aggregated": "mixed"}
    parts = []
    for key, pool in spec.parts.items():
        part = _pool(pool, (*at, key), f"{spec.name}-{key}", base_dir, places, own, spec.replicas)
        parts.append(replace(part, role=roles[key], handover=spec.handover))
    if (parts[0].model.name, parts[0].model.hf_id) != (parts[-1].model.name, parts[-1].model.hf_id):
        names = [each.model.name for each in parts]
        if names[0] == names[1]:
            names = [each.model.hf_id for each in parts]
        raise places.error((*at, "decode", "model"), f"{names[1]}; expected {names[0]}, as prefill")
    return Combo(
        spec.name,
        tuple(parts),
        spec.replicas,
        spec.min_replicas,
        spec.max_replicas,
        spec.goodput_rps,
        spec.fallback,
        spec.scheduled_min_replicas,
    )


def _replicas(spec: PoolSpec, at: Key, places: Places, units: int) -> int:
    """The replicas of a pool, or of a part in each of `units` combos; endpoints determine the number, if there are
    any."""
    num = len(spec.endpoints)
    if not num:
        return spec.replicas
    if not units or num % units:
        what = f"{num}; expected as many for each of the combo's `replicas` ({units})"
        raise places.error((*at, "endpoints"), what)
    if spec.replicas not in (1, num // units):
        what = f"{spec.replicas}; expected {num // units}, as many as endpoints{' for each combo' if units > 1 else ''}"
        raise places.error((*at, "replicas"), what)
    return num // units


def _pool(spec: PoolSpec, at: Key, name: str, base_dir: Path, places: Places, own: OwnHardware, units: int = 1) -> Pool:
    if spec.hosted is not None:
        check_hosted(spec, at, places)
    elif not spec.gpu and not spec.endpoints:
        raise places.error((*at, "gpu"), "missing; expected a GPU, or `endpoints` of replicas to be served")
    shape = model_of(spec, at, base_dir, places, own) if spec.gpu else _proxied_model(spec, at, places)
    with places.at(*at, "gpu"):
        accelerator = own.gpu(spec.gpu) if spec.gpu else _proxied_gpu(spec)
    pool = Pool(
        name=spec.name or name,
        model=shape,
        gpu=accelerator,
        engine=_pool_engine(spec, shape, at, base_dir, places, own) if spec.hosted is None else _hosted_engine(spec),
        parallel=Parallel(spec.tp, spec.pp, spec.ep, spec.dp),
        replicas=_replicas(spec, at, places, units),
        region=spec.region,
        usd_per_gpu_hour=spec.usd_per_gpu_hour,
        kv_capacity_tokens=spec.kv_capacity_tokens,
        mean_sequence_tokens=spec.mean_sequence_tokens,
        network_bytes_per_s=spec.network_bytes_per_s,
        min_replicas=spec.min_replicas,
        scheduled_min_replicas=spec.scheduled_min_replicas,
        max_replicas=spec.max_replicas,
        start_s=spec.start_s,
        lora=spec.lora,
        hosted=spec.hosted,
        usd_per_million_input_tokens=spec.usd_per_million_input_tokens,
        usd_per_million_output_tokens=spec.usd_per_million_output_tokens,
        usd_per_million_cached_tokens=spec.usd_per_million_cached_tokens,
        fallback=spec.fallback,
    )
    if spec.hosted is not None:
        num = pool.replicas
        return replace(pool, min_replicas=num, max_replicas=num)
    with places.at(*at):
        memory.plan(pool.model, pool.gpu, pool.engine, pool.parallel, adapter_bytes=slots_bytes(pool))
    if spec.gpu:
        _coefficients(spec, pool, at, base_dir, places, own)
    return pool


def _pool_engine(spec: PoolSpec, model: Model, at: Key, base_dir: Path, places: Places, own: OwnHardware) -> Engine:
    """The engine's profile with the settings that are pool keys."""
    accelerator = own.gpu(spec.gpu) if spec.gpu else None
    engine = _engine(spec.engine, (*at, "engine"), places, own, accelerator)
    if spec.coefficients is not None and accelerator is not None:
        with places.at(*at, "coefficients"):
            found = coefficients_in(base_dir / spec.coefficients, accelerator.name, engine.name)
        engine = _engine(spec.engine, (*at, "engine"), places, own, accelerator, found.overhead)
    if spec.kv_cache_dtype == "fp8":
        engine = replace(engine, kv_dtype_bytes=1.0)
    if spec.speculative is not None:
        parallel = Parallel(spec.tp, spec.pp, spec.ep, spec.dp)
        at = (*at, "speculative")
        engine = with_speculation(spec.speculative, engine, model, parallel, at, base_dir, places, own)
    return engine


def profile_of(spec: PoolSpec, own: OwnHardware) -> Engine:
    """The profile of a pool's engine, without the pool's changes. Raises HeadwayError if no profile has its name."""
    changes = {"name": spec.engine} if isinstance(spec.engine, str) else spec.engine
    return own.engine(str(changes.get("name", DEFAULT_ENGINE)), str(changes.get("version", "")))


def _proxied_model(spec: PoolSpec, at: Key, places: Places) -> Model:
    """A model that is only served: its names, with an arbitrary shape that no decision uses."""
    shape = model("llama-3.1-8b")
    if not isinstance(spec.model, str):
        raise places.error((*at, "gpu"), "missing; expected it beside `model: {config: ...}`, or a model's name")
    names = dict.fromkeys((spec.model, spec.served_name))
    with suppress(HeadwayError):  # any name is accepted
        names |= dict.fromkeys(model(spec.model).names)
    name, *others = filter(None, names)
    longest = None if spec.hosted is None else spec.hosted.max_context_tokens
    return replace(
        shape,
        name=name,
        hf_id=spec.hf_id or name,
        aliases=tuple(others),
        max_context_tokens=longest or _PROXIED_CONTEXT_TOKENS,
    )


def _proxied_gpu(spec: PoolSpec) -> Gpu:
    name = _PROXIED_GPU if spec.hosted is None else _HOSTED_GPU
    return replace(gpu("h100"), name=name, usd_per_hour=0.0, aliases=())


def _hosted_engine(spec: PoolSpec) -> Engine:
    """An engine that computes each prompt and one token of each request in one step."""
    assert spec.hosted is not None
    step_s, block = 1 / (spec.hosted.tokens_per_s or 1.0), spec.hosted.prompt_cache_block_tokens
    engine = Engine(
        name=DEFAULT_ENGINE,
        max_num_seqs=spec.hosted.max_concurrent or _HOSTED_CONCURRENT,
        max_num_batched_tokens=_PROXIED_CONTEXT_TOKENS,
        request_overhead_s=max((spec.hosted.ttft_s or 0.0) - step_s, 0.0),
    )
    return engine if block is None else replace(engine, prefix_caching=True, block_size_tokens=block)


def model_of(spec: PoolSpec, at: Key, base_dir: Path, places: Places, own: OwnHardware) -> Model:
    """The shape from the catalog or a config, with the names under which the model is deployed and requested."""
    with places.at(*at, "model"):
        if isinstance(spec.model, str):
            shape = own.model(spec.model, base_dir)
            deployed = repository_of(shape, spec.model)
        else:
            shape = model_of_config(spec.model.config, base_dir, spec.model.assume)
            deployed = shape.hf_id if _REPOSITORY.fullmatch(shape.hf_id) else ""
    deployed = spec.hf_id or deployed
    aliases = dict.fromkeys((shape.hf_id, *shape.aliases, spec.served_name))
    if spec.quantization is not None and shape.source.endswith(GGUF):
        raise places.error((*at, "quantization"), "the weights of a GGUF file have its types; expected none")
    dtype = shape.dtype if spec.quantization is None else WEIGHT_DTYPES[spec.quantization]
    others = tuple(n for n in aliases if n and n not in (shape.name, deployed))
    return replace(shape, hf_id=deployed, dtype=dtype, aliases=others)


def _with_distinct_names(fleet: Fleet) -> Fleet:
    """The fleet, in which models of equal shape with different weights are different models.

    The first one keeps the shape's names; the others are named after their weights.
    """
    first: dict[str, Model] = {}
    for pool in fleet.all_pools:
        first.setdefault(pool.model.name, pool.model)
    others = {pool.model.hf_id for pool in fleet.all_pools} - {shape.hf_id for shape in first.values()}
    if not others:
        return fleet

    def renamed(pool: Pool) -> Pool:
        shape, named = pool.model, first[pool.model.name]
        if shape.hf_id == named.hf_id:
            return replace(pool, model=replace(shape, aliases=tuple(n for n in shape.aliases if n not in others)))
        own = tuple(name for name in shape.aliases if name not in named.names)
        return replace(pool, model=replace(shape, name=shape.hf_id, aliases=own))

    combos = tuple(replace(combo, parts=tuple(map(renamed, combo.parts))) for combo in fleet.combos)
    return replace(fleet, pools=tuple(map(renamed, fleet.pools)), combos=combos)


def _engine(
    spec: str | dict[str, Any],
    key: Key,
    places: Places,
    own: OwnHardware,
    accelerator: Gpu | None,
    overhead: Overhead | None = None,
) -> Engine:
    """The engine profile on this GPU, with the request times of `overhead` and the user's changes."""
    changes = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = changes.pop("name", DEFAULT_ENGINE)
    if "speculative" in changes:
        raise places.error((*key, "speculative"), "is a key of the pool; expected it beside `engine`")
    if isinstance(version := changes.get("version", ""), int | float):
        raise places.error((*key, "version"), f'{version}; expected it in quotes, as 0.30 without them is 0.3: "0.30"')
    with places.at(*key):
        profile = engine_on(own.engine(str(name), str(version)), accelerator)
    profile = profile if overhead is None else overhead.on(profile)
    changed = strict_yaml.convert({**msgspec.to_builtins(profile), **changes}, Engine, places, key)
    if changed.max_num_batched_tokens < changed.max_num_seqs:
        at = (*key, "max_num_batched_tokens")
        expected = f"at least max_num_seqs ({changed.max_num_seqs}), a token for each sequence that decodes"
        raise places.error(at, f"{changed.max_num_batched_tokens}; expected {expected}")
    if changed.kv_offload_bytes and not changed.prefix_caching:
        raise places.error((*key, "kv_offload_bytes"), "host memory extends the prefix cache; set prefix_caching: true")
    keep_s, keep_share = changed.kv_keep
    if keep_s and not changed.prefix_caching:
        raise places.error((*key, "kv_keep_s"), "keeps blocks of the prefix cache; set prefix_caching: true")
    if keep_share > 1:
        raise places.error((*key, "kv_keep_share"), f"{keep_share}; expected a share, 0 to 1")
    if changed.schedule_lag > 1:
        raise places.error((*key, "schedule_lag"), f"{changed.schedule_lag}; expected 0 or 1")
    for field_name in changes:
        value, least = getattr(changed, field_name), int(field_name in _AT_LEAST_1)
        if field_name in ("gpu_memory_utilization", "kv_dtype_bytes") and value <= 0:
            raise places.error((*key, field_name), f"{value}; expected more than 0")
        if isinstance(value, int | float) and value < least:
            raise places.error((*key, field_name), f"{value}; expected {least} or more")
        if field_name in ("gpu_memory_utilization", "watermark") and value > 1:
            raise places.error((*key, field_name), f"{value}; expected 1 at most")
    return changed


def _check(fleet: Fleet, places: Places) -> None:
    names: set[str] = set()
    pools: list[tuple[Key, Pool]] = [(("fleet", i), pool) for i, pool in enumerate(fleet.pools)]
    parts: list[tuple[Key, Pool]] = [
        (("combos", i), part) for i, combo in enumerate(fleet.combos) for part in combo.parts
    ]
    for at, pool in (*pools, *parts):
        if pool.name in names:
            raise places.error((*at, "name"), f"{pool.name!r} is the name of another pool, too")
        names.add(pool.name)
    limited: list[tuple[Key, Pool | Combo]] = [*pools, *((("combos", i), c) for i, c in enumerate(fleet.combos))]
    for at, each in limited:
        most = each.replicas if each.max_replicas is None else each.max_replicas
        if not each.min_replicas <= each.replicas <= most:
            raise places.error((*at, "replicas"), f"{each.replicas}; expected {each.min_replicas} to {most}")
        for i, minimum in enumerate(each.scheduled_min_replicas):
            with places.at(*at, "scheduled_min_replicas", i):
                check_schedule(minimum)
            if each.max_replicas is not None and not each.min_replicas <= minimum.replicas <= each.max_replicas:
                key = (*at, "scheduled_min_replicas", i, "replicas")
                raise places.error(key, f"{minimum.replicas}; expected {each.min_replicas} to {each.max_replicas}")
    there = {pool.model.name for _, pool in pools}
    there |= {part.model.name for combo in fleet.combos if combo.replicas for part in combo.parts}
    for i, combo in enumerate(fleet.combos):
        if (model := combo.parts[0].model.name) not in there:
            raise places.error(("combos", i, "replicas"), f"0, and nothing else serves {model}; expected at least 1")
