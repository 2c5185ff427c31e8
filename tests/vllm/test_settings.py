"""What the scheduler inside vLLM is told, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import HeadwayError
from headway.vllm.settings import read

_CONFIG = "--additional-config"
REFUSED: list[tuple[Mapping[str, Any], Mapping[str, str], str]] = [
    (
        {},
        {},
        "no ordering: expected HEADWAY_ORDERING=NAME in the environment, or "
        f"{_CONFIG} '{{\"headway_ordering\": NAME}}'",
    ),
    ({}, {"HEADWAY_ORDERING": "pascl"}, "unknown ordering 'pascl'; did you mean 'pascal'?"),
    (
        {"headway_ordering": {"name": "pascal", "quantum": 5}},
        {},
        "ordering pascal: unknown argument 'quantum'; did you mean 'quantum_tokens'?",
    ),
    ({"headway_ordring": "edf"}, {}, f"{_CONFIG}: unknown key 'headway_ordring'; did you mean 'headway_ordering'?"),
    ({"headway_ordering": "fair"}, {}, "ordering fair: it orders the gateway's queue only; an engine cannot run it"),
    ({"headway_ordering": "vtc"}, {}, "ordering vtc: it orders the gateway's queue only; an engine cannot run it"),
    (
        {"headway_ordering": "fcfs", "headway_reasoning_end": "</think>"},
        {},
        f"{_CONFIG}: headway_reasoning_end: expected a token id or a list of them, got '</think>'",
    ),
    (
        {"headway_ordering": "nowhere:Mine"},
        {},
        "ordering nowhere:Mine: no module 'nowhere' here or among the installed packages",
    ),
]


@pytest.mark.parametrize(("config", "environ", "message"), REFUSED)
def test_refused(config: Mapping[str, Any], environ: Mapping[str, str], message: str) -> None:
    with pytest.raises(HeadwayError) as caught:
        read(config, environ)
    assert str(caught.value) == message


def test_json_that_is_broken_is_refused() -> None:
    with pytest.raises(HeadwayError, match=r"^HEADWAY_ORDERING: expected a name or a JSON object, got '\{edf' \("):
        read({}, {"HEADWAY_ORDERING": "{edf"})


def test_ordering_is_the_configs_else_the_environments() -> None:
    environ = {"HEADWAY_ORDERING": '{"name": "edf", "default_deadline_s": 30}'}
    assert str(read({}, environ).ordering) == "edf(default_deadline_s=30)"
    assert str(read({"headway_ordering": "pascal", "other": 1}, environ).ordering) == "pascal"
    assert read({"headway_ordering": "fcfs"}, {}).reasoning_end == ()


def test_tokens_that_end_the_reasoning_are_the_parsers_unless_given() -> None:
    assert read({"headway_ordering": "pascal"}, {}, [1], [2, 3]).reasoning_end == (2, 3)
    given = read({"headway_ordering": "pascal", "headway_reasoning_end": 9}, {}, [1], [2, 3])
    assert (given.reasoning_start, given.reasoning_end) == ((1,), (9,))


def test_users_own_class_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_in_vllm.py").write_text(
        "class LongestFirst:\n    quantum = None\n    preemptive = False\n\n"
        "    def rank(self, request, now):\n        return -request.prompt_tokens\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert type(read({"headway_ordering": "mine_in_vllm:LongestFirst"}, {}).ordering()).__name__ == "LongestFirst"


def test_little_is_imported_into_vllms_process() -> None:
    """vLLM's environment has msgspec and numpy; the rest of what Headway needs may be missing there."""
    code = (
        "import sys; own = set(sys.stdlib_module_names); import headway.vllm.settings, headway.vllm.ranking;"
        "tops = {name.split('.')[0] for name in sys.modules};"
        "parts = {name.split('.')[1] for name in sys.modules if name.startswith('headway.')};"
        "print(sorted(tops - own - {'__main__'}), sorted(parts))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().replace(", 'typing_extensions'", "") == (
        "['headway', 'msgspec', 'numpy'] ['core', 'policies', 'vllm']"
    )
