"""Names chosen by clients, limited in length and in number before they are stored.

Such names are those of tenants, models, regions and requests. A name is truncated when it is read, so that no label,
key or log line has a longer name. Permanent counts by name count all names beyond the limit together.
"""

from __future__ import annotations

import hashlib
import re

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
MAX_CHARS = 128
OTHER = "other"
"""The name that stands for all names beyond the limit."""
_DIGITS = 16


def cut(name: str) -> str:
    """A name of at most `MAX_CHARS` characters. A longer name becomes its beginning and distinguishing digits."""
    if len(name) <= MAX_CHARS:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
    return f"{name[: MAX_CHARS - _DIGITS - 1]}~{digest}"


def is_request_id(text: str) -> bool:
    """Whether a client's name of its request can be stored, and forwarded in a header."""
    return _REQUEST_ID.fullmatch(text) is not None


class KnownNames:
    """The first names that occur, up to a limit."""

    def __init__(self, max_names: int) -> None:
        self._max_names = max_names
        self._names: set[str] = set()

    def known(self, name: str) -> str:
        """The name if it is one of the first names, else `OTHER`."""
        if name not in self._names:
            if len(self._names) >= self._max_names:
                return OTHER
            self._names.add(name)
        return name
