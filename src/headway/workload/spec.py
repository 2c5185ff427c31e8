"""The `workload:` section of a scenario, and the source of requests that it stands for.

Three ways to say what arrives: a `trace`, a `builtin` workload by name, or a synthetic one from `arrivals` and
lengths (`prompt_tokens` and `output_tokens`, or a `mix`). What else stands in the section applies to any of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import resources
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from headway.core.errors import HeadwayError, unknown
from headway.workload.arrivals import Arrivals, Burst, Replay, of_rate
from headway.workload.closed_loop import ClosedLoop
from headway.workload.demand import Demand
from headway.workload.generate import rows_of, turns_of
from headway.workload.lengths import Geometric, Length, check_length
from headway.workload.promises import Slo, Tier, TierMix, positive
from headway.workload.quality_spec import QualitySpec, scored
from headway.workload.sessions import Sessions, flattened
from headway.workload.source import Source
from headway.workload.table import Workload
from headway.workload.tiermix import shares
from headway.workload.trace import TraceSource


class Trace(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests from a file."""

    path: str
    """The file, gzip or not, relative to the scenario's folder. With `arrivals` beside it, the file gives only the
    requests, in their order, and needs no arrival times."""
    format: str | None = None
    """azure, mooncake, mooncake-lengths, burstgpt, servegen, headway-csv or headway-parquet; nothing =
    recognised by the first line."""
    limit: int | None = None
    """Read no more than this many rows."""
    rate_scale: float = 1.0
    """2 = twice the rate, in half the time. Applied after from_s and to_s, and to `arrivals` where they are given."""
    sort: bool = False
    """Sort by arrival; otherwise rows out of order are an error."""
    skip_bad: bool = False
    """Leave bad lines out and count them; otherwise the first one is an error."""
    from_s: float = 0.0
    """Leave out what arrives before this time of the trace, which becomes the new 0."""
    to_s: float | None = None
    """Leave out what arrives at this time of the trace or later."""
    models: dict[str, str] | None = None
    """What the trace's model names mean here, as {GPT-4: llama-3.1-70b}. Nothing: model names of other
    people's traces are left out (a note says so), those of our own files are kept."""

    def __post_init__(self) -> None:
        positive(self, "limit", "rate_scale")
        if not 0 <= self.from_s < (float("inf") if self.to_s is None else self.to_s):
            raise ValueError(f"from_s {self.from_s}, to_s {self.to_s}; expected 0 <= from_s < to_s")


