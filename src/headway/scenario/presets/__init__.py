"""The scenario files shipped with Headway."""

from __future__ import annotations

from pathlib import Path

from headway.core.errors import unknown

_FILES = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}
BUILTINS = tuple(_FILES)
"""Names of the built-in scenarios."""


def builtin(name: str) -> Path:
    """The file of a built-in scenario. Raises HeadwayError for an unknown name."""
    if name not in _FILES:
        raise unknown("built-in scenario", name, _FILES)
    return _FILES[name]
