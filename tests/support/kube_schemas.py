"""Kubernetes' own schemas of its objects, in which an unknown key is a fault."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

RELEASES = ("1.29", "1.37")
"""The oldest and the newest release whose schemas are tried."""
CUSTOM = {"InferencePool", "PodMonitor"}
"""Kinds of other projects, of which there are no schemas here."""


def faults(objects: Iterable[dict[str, Any]]) -> Iterator[str]:
    """What a cluster of each release would refuse. Skips the test where the schemas are not installed."""
    schemas = pytest.importorskip("kubernetes_validate")
    for each in objects:
        for release in RELEASES if each["kind"] not in CUSTOM else ():
            try:
                schemas.validate(each, release, strict=True)
            except (schemas.ValidationError, schemas.SchemaNotFoundError) as error:
                yield f"{release}: {each['kind']} {each['metadata']['name']}: {error.message}"
