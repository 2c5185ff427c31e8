"""Look up a model by name: in the catalog, in a local folder, in the cache of Hugging Face's hub."""

from __future__ import annotations

from pathlib import Path

from headway.catalog.hf import local_config, model_from_config
from headway.catalog.load import model
from headway.core.errors import HeadwayError
from headway.core.model import Model


def find_model(name: str, base_dir: Path = Path(), assume: bool = False) -> Model:
    """The model of this name in the catalog, of a folder with a config.json, or of the hub's local cache.

    `base_dir`: where relative paths begin. HeadwayError if there is none, which says how to give a config.
    """
    try:
        return model(name)
    except HeadwayError as error:
        config = local_config(name, base_dir)
        if config is None:
            raise HeadwayError(f"{error}; {_give_a_config(name)}") from None
    return model_from_config(config, name=name if "/" in name and config.parent != base_dir / name else None,
                             assume=assume)  # fmt: skip


def _give_a_config(name: str) -> str:
    if name.count("/") == 1:
        return (
            f"for another model give its config.json: hf download {name} --include '*.json' --local-dir DIR, and "
            "--model-config DIR, or `model: {config: DIR}` in a scenario"
        )
    return (
        "`headway catalog models` lists all; for another model give its config.json with --model-config, or "
        "`model: {config: PATH}` in a scenario"
    )