class Prefixes(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests in groups that share their first tokens, as with a few system prompts."""

    num_groups: int
    """How many different shared beginnings there are."""
    prefix_tokens: Length
    """Tokens of a shared beginning. They come on top of `prompt_tokens`."""
    share: float = 1.0
    """The part of requests (with sessions: of sessions) that has one."""
    skew: float = 0.0
    """Zipf exponent of the groups' popularity: 0 = all alike, 1 = the k-th is asked for 1/k as often."""

    def __post_init__(self) -> None:
        positive(self, "num_groups")
        if not 0 <= self.share <= 1:
            raise ValueError(f"share: {self.share}; expected 0 to 1")
        if not 0 <= self.skew < float("inf"):
            raise ValueError(f"skew: {self.skew}; expected 0 or more")
        check_length("prefix_tokens", self.prefix_tokens, "prompt_tokens")


class SessionsSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Conversations of several turns. A turn's prompt is all that was said before and `prompt_tokens` new
    ones; it arrives its think time after the turn before ended. A turn that does not finish ends its
    session."""

    turns: Length = msgspec.field(default_factory=lambda: Geometric(mean=3.0))
    """Turns of a session."""
    think_s: float = 30.0
    """Mean pause between an answer's end and the next turn."""
    think_cv: float = 1.0
    """Spread of the pauses (lognormal), standard deviation over mean; 0 = all alike."""

    def __post_init__(self) -> None:
        if isinstance(self.turns, str):
            raise ValueError(f"turns: {self.turns!r}; expected a number or a distribution")
        check_length("turns", self.turns, "prompt_tokens")
        if not 0 <= self.think_s < float("inf") or not 0 <= self.think_cv < float("inf"):
            raise ValueError("think_s, think_cv: expected 0 or more")


class Part(Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of request in a `mix`."""

    share: float = 1.0
    """Its part of all requests, relative to the other parts' shares."""
    builtin: str | None = None
    """Lengths of this built-in workload; what is given besides takes the place of its own."""
    prompt_tokens: Length | None = None
    """As outside of a mix."""
    output_tokens: Length | None = None
    """As outside of a mix."""
    reasoning_tokens: Length | None = None
    """As outside of a mix."""
    correlation: float | None = None
    """As outside of a mix."""

    def __post_init__(self) -> None:
        if not 0 <= self.share < float("inf"):
            raise ValueError(f"share: {self.share}; expected 0 or more")
        _check_lengths(self)
        if self.builtin is None and (self.prompt_tokens is None or self.output_tokens is None):
            raise ValueError("mix: expected builtin, or prompt_tokens and output_tokens")


class WorkloadSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """What arrives. See the module's first lines for the three ways to say it."""

    trace: str | Trace | None = None
    """Requests from a file: its path, or more about it."""
    builtin: str | None = None
    """A workload that comes with Headway: chat, chat-sessions, reasoning, long-context, alpaca-eval, arena-hard,
    arena-hard-reasoning-heavy, math-500, gpqa, live-code-bench, pascal-reasoning, pascal-answering, ktier,
    sageserve-july-2025, sageserve-july-2025-scout, sageserve-nov-2024. Every key given here besides takes the place
    of its own."""
    num_requests: int | None = None
    """How many requests (with sessions: turns of all sessions)."""
    duration_s: float | None = None
    """Requests (with sessions: sessions) begin before this time. With num_requests too: what ends first."""
    arrivals: float | Arrivals | None = None
    """When requests (with sessions: sessions) arrive. A bare number is a Poisson rate per second."""
    prompt_tokens: Length | None = None
    """Prompt lengths: a number, a distribution, or the name of a built-in one: azure-conv,
    mooncake-conversation, servegen-reasoning."""
    output_tokens: Length | None = None
    """Output lengths, in the same ways. With reasoning_tokens: those of the answer, reasoning not counted."""
    reasoning_tokens: Length | None = None
    """Reasoning tokens, which come before the answer's and on top of them."""
    correlation: float | None = None
    """Rank correlation (Spearman) of prompt, reasoning and answer within a request, each pair alike: 1 = the longer
    the one, the longer the others; nothing = 0, drawn one by one."""
    mix: tuple[Part, ...] | None = None
    """Several kinds of request, drawn for each, in place of prompt_tokens, output_tokens and reasoning_tokens."""
    quality: QualitySpec | None = None
    """What each model's answers score and how long they are, for a cascade; in place of prompt_tokens and
    output_tokens."""
    prefixes: Prefixes | None = None
    """Groups of requests that share their first tokens."""
    sessions: SessionsSpec | None = None
    """Conversations of several turns."""
    slo: Slo | None = None
    """What every request was promised."""
    tiers: tuple[Tier, ...] | TierMix | None = None
    """Tiers, drawn for each request (with sessions: each session), with promises of their own; or a mix by name."""
    models: str | dict[str, float] | None = None
    """The model asked for, or several with their shares; nothing = whichever the fleet serves. With demand: keep
    only these models, at so many times their rate."""
    regions: str | dict[str, float] | None = None
    """Where requests come from: a region, or several with their shares. With demand: keep only these regions, at so
    many times their rate."""
    demand: Demand | None = None
    """Demand by tier, model and region that moves over the week, in place of prompt_tokens and output_tokens: made up
    from populations, at `arrivals` requests per second on average, or from a file of series."""
    scale: float | None = None
    """Of demand: so many times its rate; nothing = 1."""
    start_hour: float | None = None
    """Of demand: the hour of the week, or of the file, at which the workload begins; nothing = 0, Monday midnight."""
    surges: tuple[Burst, ...] | None = None
    """Of demand: stretches with more requests than usual, times counted from the workload's start."""
    timeout_s: float | None = None
    """Clients give up this long after arrival; nothing = they wait."""
    concurrency: int | None = None
    """A closed loop: this many clients, each sending its next request when its last one ended. Arrival times
    do not count then."""
    think_s: float | None = None
    """Of a closed loop: pause between an end and the client's next request; nothing = 0."""

    def __post_init__(self) -> None:
        positive(self, "num_requests", "duration_s", "timeout_s", "concurrency", "scale")
        if isinstance(self.arrivals, (int, float)):
            of_rate(self.arrivals)
        _check_lengths(self)
        self._check_mix()
        if isinstance(self.tiers, tuple) and len({t.tier for t in self.tiers}) < max(len(self.tiers), 1):
            raise ValueError("tiers: expected one or more, each with a number of its own")
        if self.concurrency is not None and self.sessions is not None:
            raise ValueError("concurrency and sessions: expected one of them; sessions make a loop of their own")
        if self.think_s is not None and (self.concurrency is None or not 0 <= self.think_s < float("inf")):
            raise ValueError("think_s: expected 0 or more, together with concurrency")
        if self.trace is not None and self.builtin is not None:
            raise ValueError("trace and builtin: expected one of them")
        if self.demand is None and self.builtin is None:
            for name in ("scale", "start_hour", "surges"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}: goes with demand")
        if self.start_hour is not None and not 0 <= self.start_hour < float("inf"):
            raise ValueError(f"start_hour: {self.start_hour}; expected 0 or more")
        if self.quality is not None:
            self._check_quality()
        elif self.trace is not None:
            self._check_trace()
        elif self.demand is not None:
            self._check_demand(self.demand)
        elif self.builtin is None:
            self._check_synthetic()

    def _check_mix(self) -> None:
        if self.mix is None:
            return
        for name in ONE_KIND:
            if getattr(self, name) is not None:
                raise ValueError(f"mix and {name}: expected one of them; the parts of a mix say their own")
        if not self.mix:
            raise ValueError("mix: expected one part or more")

    def _check_quality(self) -> None:
        for name in (*ONE_KIND, "mix", "prefixes", "sessions", "demand", "trace", "builtin"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: not with quality, which says lengths")
        self._check_arrivals()

    def _check_trace(self) -> None:
        for name in (*ONE_KIND, "mix", "prefixes", "sessions", "demand"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: not with a trace; it is for synthetic workloads")
        if self.arrivals is not None:
            return
        for name, hint in (("num_requests", "say trace.limit, or arrivals too"), ("duration_s", "say trace.to_s")):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: not with a trace; {hint}")

    def _check_demand(self, demand: Demand) -> None:
        for name in (*ONE_KIND, "mix", "prefixes", "sessions"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: not with demand, which says lengths by model")
        if demand.populations is None and self.arrivals is not None:
            raise ValueError("arrivals: not with demand.path, which says how many; use scale")
        if demand.populations is not None and not isinstance(self.arrivals, (int, float)):
            raise ValueError("arrivals: expected requests per second, as the populations' mean over a week")
        if demand.populations is not None and self.num_requests is None and self.duration_s is None:
            raise ValueError("num_requests: missing; say how many requests, or duration_s")

    def _check_synthetic(self) -> None:
        if self.mix is None and (self.prompt_tokens is None or self.output_tokens is None):
            raise ValueError("expected trace, builtin, mix, or prompt_tokens and output_tokens")
        self._check_arrivals()

    def _check_arrivals(self) -> None:
        if self.arrivals is None and self.concurrency is None:
            raise ValueError("arrivals: missing; say a rate per second, as in `arrivals: 8`")
        endless = self.num_requests is None and not isinstance(self.arrivals, Replay)
        if endless and (self.duration_s is None or self.arrivals is None):
            raise ValueError("num_requests: missing; say how many requests, or duration_s")


ONE_KIND = ("prompt_tokens", "output_tokens", "reasoning_tokens", "correlation")
"""The lengths of requests that are all of one kind."""


def build(spec: WorkloadSpec, seed: int, base_dir: str | Path = ".") -> Source:
    """The source of requests, the same for the same spec and seed. Paths are relative to `base_dir`."""
    full = resolved(spec)
    with enough_memory():
        if full.sessions is not None:
            return Sessions(turns_of(full, seed, Path(base_dir)))
        rows = _rows(full, seed, Path(base_dir))
        if full.concurrency is not None:
            return ClosedLoop(rows, full.concurrency, full.think_s or 0.0)
        return TraceSource(rows)


def generate(spec: WorkloadSpec, seed: int, base_dir: str | Path = ".") -> Workload:
    """The requests as a table, without reactions.

    Turns of a session stand their think time apart, as if answers took no time; of a closed loop, every
    request at its own arrival time.
    """
    full = resolved(spec)
    with enough_memory():
        if full.sessions is not None:
            return flattened(turns_of(full, seed, Path(base_dir)))
        return _rows(full, seed, Path(base_dir))


def _rows(full: WorkloadSpec, seed: int, base_dir: Path) -> Workload:
    if full.quality is None:
        return rows_of(full, seed, base_dir)
    bare = structs.replace(full, quality=None, prompt_tokens=1, output_tokens=1)
    return scored(rows_of(bare, seed, base_dir), full.quality, seed, base_dir).validate("workload")


@contextmanager
def enough_memory() -> Iterator[None]:
    """Says in words that a workload is too large."""
    try:
        yield
    except MemoryError as error:
        raise HeadwayError(f"workload: does not fit in memory ({error}); ask for fewer requests") from None


def resolved(spec: WorkloadSpec) -> WorkloadSpec:
    """The spec with what its names stand for filled in. HeadwayError for a built-in workload that there is not."""
    full = spec if spec.builtin is None else _over(_builtin(spec.builtin, "workload: builtin"), spec)
    if full.mix is not None:
        full = structs.replace(full, mix=tuple(_filled(part) for part in full.mix))
    if isinstance(full.tiers, TierMix):
        drawn = enumerate(shares(full.tiers.mix, full.tiers.num_tiers))
        full = structs.replace(full, tiers=tuple(Tier(tier, share) for tier, share in drawn))
    return full


def _over(known: WorkloadSpec, spec: WorkloadSpec) -> WorkloadSpec:
    """A built-in workload with what `spec` says in place of its own."""
    said = {n: v for n in spec.__struct_fields__ if (v := getattr(spec, n)) is not None and n != "builtin"}
    base = {n: getattr(known, n) for n in spec.__struct_fields__}
    if "num_requests" in said or "duration_s" in said:
        base |= {"num_requests": None, "duration_s": None}
    if "concurrency" in said:
        base |= {"sessions": None} if known.demand is not None else {"arrivals": None, "sessions": None}
    if "mix" in said:
        base |= dict.fromkeys(ONE_KIND)
    try:
        return WorkloadSpec(**{**base, **said})
    except ValueError as error:
        raise HeadwayError(f"workload: {error}") from None


def _filled(part: Part) -> Part:
    """The part with the lengths of its built-in workload."""
    if part.builtin is None:
        return part
    known = _builtin(part.builtin, "workload: mix: builtin")
    if known.mix is not None:
        raise HeadwayError(f"workload: mix: builtin: {part.builtin} is a mix itself; expected a workload of one kind")
    own = {n: getattr(known, n) if (said := getattr(part, n)) is None else said for n in ONE_KIND}
    return Part(part.share, **own)


def _builtin(name: str, where: str) -> WorkloadSpec:
    known = builtin_workloads()
    if name not in known:
        raise unknown("builtin workload", name, known, where)
    return known[name]


@cache
def builtin_workloads() -> dict[str, WorkloadSpec]:
    """The workloads that come with Headway, by name, written as a user would write them."""
    text = resources.files("headway.workload").joinpath("workloads.yaml").read_bytes()
    return msgspec.yaml.decode(text, type=dict[str, WorkloadSpec])


def _check_lengths(said: Part | WorkloadSpec) -> None:
    """The lengths of requests of one kind, and how they move together."""
    for name in ("prompt_tokens", "output_tokens", "reasoning_tokens"):
        length: Length | None = getattr(said, name)
        if length is not None:
            check_length(name, length, name)
    if said.correlation is not None and not 0 <= said.correlation <= 1:
        raise ValueError(f"correlation: {said.correlation}; expected 0 to 1")
