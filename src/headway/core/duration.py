"""Durations with units, as users write them: `450ms`, `2s`, `1m`, `1h30m`. A plain number is seconds."""

from __future__ import annotations

import re
import warnings
from math import inf
from typing import Any

from headway.core.errors import HeadwayError, SloWarning

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PART = rf"(\d+\.?\d*|\.\d+)\s*({'|'.join(sorted(_UNITS_S, key=len, reverse=True))})"
DURATION = re.compile(rf"\s*(?:{_PART}\s*)+")
EXPECTED = "expected seconds, or a duration such as 450ms, 2s, 1m or 1h"
LONGEST_S = {"ttft": 120.0, "tpot": 1.0}
"""Longest plausible SLOs in seconds; a larger number probably means milliseconds."""


def seconds(value: str | float) -> float:
    """Parse a duration into seconds. Raises HeadwayError unless the value is a finite, nonnegative duration."""
    if isinstance(value, str):
        if DURATION.fullmatch(value):
            return sum(float(number) * _UNITS_S[unit] for number, unit in re.findall(_PART, value))
        try:
            value = float(value)
        except ValueError:
            raise HeadwayError(f"{value!r}; {EXPECTED}") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
        raise HeadwayError(f"{value!r}; {EXPECTED}")
    return float(value)


def seconds_of(name: str, value: str | float | None) -> float | None:
    """The duration of an argument, above 0; None stays None. Warns like `unlikely`; raises HeadwayError with the
    argument's name for other values."""
    if value is None:
        return None
    try:
        found = seconds(value)
    except HeadwayError as error:
        raise HeadwayError(f"{name}: {error}") from None
    if not found:
        raise HeadwayError(f"{name}: {value!r}; expected more than 0")
    if text := unlikely(name, found):
        warnings.warn(text, SloWarning, stacklevel=3)
    return found


def in_seconds(key: object, value: Any) -> Any:
    """A value of any depth whose durations under keys of seconds (`ttft_s`) are replaced by numbers.

    Other texts stay unchanged; the reader of the value reports them.
    """
    if isinstance(value, dict):
        return {name: in_seconds(name, each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        made = [in_seconds(key, each) for each in value]
        return made if isinstance(value, list) else tuple(made)
    return seconds(value) if isinstance(value, str) and is_seconds(key) and DURATION.fullmatch(value) else value


def is_seconds(key: object) -> bool:
    """Whether a key's unit is seconds: `ttft_s`, but not `bytes_per_s`."""
    return isinstance(key, str) and key.endswith("_s") and (key == "per_s" or not key.endswith("_per_s"))


def unlikely(name: str, value: float | None) -> str:
    """A warning for an SLO (`ttft_s`, `--ttft-p99`) that is probably in milliseconds; "": no warning."""
    kind = next((each for each in LONGEST_S if each in name), "")
    if value is None or not kind or value <= LONGEST_S[kind]:
        return ""
    likely = f"a number is seconds, and {value:g}ms is {value / 1000:g} s"
    return f"{name}: {value:,.6g} s is long for a {kind.upper()}; {likely}"
