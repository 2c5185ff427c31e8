"""Types of the weights of a GGUF file, by the mean bits of each part of the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from headway.core.errors import HeadwayError
from headway.core.model import Layers, Model

TOLERANCE = 0.02
"""Largest relative difference between the weights of a part and those of the layers that were read."""
_PLAIN = {"BF16": "bf16", "F16": "fp16"}


def with_weights_of(model: Model, facts: Mapping[str, Any], file: Path) -> Model:
    """The model with the types of `facts`, which has `weights`, `bits` and `kind` of each part: `mixers`, `mlp`,
    `experts`, `embeddings`.

    Raises HeadwayError if the layers that were read from the keys have another number of weights than the tensors.
    """
    for part, read in _weights(model).items():
        stored = facts.get(part, {}).get("weights", 0)
        if abs(stored - read) > TOLERANCE * max(stored, read):
            raise HeadwayError(
                f"{file}: its {part} have {stored:,} weights, and {read:,.0f} by its keys: not understood; "
                "expected the shape in a config.json"
            )
    types = {part: _type_of(each) for part, each in facts.items()}
    main = next((types[part] for part in ("experts", "mlp", "mixers") if part in types), "bf16")

    def typed(layer: Layers) -> Layers:
        mixer, mlp = types.get("mixers", main), types.get("mlp", main)
        return replace(
            layer,
            mixer_dtype="" if mixer == main or not layer.mixer_params else mixer,
            mlp_dtype="" if mlp == main or not (layer.mlp_width or layer.has_experts) else mlp,
        )

    layers = tuple(typed(each) for each in model.all_layers)
    is_plain = layers == model.all_layers
    return replace(
        model,
        dtype=main,
        embedding_dtype=types.get("embeddings", "bf16"),
        layers=model.layers if is_plain else layers,
    )


def _weights(model: Model) -> dict[str, float]:
    """The weights of each part of the model, without norms and biases."""
    hidden, matrices, moe = model.hidden_size, 3 if model.gated_mlp else 2, model.moe
    embeddings = float(model.vocab_size * hidden * (1 if model.tie_embeddings else 2))
    found = {"mixers": 0.0, "mlp": 0.0, "experts": 0.0, "embeddings": embeddings + model.other_params}
    for each in model.all_layers:
        found["mixers"] += each.num * each.mixer_params
        found["mlp"] += each.num * matrices * float(hidden) * each.mlp_width
        if each.has_experts and moe is not None:
            shared = matrices * float(hidden) * moe.shared_intermediate_size + hidden * moe.num_experts
            routed = matrices * float(moe.hidden_size or hidden) * moe.intermediate_size * moe.num_experts
            found["mlp"] += each.num * shared
            found["experts"] += each.num * routed
    return found


def _type_of(part: Mapping[str, Any]) -> str:
    return _PLAIN.get(str(part["kind"])) or f"q{float(part['bits']):.4g}"
