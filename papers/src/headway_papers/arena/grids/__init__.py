"""The built-in grids."""

from __future__ import annotations

from pathlib import Path

from headway.core.errors import unknown

_FOLDER = Path(__file__).parent


def builtin(name: str) -> Path:
    """The file of a built-in grid. Raises HeadwayError for an unknown name."""
    files = {path.stem: path for path in _FOLDER.glob("*.yaml")}
    if name not in files:
        raise unknown("built-in grid", name, files)
    return files[name]


def is_builtin(name: str) -> bool:
    """Whether a built-in grid has this name."""
    return (_FOLDER / f"{name}.yaml").is_file()
