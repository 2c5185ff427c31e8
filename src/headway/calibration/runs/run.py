"""One measured run, as a load generator or Headway's own records describe it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from headway.core.errors import HeadwayError

Floats = npt.NDArray[np.float64]
Object = Mapping[str, Any]

SHORTEST_S = 1e-4
"""Shortest plausible time per token."""
LONGEST_S = 100.0
KEPT = ("requested_rps", "burstiness", "concurrency", "is_greedy", "settings", "pool", "notes")
"""Properties that a part of a run shares with the run."""
STATISTICS = ("mean", "p90", "p99")
SETTINGS = {
    "tp": ("tp", "tensor_parallel_size", "tp_size"),
    "pp": ("pp", "pipeline_parallel_size", "pp_size"),
    "max_num_seqs": ("max_num_seqs", "max_running_requests", "max_batch_size"),
    "max_num_batched_tokens": ("max_num_batched_tokens", "chunked_prefill_size", "max_num_tokens"),
    "prefix_tokens": ("prefix_tokens", "prefix_len", "random_prefix_len", "shared_prefix_len"),
    "num_prefixes": ("num_prefixes", "prefix_repetition_num_prefixes"),
}
"""Settings that a run's file may contain, with their names in engines and load generators."""


class RequestRows(Struct, frozen=True):
    """The succeeded requests of a run in order of their starts, as columns. NaN: unknown."""

    start_s: Floats
    """Start times on any clock."""
    prompt_tokens: Floats
    output_tokens: Floats
    ttft_s: Floats
    e2e_s: Floats
    cached_tokens: Floats
    """Prompt tokens that the engine found in its prefix cache."""

    @staticmethod
    def of(rows: Sequence[Sequence[float]]) -> RequestRows:
        """The columns from one tuple per request, with the fields in order."""
        table = np.array(rows, "f8").reshape(-1, len(RequestRows.__struct_fields__))
        table = table[np.argsort(table[:, 0], kind="stable")]
        return RequestRows(*table.T.copy())

    def __len__(self) -> int:
        return len(self.start_s)


class MeasuredRun(Struct, frozen=True):
    """One load on one engine, and its measurements. Times are in seconds; NaN: the file does not give it."""

    where: str
    """The file, and the place in it."""
    model: str
    """The model's name in the file; empty if it has none."""
    num_requests: int
    """Number of requests that succeeded."""
    rate_rps: float
    """Requests per second that succeeded."""
    prompt_tokens: float
    """Mean prompt tokens."""
    output_tokens: float
    """Mean output tokens."""
    latencies_s: dict[str, float]
    """Latencies by `ttft_mean`, `tpot_mean` (over requests), `itl_mean` (over tokens), `e2e_mean`, `ttft_p90`, ..."""
    requested_rps: float | None = None
    """Requested rate; None: requests were sent as fast as `concurrency` allows."""
    burstiness: float = 1.0
    """Shape of the gaps between arrivals, a gamma distribution: 1 is a Poisson process, infinity a constant rate."""
    concurrency: int | None = None
    """Maximum number of requests in flight at a time; None: unlimited."""
    is_greedy: bool | None = None
    """Whether requests asked for temperature 0; None: the file does not say."""
    cached_tokens: float = 0.0
    """Mean cached prompt tokens."""
    settings: dict[str, int] = field(default_factory=dict)
    """Settings by the keys of `SETTINGS`."""
    pool: str = ""
    """The fleet's pool that was measured; empty if the file has no pools."""
    rows: RequestRows | None = None
    notes: tuple[str, ...] = ()
    """Requests and values that were left out or assumed."""

    @property
    def fault(self) -> str:
        """Why the run cannot be used; empty if it can be used."""
        if not self.num_requests and self.notes:
            return "; ".join(self.notes)
        known = {
            "rate_rps": self.rate_rps,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "ttft_s": self.latencies_s["ttft_mean"],
            "tpot_s": self.latencies_s["tpot_mean"],
        }
        for name, value in known.items():
            if not 0 < value < math.inf:
                return f"{name} is {value:g}; expected a number above 0"
        if self.output_tokens < 2:
            return "one output token a request does not give a time per token"
        ttft_s, tpot_s = known["ttft_s"], known["tpot_s"]
        if not SHORTEST_S < tpot_s < LONGEST_S:
            return f"{tpot_s:g} s per output token; is the unit right?"
        e2e_s, itl_s = self.latencies_s["e2e_mean"], self.latencies_s["itl_mean"]
        implied_s = ttft_s + tpot_s * (self.output_tokens - 1)
        if e2e_s < math.inf and not 0.5 < e2e_s / implied_s < 2:
            return f"E2E of {e2e_s:g} s contradicts TTFT and TPOT, which make {implied_s:g} s: mixed units?"
        if itl_s < math.inf and not 0.1 < itl_s / tpot_s < 10:
            return f"ITL of {itl_s:g} s contradicts TPOT of {tpot_s:g} s: mixed units?"
        return ""

    def is_same(self, other: MeasuredRun) -> bool:
        """Whether two files describe one run, such as AIPerf's summary and its requests."""
        if self.num_requests != other.num_requests or (self.model and other.model and self.model != other.model):
            return False
        pairs = ((self.latencies_s[key], other.latencies_s[key]) for key in ("ttft_mean", "tpot_mean"))
        return all(math.isclose(a, b, rel_tol=2e-3, abs_tol=2e-5) for a, b in pairs)


