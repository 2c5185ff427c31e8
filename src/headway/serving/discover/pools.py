"""Groups engines with the same model and settings into pools of a fleet file, and guesses their GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from headway import catalog
from headway.catalog.load import CPUS, has_measured_kernels
from headway.core.errors import HeadwayError
from headway.core.fleet import Engine, Gpu, Model, Parallel, pool_name
from headway.perf.memory import plan
from headway.perf.speculation import step_model
from headway.serving.discover.model import shape_of
from headway.serving.discover.probe import FoundEngine, unknown

LIKELY = 0.25
"""Largest logarithmic difference between an engine's figures and a GPU's figures at which the GPU is a possible
guess."""
UNMEASURED = 0.1
"""Added to the difference of a GPU whose kernels were not measured, so that a measured GPU is preferred."""
ALIKE = 0.02
"""Smallest difference at which one guess is better than another."""
SAME_CACHE = 0.1
"""Largest difference between the logarithms of the KV cache sizes of one pool's replicas. KV cache sizes of different
GPUs differ by more."""
TPS = (1, 2, 4, 8)
"""Tensor parallelism values tried for engines that do not report it."""
PROFILES = {"vllm": "vllm", "sglang": "sglang", "llama.cpp": "llama.cpp"}


class FoundPool(Struct, frozen=True):
    """One entry of `fleet`, with notes for the reader on its keys."""

    entry: dict[str, Any]
    notes: dict[str, str]
    """Notes by key."""
    unknown: tuple[str, ...]
    """Facts that no engine reported."""

    @property
    def model(self) -> str:
        """The name by which requests and `workload` call the model."""
        return str(self.entry.get("served_name") or self.entry["model"])


def pools(
    engines: Sequence[FoundEngine], gpu: str | None = None, token_s: dict[str, float] | None = None
) -> list[FoundPool]:
    """One pool for each kind of engine, in the order of the addresses.

    `gpu`: the GPU of all engines. `token_s`: measured seconds per token of a request that runs alone, by address.
    """
    names: set[str] = set()
    return [_pool(group, gpu, token_s or {}, names) for group in grouped(engines)]


def grouped(engines: Sequence[FoundEngine]) -> list[list[FoundEngine]]:
    """The engines of each pool."""
    groups: list[list[FoundEngine]] = []
    for engine in engines:
        same = next((group for group in groups if _is_alike(group[0], engine)), None)
        if same is None:
            groups.append([engine])
        else:
            same.append(engine)
    return groups


def _is_alike(one: FoundEngine, other: FoundEngine) -> bool:
    """Whether two engines may be replicas of one pool. The size of the KV cache differs slightly between starts, and
    the folder of the weights differs between machines.
    """
    plain = {"url": "", "kv_capacity_tokens": None, "is_idle": None, "weights": ""}
    caches = [each.kv_capacity_tokens for each in (one, other) if each.kv_capacity_tokens]
    if len(caches) == 2 and abs(math.log(caches[0] / caches[1])) > SAME_CACHE:
        return False
    return replace(one, **plain) == replace(other, **plain) and _weights(one) == _weights(other)


def _weights(engine: FoundEngine) -> str:
    """A repository, or the last component of a path."""
    path = PurePosixPath(engine.weights.replace("\\", "/").rstrip("/"))
    is_repository = len(path.parts) == 2 and path.parts[0] not in ("/", ".", "..", "~")
    return str(path) if is_repository else path.name


def _pool(group: Sequence[FoundEngine], gpu: str | None, token_s: dict[str, float], names: set[str]) -> FoundPool:
    one = group[0]
    found = shape_of(one)
    model = found.model
    notes: dict[str, str] = {}
    entry: dict[str, Any] = {"name": pool_name(one.model.rstrip("/").rsplit("/", 1)[-1], names), "model": found.entry}
    if found.note:
        notes["model"] = found.note
    engine = profile(one)
    kv_tokens = min((each.kv_capacity_tokens for each in group if each.kv_capacity_tokens), default=None)
    tp = one.tp or 1
    if model is not None:
        measured_s = next((token_s[each.url] for each in group if each.url in token_s), None)
        guess = _guess(one, model, engine, kv_tokens, measured_s, gpu)
        if guess.gpu or gpu:
            entry["gpu"], tp = guess.gpu or gpu, guess.tp
            notes["gpu"] = f"{'given' if gpu else 'a guess'}: {guess.why}"
        else:
            notes["name"] = f"without a gpu, served and not simulated: {guess.why}"
    if isinstance(found.entry, dict):
        entry |= _by_file(one.model, found.entry["config"], notes) if "gpu" not in entry else {"served_name": one.model}
    entry |= {name: num for name, num in (("tp", tp), ("pp", one.pp or 1)) if num > 1}
    if engine is not None:
        entry["engine"] = _engine_entry(engine, one, entry.get("gpu"))
    else:
        entry["api"] = one.api
    if kv_tokens and model is not None:
        entry["kv_capacity_tokens"] = kv_tokens
    if one.kv_events:
        entry["kv_events"] = {"endpoint": one.kv_events.replace("*", "{host}")}
    lists = [f"LoRA adapters: {', '.join(one.adapters)}"] if one.adapters else []
    if one.other_models:
        lists.append(f"also {', '.join(one.other_models[:5])}: add a pool for each that clients ask for")
    if lists:
        notes["endpoints"] = "; ".join(lists)
    entry["endpoints"] = [each.url for each in group]
    return FoundPool(entry, notes, tuple(unknown(one)))


def _by_file(name: str, file: str, notes: dict[str, str]) -> dict[str, Any]:
    """The key `model` of a pool that is merely served, which needs a name."""
    notes["model"] = f"with a gpu: `model: {{config: {file}}}` and `served_name: {name}`"
    return {"model": name}


def profile(engine: FoundEngine) -> Engine | None:
    """The catalog's profile of this engine and version; None if only its support of OpenAI's API is known."""
    name = PROFILES.get(engine.api)
    if engine.api == "vllm" and engine.version[:1].isdigit():
        try:
            return catalog.engine(f"vllm-{'.'.join(engine.version.split('.')[:2])}")
        except HeadwayError:
            pass
    return None if name is None else catalog.engine(name)


def _engine_entry(engine: Engine, found: FoundEngine, gpu: str | None) -> str | dict[str, Any]:
    """The profile's name, and its differences on this GPU."""
    known = catalog.engine_on(catalog.engine(engine.name), None if gpu is None else catalog.gpu(gpu))
    changed = {name: value for name, value in found.settings.items() if getattr(known, name) != value}
    if found.version and found.version != known.version:
        changed["version"] = found.version
    return {"name": engine.name, **changed} if changed else engine.name


