"""Placeholders of variables and files in what users write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.config import placeholders
from headway.config.strict_yaml import Places, parse
from headway.core.errors import HeadwayError

ENVIRONMENT = {"VLLM_KEY": "k1", "HOST": "db"}


def resolved(value: Any, folder: Path) -> Any:
    return placeholders.resolved(value, ("gateway",), Places("fleet.yaml"), folder, ENVIRONMENT)


def test_texts_at_any_depth_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("k2\n")
    given = {"a": "${VLLM_KEY}", "b": [{"c": "x-${HOST}-${file:secret}"}, 3], "d": "$HOST {HOST}", "e": None}
    assert resolved(given, tmp_path) == {"a": "k1", "b": [{"c": "x-db-k2"}, 3], "d": "$HOST {HOST}", "e": None}
    assert placeholders.has_placeholder(given) and not placeholders.has_placeholder({"d": "$HOST {HOST}", "n": [1]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("${VLM_KEY}", r"no variable 'VLM_KEY'; did you mean VLLM_KEY\?"),
        ("${}", "no variable ''; expected it to be set"),
        ("${file:nowhere}", "nowhere: No such file or directory; expected a readable file"),
    ],
)
def test_what_cannot_be_replaced(text: str, message: str, tmp_path: Path) -> None:
    data, places = parse(f"gateway:\n  dashboard: {text}\n", "fleet.yaml")
    with pytest.raises(HeadwayError, match=rf"fleet\.yaml:2: gateway\.dashboard: .*{message}"):
        placeholders.resolved(data["gateway"], ("gateway",), places, tmp_path, ENVIRONMENT)
