"""Finds the shape of the model that an engine runs: in its weights' file, or in the catalog."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from headway import catalog
from headway.calibration.serving import catalogued_model
from headway.catalog.hf import GGUF
from headway.core.errors import HeadwayError
from headway.core.fleet import Model
from headway.perf.params import num_params, weights_bytes
from headway.serving.discover.probe import FoundEngine

SAME_SIZE = 0.05
"""Largest relative difference between the sizes that an engine reports and those of its file."""
OTHER_TYPE = 0.15
"""Relative difference from which weights are of another type than the catalog's."""


class FoundModel(Struct, frozen=True):
    """The shape of an engine's model."""

    model: Model | None
    """None: unknown."""
    entry: Any
    """The key `model` of a fleet file."""
    note: str


def shape_of(engine: FoundEngine) -> FoundModel:
    """The model of an engine's GGUF file if this machine has it, else the catalog's."""
    why = ""
    if engine.weights.endswith(GGUF):
        try:
            model = _in_file(engine)
            return FoundModel(model, {"config": str(Path(engine.weights).absolute())}, "")
        except HeadwayError as error:
            why = str(error)
    for name in (engine.weights, engine.model):
        try:
            return _catalogued(engine, catalogued_model(name.removesuffix(GGUF)))
        except HeadwayError:
            continue
    if not why:
        stated = f" ({_shown(engine.sizes)})" if engine.sizes else ""
        why = f"not in the catalog{stated}: served; simulated with `model: {{config: FOLDER}}` and a gpu"
    else:
        why = f"not in the catalog, and {why}: served; simulated with `model: {{config: FILE{GGUF}}}` and a gpu"
    return FoundModel(None, engine.model, why)


def _in_file(engine: FoundEngine) -> Model:
    """The model in the engine's file. Raises HeadwayError if this machine has no such file, or one of other sizes."""
    file, sizes = Path(engine.weights), engine.sizes
    if not file.is_file():
        stated = f" ({_shown(sizes)})" if sizes else ""
        raise HeadwayError(f"{file}{stated} is not on this machine")
    model = catalog.model_from_config(file)
    for key, found in (("n_params", num_params(model)), ("size", weights_bytes(model))):
        if key in sizes and abs(found / sizes[key] - 1) > SAME_SIZE:
            raise HeadwayError(f"{file} is another model on this machine ({key} is {found:,.0f}; {_shown(sizes)})")
    return model


def _catalogued(engine: FoundEngine, model: Model) -> FoundModel:
    notes = [] if engine.model == model.name else [f"the engines call it {engine.model}"]
    size, own = engine.sizes.get("size"), weights_bytes(model)
    if size is not None and abs(size / own - 1) > OTHER_TYPE:
        notes.append(
            f"its weights have {size / 1e9:.3g} GB, the catalog's {own / 1e9:.3g}: `model: {{config: FILE{GGUF}}}` "
            "has their types"
        )
    return FoundModel(model, model.name, "; ".join(notes))


def _shown(sizes: dict[str, int]) -> str:
    """The sizes that the engine reports, in words."""
    words = {"n_params": "weights", "size": "bytes", "n_embd": "wide", "n_ctx_train": "tokens of context"}
    return ", ".join(f"{sizes[key]:,} {word}" for key, word in words.items() if key in sizes)
