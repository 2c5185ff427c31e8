"""An engine's ordering, read from vLLM's `--additional-config` or the environment, and the supported versions of vLLM.

The keys of `--additional-config` are `headway_ordering`, a policy as in a scenario (`"pascal"`, or `{"name": "edf",
"default_deadline_s": 30}`, or `module:Class` for a user's own class), and `headway_reasoning_end`, the token ids that
end the reasoning. `HEADWAY_ORDERING` is read where the first key is absent: a name, or a JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.core.errors import HeadwayError, unknown
from headway.core.policy import Ordering, SharingOrdering
from headway.policies import resolve
from headway.policies.resolve import PolicyChoice

VERSIONS = ("0.25", "0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32", "0.33")
"""Releases of vLLM whose scheduler this package extends. The schedulers' methods differ between releases."""
ORDERING, REASONING_END = "headway_ordering", "headway_reasoning_end"
VARIABLE = "HEADWAY_ORDERING"
INFO_METRIC = "headway:ordering_info"
"""The metric whose label `ordering` names the ordering that an engine runs."""


@dataclass(frozen=True)
class Settings:
    """The settings of the scheduler at its start."""

    ordering: PolicyChoice[Ordering]
    reasoning_start: tuple[int, ...]
    """Token ids that begin the reasoning; () = unknown."""
    reasoning_end: tuple[int, ...]
    """Token ids that end the reasoning; () = unknown: all tokens are answers."""


def require_known(version: str) -> None:
    """Raise HeadwayError for a version of vLLM whose scheduler this package does not know."""
    if not any(version == known or version.startswith(f"{known}.") for known in VERSIONS):
        raise HeadwayError(f"vLLM {version}: headway.vllm.Scheduler knows the scheduler of vLLM {', '.join(VERSIONS)}")


def read(
    config: Mapping[str, Any],
    environ: Mapping[str, str],
    parser_start: Sequence[int] | None = None,
    parser_end: Sequence[int] | None = None,
) -> Settings:
    """The settings. The reasoning tokens come from vLLM's parser unless the config sets them.

    Raises HeadwayError for unknown keys, orderings and values.
    """
    for key in config:
        if key.startswith("headway_") and key not in (ORDERING, REASONING_END):
            raise unknown("key", key, (ORDERING, REASONING_END), "--additional-config")
    spec = config[ORDERING] if ORDERING in config else _of_variable(environ.get(VARIABLE, ""))
    choice = resolve.ordering(spec)
    if isinstance(choice(), SharingOrdering):
        raise HeadwayError(f"ordering {choice}: it orders the gateway's queue only; an engine cannot run it")
    end = config.get(REASONING_END)
    if end is None:
        return Settings(choice, tuple(parser_start or ()), tuple(parser_end or ()))
    return Settings(choice, tuple(parser_start or ()), _token_ids(end))


def _of_variable(value: str) -> Any:
    if not value.strip():
        raise HeadwayError(
            f"no ordering: expected {VARIABLE}=NAME in the environment, "
            f"or --additional-config '{{\"{ORDERING}\": NAME}}'"
        )
    if not value.lstrip().startswith("{"):
        return value.strip()
    try:
        return json.loads(value)
    except ValueError as error:
        raise HeadwayError(f"{VARIABLE}: expected a name or a JSON object, got {value!r} ({error})") from None


def _token_ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    if not ids or any(type(each) is not int or each < 0 for each in ids):
        what = f"{REASONING_END}: expected a token id or a list of them, got {value!r}"
        raise HeadwayError(f"--additional-config: {what}")
    return tuple(ids)