class _Guess(Struct, frozen=True):
    gpu: str
    """Name of the GPU; empty if none fits."""
    tp: int
    why: str


def _guess(
    found: FoundEngine,
    model: Model,
    engine: Engine | None,
    kv_tokens: int | None,
    token_s: float | None,
    gpu: str | None,
) -> _Guess:
    """(GPU, tensor parallelism) that fit best. The GPU is one of the catalog, or the given GPU."""
    known = found.tp or 1
    is_by_speed = found.api == "llama.cpp"  # its cache is as large as its options say, whatever the memory
    if is_by_speed:
        kv_tokens = None
    if token_s is not None and token_s <= 0:  # a longer and a shorter answer took the same time
        token_s = None
    if engine is None or (kv_tokens is None and token_s is None):
        what = "speed was not measured" if is_by_speed else "KV cache is not known, nor their speed measured"
        return _Guess("", known, f"the engines' {what}")
    ranked = []
    for each in (catalog.gpu(gpu),) if gpu else _candidates(found):
        unmeasured = 0.0 if is_by_speed or has_measured_kernels(each.name) else UNMEASURED
        for tp in (known,) if found.tp or is_by_speed else TPS:
            try:
                changed = replace(catalog.engine_on(engine, each), **found.settings)
                far, shown = _distance(each, model, changed, Parallel(tp, found.pp or 1), kv_tokens, token_s)
            except HeadwayError:
                continue  # the model does not fit, or its shape is impossible
            ranked.append((far + unmeasured, tp, each.name, shown))
    if not ranked:
        return _Guess("", known, f"the model fits on {'it' if gpu else 'no GPU of the catalog'} in no shape")
    if is_by_speed:
        return _by_speed(ranked, bool(gpu))
    far, tp, name, shown = min(ranked)
    if far > LIKELY:
        return _Guess("", known, f"nothing fits what the engines show; the nearest, {name}: {shown}")
    others = sorted({one for near, _, one, _ in ranked if near - far < ALIKE} - {name})
    return _Guess(name, tp, shown + (f"; so would {', '.join(others[:5])}" if others else ""))


def _by_speed(ranked: Sequence[tuple[float, int, str, str]], is_given: bool) -> _Guess:
    """The catalog's GPU with the nearest speed. A processor is preferred if its speed is about as near, because small
    models are about as fast on a processor as on a GPU.

    No GPU of the catalog was measured with llama.cpp. If no speed is near, the user must calibrate.
    """
    nearest, _, _, _ = min(ranked)
    alike = [each for each in ranked if each[0] <= nearest + LIKELY]
    far, tp, name, shown = min((each for each in alike if each[2] in CPUS), default=min(ranked))
    if far > LIKELY:
        shown += f"{'' if is_given else ', the nearest'}; `headway load --calibrate` fits the speed"
    others = [one for _, _, one, _ in sorted(alike) if one != name]
    return _Guess(name, tp, shown + (f"; as near: {', '.join(others[:5])}" if others else ""))


def _candidates(found: FoundEngine) -> list[Gpu]:
    """The GPUs that an engine may have; for llama.cpp, processors too."""
    return [each for each in catalog.gpus() if found.api == "llama.cpp" or each.name not in CPUS]


def _distance(
    gpu: Gpu, model: Model, engine: Engine, parallel: Parallel, kv_tokens: int | None, token_s: float | None
) -> tuple[float, str]:
    """(distance between the engine's figures and those expected on this GPU, both in words)."""
    far, shown = 0.0, []
    if kv_tokens is not None:
        expected = plan(model, gpu, engine, parallel).kv_capacity_tokens
        far = max(far, abs(math.log(kv_tokens / expected)))
        shown.append(f"{kv_tokens:,} tokens of KV cache, {expected:,} expected")
    if token_s is not None:
        expected_s = step_model(model, gpu, engine, parallel).line(1, 64)[0]
        far = max(far, abs(math.log(token_s / expected_s)))
        shown.append(f"{1e3 * token_s:.1f} ms a token, {1e3 * expected_s:.1f} expected")
    return far, "; ".join(shown)
