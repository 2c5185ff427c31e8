"""The sentences of a paper's abstract, each with the claims that decide it: one claim for every reading that was
run."""

from __future__ import annotations

from importlib.resources import files
from typing import Literal

import msgspec


class Reading(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One interpretation of the sentence, and the claim that judges it."""

    claim: str
    """The claim's id."""
    reading: str
    chosen: Literal["before", "after"]
    """Whether the reading was fixed before any run of the sentence's readings was seen."""


class Sentence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A statement of the abstract, in our words."""

    says: str
    readings: tuple[Reading, ...]
    experiment: str
    """The single experiment that would change the verdict."""


def read_abstract(package: str) -> tuple[Sentence, ...]:
    """The sentences in `abstract.yaml` of a package."""
    return msgspec.yaml.decode((files(package) / "abstract.yaml").read_bytes(), type=tuple[Sentence, ...])
