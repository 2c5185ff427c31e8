"""Secrets outside of users' files: `${NAME}` from the environment, `${file:PATH}` from a mounted file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from headway.config.strict_yaml import Key, Places

_PLACEHOLDER = re.compile(r"\$\{([^{}]*)\}")
_FILE = "file:"


def resolved(value: Any, at: Key, places: Places, base_dir: Path, environment: Mapping[str, str]) -> Any:
    """The value with every placeholder in its texts replaced, at any depth.

    Paths are relative to `base_dir`. Raises HeadwayError if a variable is not set or a file cannot be read.
    """
    if isinstance(value, Mapping):
        return {key: resolved(each, (*at, key), places, base_dir, environment) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [resolved(each, (*at, i), places, base_dir, environment) for i, each in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replaced(found: re.Match[str]) -> str:
        name = found[1]
        if name.startswith(_FILE):
            return _text(base_dir / name.removeprefix(_FILE), at, places)
        if name not in environment:
            near = get_close_matches(name, environment, n=1)
            hint = f"did you mean {near[0]}?" if near else "expected it to be set"
            raise places.error(at, f"the environment has no variable {name!r}; {hint}")
        return environment[name]

    return _PLACEHOLDER.sub(replaced, value)


def has_placeholder(value: Any) -> bool:
    """Whether any text in the value has a placeholder."""
    if isinstance(value, Mapping):
        return any(map(has_placeholder, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_placeholder, value))
    return isinstance(value, str) and _PLACEHOLDER.search(value) is not None


def variables_of(value: Any) -> list[str]:
    """The environment variables used by placeholders in the value, sorted and without duplicates."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return sorted({name for each in value for name in variables_of(each)})
    names = _PLACEHOLDER.findall(value) if isinstance(value, str) else []
    return sorted({name for name in names if not name.startswith(_FILE)})


def _text(file: Path, at: Key, places: Places) -> str:
    """A file's text without its final line end."""
    try:
        return file.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no text"
        raise places.error(at, f"{file}: {reason}; expected a readable file") from None
