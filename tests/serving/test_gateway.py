"""A fleet file's settings: what `headway serve` refuses before it listens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httptools")

import serving
from headway import serving as composition
from headway.core.errors import HeadwayError


@pytest.mark.parametrize(
    ("gateway", "words"),
    [
        ({"api_keys": ["secret"]}, "api_keys[0]"),
        ({"api_keys": [{"sha256": "0" * 64, "tiers": 1}]}, "did you mean 'tier'?"),
        ({"api_keys": [{"sha256": "0" * 64, "tokens_per_minute": 0}]}, "tokens_per_minute"),
        ({"batches": {"store": "mysql://a/b"}}, "'mysql' is not a known database"),
        ({"batches": {"store": "postgresql://a:b:c/d"}}, "not a database address"),
        ({"batches": {"store": "postgresql://a/b?user=c"}}, "only sslmode"),
        ({"batches": {"store": "no/such/folder/a.sqlite"}}, "is no folder"),
        ({"batches": {"max_line": 1}}, "did you mean 'max_lines'?"),
    ],
)
def test_invalid_settings_are_refused(tmp_path: Path, gateway: dict[str, Any], words: str) -> None:
    path = serving.fleet_file(tmp_path, ["http://127.0.0.1:1"], gateway=gateway)
    with pytest.raises(HeadwayError) as told:
        composition.load(path)
    assert words in str(told.value)
