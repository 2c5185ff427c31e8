"""Engines that run the same model in the same way -> pools of a fleet file, and the GPU that they seem to have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from headway import catalog
from headway.calibration.serving import catalogued_model
from headway.catalog.load import has_measured_kernels
from headway.core.errors import HeadwayError
from headway.core.fleet import Engine, Gpu, Model, Parallel
from headway.perf.memory import plan
from headway.perf.speculation import step_model
from headway.serving.discover.probe import FoundEngine, unknown

LIKELY = 0.25
"""Largest difference, as a logarithm, between what an engine shows and what a GPU would, for a guess of the GPU."""
UNMEASURED = 0.1
"""The same, added for a GPU whose kernels nobody measured: of several that fit, the known one is guessed."""
ALIKE = 0.02
"""Smallest difference between two guesses by which one is better."""
TPS = (1, 2, 4, 8)
"""Tensor parallelism that is tried where engines do not say it."""
PROFILES = {"vllm": "vllm", "sglang": "sglang", "llama.cpp": "llama.cpp"}


class FoundPool(Struct, frozen=True):
    """One entry of `fleet`, and what a reader should know about its keys."""

    entry: dict[str, Any]
    notes: dict[str, str]
    """By key."""
    unknown: tuple[str, ...]
    """What no engine said."""


def pools(
    engines: Sequence[FoundEngine], gpu: str | None = None, token_s: dict[str, float] | None = None
) -> list[FoundPool]:
    """One pool for each kind of engine, in the order of the addresses.

    `gpu`: of all of them. `token_s`: measured seconds a token of one request alone, by address.
    """
    groups: list[list[FoundEngine]] = []
    for engine in engines:
        same = next((group for group in groups if _is_alike(group[0], engine)), None)
        if same is None:
            groups.append([engine])
        else:
            same.append(engine)
    names: set[str] = set()
    return [_pool(group, gpu, token_s or {}, names) for group in groups]


def _is_alike(one: FoundEngine, other: FoundEngine) -> bool:
    """Whether both may be replicas of one pool.

    The size of the KV cache differs a little from start to start, the folder of the weights from machine to machine.
    """
    plain = {"url": "", "kv_capacity_tokens": None, "is_idle": None, "weights": ""}
    return replace(one, **plain) == replace(other, **plain) and _weights(one) == _weights(other)


def _weights(engine: FoundEngine) -> str:
    """A repository, or the last part of a path."""
    path = PurePosixPath(engine.weights.replace("\\", "/").rstrip("/"))
    is_repository = len(path.parts) == 2 and path.parts[0] not in ("/", ".", "..", "~")
    return str(path) if is_repository else path.name


def _pool(group: Sequence[FoundEngine], gpu: str | None, token_s: dict[str, float], names: set[str]) -> FoundPool:
    one = group[0]
    model = catalogued(one)
    notes: dict[str, str] = {}
    entry: dict[str, Any] = {"name": _name(one, names)}
    entry["model"] = one.model if model is None else model.name
    if model is None:
        notes["model"] = "not in the catalog: served; simulated with `model: {config: FOLDER}` and a gpu"
    elif one.model != model.name:
        notes["model"] = f"the engines call it {one.model}"
    engine = profile(one)
    kv_tokens = min((each.kv_capacity_tokens for each in group if each.kv_capacity_tokens), default=None)
    tp = one.tp or 1
    if model is not None:
        guess = _guess(one, model, engine, kv_tokens, token_s.get(one.url), gpu)
        if guess.gpu or gpu:
            entry["gpu"], tp = guess.gpu or gpu, guess.tp
            notes["gpu"] = f"{'given' if gpu else 'a guess'}: {guess.why}"
        else:
            notes["name"] = f"without a gpu, served and not simulated: {guess.why}"
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


def catalogued(engine: FoundEngine) -> Model | None:
    """The catalog's model that an engine runs; None: it has none of that name."""
    for name in (engine.weights, engine.model):
        try:
            return catalogued_model(name.removesuffix(".gguf"))
        except HeadwayError:
            continue
    return None


def profile(engine: FoundEngine) -> Engine | None:
    """The catalog's profile of this engine and version; None: OpenAI's API is all that is known."""
    name = PROFILES.get(engine.api)
    if engine.api == "vllm" and engine.version[:1].isdigit():
        try:
            return catalog.engine(f"vllm-{'.'.join(engine.version.split('.')[:2])}")
        except HeadwayError:
            pass
    return None if name is None else catalog.engine(name)


def _engine_entry(engine: Engine, found: FoundEngine, gpu: str | None) -> str | dict[str, Any]:
    """The profile's name, and what differs from it on this GPU."""
    known = catalog.engine_on(catalog.engine(engine.name), None if gpu is None else catalog.gpu(gpu))
    changed = {name: value for name, value in found.settings.items() if getattr(known, name) != value}
    if found.version and found.version != known.version:
        changed["version"] = found.version
    return {"name": engine.name, **changed} if changed else engine.name


def _name(engine: FoundEngine, names: set[str]) -> str:
    """A pool's name that no other one has."""
    base = engine.model.rstrip("/").rsplit("/", 1)[-1].lower() or "pool"
    name, num = base, 2
    while name in names:
        name, num = f"{base}-{num}", num + 1
    names.add(name)
    return name


class _Guess(Struct, frozen=True):
    gpu: str
    """Empty: none fits."""
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
    """The GPU of the catalog, or the given one, and the tensor parallelism that fit best."""
    known = found.tp or 1
    if token_s is not None and token_s <= 0:  # two answers that took as long
        token_s = None
    if engine is None or (kv_tokens is None and token_s is None):
        return _Guess("", known, "neither the engines' KV cache nor their speed is known")
    ranked = []
    for each in (catalog.gpu(gpu),) if gpu else catalog.gpus():
        unmeasured = 0.0 if has_measured_kernels(each.name) else UNMEASURED
        for tp in (found.tp,) if found.tp else TPS:
            try:
                changed = replace(catalog.engine_on(engine, each), **found.settings)
                far, shown = _distance(each, model, changed, Parallel(tp, found.pp or 1), kv_tokens, token_s)
            except HeadwayError:
                continue  # the model does not fit, or its shape is impossible
            ranked.append((far + unmeasured, tp, each.name, shown))
    if not ranked:
        return _Guess("", known, f"the model fits on {'it' if gpu else 'no GPU of the catalog'} in no shape")
    far, tp, name, shown = min(ranked)
    if far > LIKELY:
        return _Guess("", known, f"nothing fits what the engines show; the nearest, {name}: {shown}")
    others = sorted({one for near, _, one, _ in ranked if near - far < ALIKE} - {name})
    return _Guess(name, tp, shown + (f"; so would {', '.join(others[:5])}" if others else ""))


def _distance(
    gpu: Gpu, model: Model, engine: Engine, parallel: Parallel, kv_tokens: int | None, token_s: float | None
) -> tuple[float, str]:
    """How far what the engine shows is from what this GPU would show, and both in words."""
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