def latencies_s(given: Mapping[str, float], output_tokens: float) -> dict[str, float]:
    """All latencies by their keys; NaN if neither given nor implied by the other latencies.

    E2E is TTFT plus the time per token after the first, so each follows from the other two.
    """
    keys = [f"{kind}_{name}" for kind in ("ttft", "tpot", "itl", "e2e") for name in STATISTICS]
    found = {key: given.get(key, math.nan) for key in keys}
    gaps, after = output_tokens - 1, found["e2e_mean"] - found["ttft_mean"]
    if math.isnan(found["e2e_mean"]):
        found["e2e_mean"] = found["ttft_mean"] + gaps * found["tpot_mean"]
    for key in ("tpot_mean", "itl_mean"):
        if math.isnan(found[key]):
            found[key] = after / gaps if gaps > 0 and not math.isnan(after) else found["tpot_mean"]
    return found


def run_of(rows: RequestRows, where: str, model: str, **given: Any) -> MeasuredRun:
    """The run that consists of these requests. Raises HeadwayError without requests."""
    if not len(rows):
        raise HeadwayError(f"{where}: no request has succeeded")
    gaps = rows.output_tokens - 1
    many = gaps > 0
    after_s = (rows.e2e_s - rows.ttft_s)[many]
    found: dict[str, float] = {}
    tpot_s = after_s / gaps[many]
    for kind, values in (("ttft", rows.ttft_s), ("e2e", rows.e2e_s), ("tpot", tpot_s)):
        if len(values):
            found |= {f"{kind}_mean": float(values.mean())}
            found |= {f"{kind}_{name}": float(np.percentile(values, int(name[1:]))) for name in STATISTICS[1:]}
    found["itl_mean"] = float(after_s.sum() / gaps[many].sum()) if many.any() else math.nan
    starts_s = rows.start_s[~np.isnan(rows.start_s)]
    duration_s = given.pop("duration_s", None)
    if duration_s is None:
        duration_s = float((rows.start_s + rows.e2e_s).max() - rows.start_s.min()) if len(starts_s) else math.nan
    cached = rows.cached_tokens[~np.isnan(rows.cached_tokens)]
    return MeasuredRun(
        where=where,
        model=model,
        num_requests=len(rows),
        rate_rps=len(rows) / duration_s if duration_s else math.nan,
        prompt_tokens=float(rows.prompt_tokens.mean()),
        output_tokens=float(rows.output_tokens.mean()),
        latencies_s=latencies_s(found, float(rows.output_tokens.mean())),
        cached_tokens=float(cached.mean()) if len(cached) else 0.0,
        rows=rows,
        **given,
    )


def first_requests(run: MeasuredRun, num: int) -> MeasuredRun:
    """The run restricted to its first `num` requests, if the file has more."""
    rows = run.rows
    if rows is None or len(rows) <= num:
        return run
    first = RequestRows(*(getattr(rows, name)[:num] for name in RequestRows.__struct_fields__))
    kept = {name: getattr(run, name) for name in KEPT}
    return run_of(first, run.where, run.model, duration_s=num / run.rate_rps, **kept)


def number(values: Object, name: str) -> float:
    """The number under a key; NaN if it is missing."""
    value = values.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def objects(value: Any, where: str) -> Object:
    """The value, if it is an object. Raises HeadwayError if it is not."""
    if not isinstance(value, dict):
        raise HeadwayError(f"{where}: expected an object, found {type(value).__name__}")
    return value


def settings_in(values: Object) -> dict[str, int]:
    """The settings among a file's keys."""
    found = {}
    for name, keys in SETTINGS.items():
        given = [str(values[key]) for key in keys if str(values.get(key, "")).isdigit()]
        if given:
            found[name] = int(given[0])
    return found
