"""Changes of a fleet file, single or combined, and untried changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from headway.config.strict_yaml import Key, Places, change, spell


class Change(Struct, frozen=True):
    """A key of the fleet file, and its new value."""

    key: tuple[str | int, ...]
    value: Any

    def __hash__(self) -> int:  # a value may be a list
        return hash(self.key)


class Candidate(Struct, frozen=True):
    """Changes that are made together."""

    kinds: tuple[str, ...]
    name: str
    changes: tuple[Change, ...]

    def __hash__(self) -> int:
        return hash(self.name)

    def document(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """The fleet's document with the changes."""
        return change(document, Places(), {each.key: (spell(each.key), each.value) for each in self.changes})[0]

    @property
    def values(self) -> dict[Key, Any]:
        return {each.key: each.value for each in self.changes}


class LeftOut(Struct, frozen=True):
    """A change that was not tried, with the reason."""

    kind: str
    name: str
    reason: str
    needs: str = ""
    """The measurement, or the key of the fleet file, that is needed to try it."""


def together(candidates: Sequence[Candidate]) -> Candidate:
    """One candidate with the changes of several candidates, which must change different keys."""
    return Candidate(
        tuple(dict.fromkeys(kind for each in candidates for kind in each.kinds)),
        " and ".join(each.name for each in candidates),
        tuple(one for each in candidates for one in each.changes),
    )


def agree(one: Candidate, other: Candidate) -> bool:
    """Whether no key of one candidate equals or contains a key of the other candidate."""
    return not any(
        a.key[: len(b.key)] == b.key or b.key[: len(a.key)] == a.key for a in one.changes for b in other.changes
    )
