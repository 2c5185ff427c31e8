"""Looks up a model by name: in the catalog, in a local folder, in the cache of Hugging Face's hub."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from headway.catalog import load
from headway.catalog.hf import local_config, model_from_config
from headway.core.errors import HeadwayError
from headway.core.model import Model


def find_model(name: str, base_dir: Path = Path(), assume: bool = False) -> Model:
    """The model with this name in the catalog, of a folder with a config.json, or of the hub's local cache.

    `base_dir`: base of relative paths. Raises HeadwayError if there is none; its message explains how to give a config.
    """
    try:
        return load.model(name)
    except HeadwayError as error:
        config = local_config(name, base_dir)
        if config is None:
            raise HeadwayError(f"{error}; {_give_a_config(name)}") from None
    return model_from_config(
        config, name=name if "/" in name and config.parent != base_dir / name else None, assume=assume
    )


def is_repository(config: str, base_dir: Path = Path()) -> bool:
    """Whether a `config` names a repository in the hub's local cache, and not a file or folder."""
    return not (base_dir / config).exists() and local_config(config, base_dir) is not None


def config_of(model: str, base_dir: Path = Path()) -> Path | None:
    """The config.json of a model that is a folder or in the hub's cache; None if the catalog has the model, or nothing
    has it."""
    with suppress(HeadwayError):
        load.model(model)
        return None
    return local_config(model, base_dir)


def model_of_config(config: str | Path, base_dir: Path = Path(), assume: bool = False) -> Model:
    """The model of a config.json, of its folder, or of a repository in the hub's local cache."""
    path, name = base_dir / config, str(config)
    if not path.exists() and (found := local_config(name, base_dir)) is not None:
        return model_from_config(found, name, assume)
    return model_from_config(path, assume=assume)


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
