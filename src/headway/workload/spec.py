"""The `workload:` section of a scenario.

The requests come from a `trace`, from a `builtin` workload by name, or from a synthetic one with `arrivals` and lengths
(`prompt_tokens` and `output_tokens`, a `mix`, `quality` or `demand`). The other keys apply to all of them.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from math import inf
from typing import Literal

import msgspec
import numpy as np
from msgspec import Struct, structs

from headway.core.errors import HeadwayError, unknown
from headway.core.fleet import Sampling
from headway.workload.arrivals import DAY_S, WEEK_S, Arrivals, BurstWindow, Replay, check_positive, poisson_of_rate
from headway.workload.lengths import Geometric, Length, check_length
from headway.workload.quality_source import QualitySpec
from headway.workload.table import Floats
from headway.workload.tiers import SloSpec, TierMix, TierSpec, tier_shares


class TraceSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A file of requests, and the changes to them."""

    path: str
    """The file, gzip or not, or the folder of a run's records, relative to the scenario's folder. If `arrivals` is
    given too, the file's arrival times are ignored and may be missing. A CSV file of your own has the columns
    `prompt_tokens`, `output_tokens`, and `arrival_s`, `arrival_ms` or `timestamp`; ISO 8601 times and epochs (in s, ms,
    us or ns) start at 0."""
    format: str | None = None
    """azure, mooncake, mooncake-agents, bailian, mooncake-lengths, burstgpt, servegen, servegen-batch, headway-csv or
    headway-parquet; default: recognised by the first line."""
    limit: int | None = None
    """Read at most this many rows."""
    rate_scale: float = 1.0
    """2 = twice the rate, in half the time. Applied after from_s and to_s, and to `arrivals` if given."""
    sort: bool = False
    """Sort by arrival. Otherwise rows out of order are an error."""
    skip_bad: bool = False
    """Skip and count bad lines. Otherwise the first bad line is an error."""
    timestamp_unit: Literal["s", "ms"] | None = None
    """Unit of timestamps in JSON lines with the keys of Mooncake. Default: whole numbers are ms, fractions s."""
    block_tokens: int | None = None
    """Prompt tokens per hash id, in JSON lines with the keys of Mooncake. Default: 512, or the usual size that fits all
    prompts, with a note."""
    spread_ticks: bool = False
    """Spread requests with the same timestamp over the time to the next timestamp: Mooncake's conversations tick every
    3 s. Otherwise these requests arrive together, with a note."""
    from_s: float = 0.0
    """Drop requests that arrive before this time of the trace, which becomes the new 0."""
    to_s: float | None = None
    """Drop requests that arrive at this time of the trace or later."""
    models: dict[str, str] | None = None
    """Map from the trace's model names to names of this fleet, as {GPT-4: llama-3.1-70b}. Empty: model names of public
    traces are dropped (with a note); those of Headway's own files are kept."""
    without_models: tuple[str, ...] = ()
    """Leave out the requests for these models, by the names of this fleet."""

    def __post_init__(self) -> None:
        check_positive(self, "limit", "rate_scale", "block_tokens")
        if not 0 <= self.from_s < (float("inf") if self.to_s is None else self.to_s):
            raise ValueError(f"from_s {self.from_s}, to_s {self.to_s}; expected 0 <= from_s < to_s")


class PrefixGroups(Struct, frozen=True, forbid_unknown_fields=True):
    """Groups of requests that share their first tokens, as with a few system prompts."""

    num_groups: int
    """Number of different shared prefixes."""
    prefix_tokens: Length
    """Tokens of a shared prefix, in addition to `prompt_tokens`."""
    per_tenant: bool = False
    """Each tenant has `num_groups` prefixes of its own."""
    share: float = 1.0
    """Share of the requests that have a shared prefix; with sessions or agents: share of the sessions or programs."""
    skew: float = 0.0
    """Zipf exponent of the groups' popularity: 0 = all equal, 1 = group k is used 1/k as often as the first."""

    def __post_init__(self) -> None:
        check_positive(self, "num_groups")
        if not 0 <= self.share <= 1:
            raise ValueError(f"share: {self.share}; expected 0 to 1")
        if not 0 <= self.skew < float("inf"):
            raise ValueError(f"skew: {self.skew}; expected 0 or more")
        check_length("prefix_tokens", self.prefix_tokens, "prompt_tokens")


class SessionsSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Conversations of several turns. A turn's prompt is the conversation so far and `prompt_tokens` new tokens. A turn
    arrives its think time after the previous turn ended. A turn that does not finish ends its session."""

    turns: Length = msgspec.field(default_factory=lambda: Geometric(mean=3.0))
    """Number of turns of a session."""
    think_s: float = 30.0
    """Mean pause between an answer's end and the next turn."""
    think_cv: float = 1.0
    """Spread of the pauses (lognormal), standard deviation over mean; 0 = constant."""

    def __post_init__(self) -> None:
        if isinstance(self.turns, str):
            raise ValueError(f"turns: {self.turns!r}; expected a number or a distribution")
        check_length("turns", self.turns, "prompt_tokens")
        if not 0 <= self.think_s < float("inf") or not 0 <= self.think_cv < float("inf"):
            raise ValueError("think_s, think_cv: expected 0 or more")


class AgentsSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Agent programs: steps of a main thread, each a call whose prompt is all before and `prompt_tokens` new tokens
    (the task, then results of tools), with a tool between two steps. A step may call sub-agents, which run beside each
    other; the next step begins after all of them, with their last answers as new tokens. A call that does not finish
    ends what depends on it."""

    steps: Length = msgspec.field(default_factory=lambda: Geometric(mean=6.0))
    """Number of steps of the main thread."""
    tool_s: float = 4.0
    """Mean time of a tool, from the end of a step to the next one."""
    tool_cv: float = 1.5
    """Spread of these times (lognormal), standard deviation over mean; 0 = constant."""
    fan_out_share: float = 0.0
    """Share of the steps that call sub-agents before the next step."""
    fan_out: int = 3
    """Number of sub-agents called by a step that calls any."""
    sub_steps: int = 1
    """Calls of each sub-agent, one after the other, with tools between them."""
    sub_context: Literal["parent", "opening"] = "parent"
    """The start of a sub-agent's first prompt: its parent's whole context, or only the shared prefix."""

    def __post_init__(self) -> None:
        if isinstance(self.steps, str):
            raise ValueError(f"steps: {self.steps!r}; expected a number or a distribution")
        check_length("steps", self.steps, "prompt_tokens")
        check_positive(self, "fan_out", "sub_steps")
        if not 0 <= self.tool_s < inf or not 0 <= self.tool_cv < inf:
            raise ValueError("tool_s, tool_cv: expected 0 or more")
        if not 0 <= self.fan_out_share <= 1:
            raise ValueError(f"fan_out_share: {self.fan_out_share}; expected 0 to 1")


class MixPart(Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of request in a `mix`."""

    share: float = 1.0
    """Share of all requests, relative to the other parts."""
    builtin: str | None = None
    """Take lengths from this built-in workload. Other keys given here override its own."""
    prompt_tokens: Length | None = None
    """As in `workload`."""
    output_tokens: Length | None = None
    """As in `workload`."""
    reasoning_tokens: Length | None = None
    """As in `workload`."""
    correlation: float | None = None
    """As in `workload`."""

    def __post_init__(self) -> None:
        if not 0 <= self.share < float("inf"):
            raise ValueError(f"share: {self.share}; expected 0 or more")
        _check_lengths(self)
        if self.builtin is None and (self.prompt_tokens is None or self.output_tokens is None):
            raise ValueError("mix: expected builtin, or prompt_tokens and output_tokens")


class ModelLengths(Struct, frozen=True, forbid_unknown_fields=True):
    """Lengths of the requests for one model."""

    prompt_tokens: Length
    """As in `workload`."""
    output_tokens: Length
    """As in `workload`."""

    def __post_init__(self) -> None:
        check_length("prompt_tokens", self.prompt_tokens, "prompt_tokens")
        check_length("output_tokens", self.output_tokens, "output_tokens")


class Population(Struct, frozen=True, forbid_unknown_fields=True):
    """The requests of one tier, Poisson at each moment. The tier's `share` is its part of all requests."""

    tier: int
    """The tier, different for each population."""
    cells: dict[str, dict[str, float]]
    """Share of the tier's requests by region and model, relative to the other cells."""
    peak_to_trough: float = 1.0
    """Highest rate over lowest rate of a sine over the day."""
    peak_hour: float = 14.0
    """Hour of the day with the highest rate, 0 to 24."""
    days: tuple[float, ...] = (1.0,) * 7
    """Factor of each day of the week, Monday first."""
    noise_cv: float = 0.0
    """Spread (standard deviation over mean) of a lognormal random factor with mean 1, drawn for each cell."""
    noise_s: float = 3600.0
    """How long each random factor holds."""

    def __post_init__(self) -> None:
        shares = [share for by_model in self.cells.values() for share in by_model.values()]
        if not shares or not all(0 <= share < inf for share in shares) or not any(shares):
            raise ValueError("cells: expected regions, models and shares from 0, not all of them 0")
        if len(self.days) != 7 or not all(0 <= day < inf for day in self.days) or not any(self.days):
            raise ValueError("days: expected seven numbers from 0, not all of them 0")
        if not 1 <= self.peak_to_trough < inf or not 0 <= self.noise_cv < inf:
            raise ValueError("peak_to_trough, noise_cv: expected 1 or more, and 0 or more")
        check_positive(self, "noise_s")

    def shape(self, at_s: Floats) -> Floats:
        """The rate at these times of the week, relative to the mean over a week, without noise."""
        swing = (self.peak_to_trough - 1) / (self.peak_to_trough + 1)
        within_s = at_s % WEEK_S
        hours = 1 + swing * np.cos(2 * np.pi * (within_s / DAY_S - self.peak_hour / 24))
        days = np.array(self.days)[(within_s // DAY_S).astype("i8")]
        return np.asarray(hours * days / np.mean(self.days), "f8")


class SeriesDemand(Struct, frozen=True, forbid_unknown_fields=True):
    """Model, tier and regions of the requests that one series of a file counts."""

    model: str
    """The requested model."""
    tier: int = 0
    """The tier of its requests."""
    regions: str | dict[str, float] = ""
    """Origin: a region, or several with their shares."""


class DemandSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests by tier, model and region over time, from `populations` or from `path` and `series`."""

    lengths: dict[str, ModelLengths]
    """Keyed by model."""
    populations: tuple[Population, ...] | None = None
    """Synthetic demand, one population per tier."""
    path: str | None = None
    """A CSV file of series, gzip or not, relative to the scenario's folder: a column of times (time_s, time or
    timestamp) and columns of values; where columns hold text, each combination of texts is a series: `A prod`."""
    series: dict[str, SeriesDemand] = {}
    """The requests that each series of the file counts; series not named are left out."""
    counts: Literal["prompt_tokens", "requests"] = "prompt_tokens"
    """The unit of the file's values."""
    per_s: float = 1.0
    """Seconds that one value covers: 60 = values are per minute."""

    def __post_init__(self) -> None:
        if (self.populations is None) == (self.path is None):
            raise ValueError("demand: expected populations or path, one of them")
        if self.path is not None and not self.series:
            raise ValueError("series: missing; give the model of each series of the file")
        if self.populations is not None and len({p.tier for p in self.populations}) < max(len(self.populations), 1):
            raise ValueError("populations: expected one or more, each of a different tier")
        check_positive(self, "per_s")
        for model in self.models():
            if model not in self.lengths:
                raise ValueError(f"lengths: {model} is missing")

    def models(self) -> tuple[str, ...]:
        in_cells = [m for p in self.populations or () for by_model in p.cells.values() for m in by_model]
        return tuple(dict.fromkeys([*in_cells, *(each.model for each in self.series.values())]))


class LoraMix(Struct, frozen=True, forbid_unknown_fields=True):
    """LoRA adapters and their shares of the requests: named ones, or a number of them with Zipf's popularity."""

    shares: dict[str, float] | None = None
    """Adapters by name, with their shares relative to each other."""
    count: int | None = None
    """Instead of `shares`: the number of adapters, `adapter-0`, `adapter-1`, ..., most popular first."""
    skew: float = 1.0
    """With `count`: the share of adapter i is proportional to 1 / (i + 1)^skew; 0 = equal shares."""
    base_share: float = 0.0
    """Share of the requests for the model itself."""

    def __post_init__(self) -> None:
        if (self.shares is None) == (self.count is None):
            raise ValueError("loras: expected shares or count, one of them")
        if self.shares is not None and not (
            self.shares and min(self.shares.values()) >= 0 and any(self.shares.values())
        ):
            raise ValueError("shares: expected adapters and shares from 0, not all of them 0")
        check_positive(self, "count")
        if not 0 <= self.skew < inf or not 0 <= self.base_share <= 1:
            raise ValueError("skew, base_share: expected 0 or more, and 0 to 1")

    def all_shares(self) -> dict[str, float]:
        """The share of each adapter, and of the model itself as "". They sum to 1."""
        count = range(self.count or 0)
        shares = self.shares or {f"adapter-{i}": (i + 1.0) ** -self.skew for i in count}
        total = sum(shares.values())
        return {"": self.base_share} | {name: (1 - self.base_share) * share / total for name, share in shares.items()}


class WorkloadSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """The requests of a run, from one of three sources: a trace, a built-in workload, or a synthetic one."""

    trace: str | TraceSpec | None = None
    """Requests from a file: its path, or a section with options."""
    builtin: str | None = None
    """A workload that comes with Headway: chat, chat-sessions, agents, shared-prefix, reasoning, long-context,
    alpaca-eval, arena-hard, arena-hard-reasoning-heavy, math-500, gpqa, live-code-bench, pascal-reasoning,
    pascal-answering, ktier, sageserve-july-2025, sageserve-july-2025-scout, sageserve-nov-2024. Other keys given
    here override its own."""
    num_requests: int | None = None
    """Number of requests (with sessions or agents: all turns or calls)."""
    duration_s: float | None = None
    """Requests (with sessions or agents: these) begin before this time. With num_requests too: whichever is first."""
    arrivals: float | Arrivals | None = None
    """When requests (with sessions or agents: these) arrive. A bare number is a Poisson rate per second."""
    prompt_tokens: Length | None = None
    """Prompt lengths: a number, a distribution, or the name of a built-in one: azure-conv,
    mooncake-conversation, servegen-reasoning."""
    output_tokens: Length | None = None
    """Output lengths, given in the same ways. With reasoning_tokens: lengths of the answer without the reasoning."""
    reasoning_tokens: Length | None = None
    """Reasoning tokens, generated before the answer and in addition to it."""
    correlation: float | None = None
    """Rank correlation (Spearman) of prompt, reasoning and answer within a request, the same for each pair: 1 = all
    three grow together; default: 0, drawn independently."""
    mix: tuple[MixPart, ...] | None = None
    """Several kinds of request, one drawn for each, in place of prompt_tokens, output_tokens and reasoning_tokens."""
    quality: QualitySpec | None = None
    """Score and length of each model's answers, for a cascade, in place of prompt_tokens and output_tokens."""
    prefixes: PrefixGroups | None = None
    """Groups of requests that share their first tokens."""
    sessions: SessionsSpec | None = None
    """Conversations of several turns."""
    agents: AgentsSpec | None = None
    """Agent programs: calls with tools and sub-agents between them."""
    slo: SloSpec | None = None
    """Service level objectives of every request."""
    tiers: tuple[TierSpec, ...] | TierMix | None = None
    """Tiers with their own objectives, drawn for each request (with sessions: each session); or a mix by name."""
    models: str | dict[str, float] | None = None
    """The requested model, or several with their shares; default: the model that the fleet serves. With demand, or with
    a trace that has models: keep only these models, with their rates multiplied by these factors."""
    regions: str | dict[str, float] | None = None
    """Origin of the requests: a region, or several with their shares. With demand: keep only these regions, with
    their rates multiplied by these factors."""
    tenants: str | dict[str, float] | None = None
    """The sender of the requests, or several with their shares, for the ordering `fair`."""
    loras: LoraMix | None = None
    """The LoRA adapters that requests ask for."""
    demand: DemandSpec | None = None
    """Demand by tier, model and region that varies over the week, in place of prompt_tokens and output_tokens:
    synthetic populations with `arrivals` requests per second on average, or a file of series."""
    scale: float | None = None
    """Factor on the rate of demand; default: 1."""
    start_hour: float | None = None
    """Hour of the week, or of the file, at which demand begins; default: 0, Monday midnight."""
    surges: tuple[BurstWindow, ...] | None = None
    """Periods in which demand has more requests than usual, with times counted from the workload's start."""
    timeout_s: float | None = None
    """Clients cancel this long after arrival; default: never."""
    sampling: Literal["greedy"] | Sampling | None = None
    """How requests ask for the next token to be chosen. Default: as the model's published `generation_config.json`
    says, which engines apply. `greedy`, or `temperature`, `top_p`, `top_k`, `repetition_penalty` and the `share` of the
    requests that ask for them. It determines the time of the engine's sampler."""
    acceptance: float | None = None
    """Probability that a token drafted by speculative decoding is accepted if those before it are, for every request;
    default: as the pool's `speculative` says. A trace's column of this name gives each request its own."""
    concurrency: int | None = None
    """A closed loop with this many clients, which each send a request when their previous one has ended. Arrival times
    are ignored."""
    think_s: float | None = None
    """Pause of a closed-loop client between the end of a request and the next one; default: 0."""

    def __post_init__(self) -> None:
        check_positive(self, "num_requests", "duration_s", "timeout_s", "concurrency", "scale")
        if isinstance(self.arrivals, (int, float)):
            poisson_of_rate(self.arrivals)
        _check_lengths(self)
        self._check_mix()
        if isinstance(self.tiers, tuple) and len({t.tier for t in self.tiers}) < max(len(self.tiers), 1):
            raise ValueError("tiers: expected one or more, each with its own number")
        if self.agents is not None and (self.sessions is not None or self.concurrency is not None):
            raise ValueError("agents: not with sessions or concurrency; its calls wait for each other already")
        if self.prefixes is not None and self.prefixes.per_tenant and self.tenants is None and self.builtin is None:
            raise ValueError("prefixes: per_tenant: expected tenants, too")
        if self.concurrency is not None and self.sessions is not None:
            raise ValueError("concurrency and sessions: expected one of them; sessions already form a closed loop")
        if self.think_s is not None and (self.concurrency is None or not 0 <= self.think_s < float("inf")):
            raise ValueError("think_s: expected 0 or more, together with concurrency")
        if self.acceptance is not None and not 0 <= self.acceptance <= 1:
            raise ValueError(f"acceptance: {self.acceptance}; expected 0 to 1")
        if self.trace is not None and self.builtin is not None:
            raise ValueError("trace and builtin: expected one of them")
        if self.demand is None and self.builtin is None:
            self._check_absent(("scale", "start_hour", "surges"), "goes with demand")
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

    @property
    def reacts(self) -> bool:
        """Whether requests wait for the ends of others: sessions, agents or a closed loop."""
        return self.sessions is not None or self.agents is not None or self.concurrency is not None

    def _check_mix(self) -> None:
        if self.mix is None:
            return
        for name in ONE_KIND:
            if getattr(self, name) is not None:
                raise ValueError(f"mix and {name}: expected one of them; each part of a mix has its own")
        if not self.mix:
            raise ValueError("mix: expected one part or more")

    def _check_quality(self) -> None:
        excluded = (*ONE_KIND, "mix", "prefixes", "sessions", "agents", "demand", "trace", "builtin")
        self._check_absent(excluded, "not with quality, which gives lengths")
        self._check_arrivals()

    def _check_trace(self) -> None:
        excluded = (*ONE_KIND, "mix", "prefixes", "sessions", "agents", "demand")
        self._check_absent(excluded, "not with a trace; it is for synthetic workloads")
        if self.arrivals is None:
            self._check_absent(("num_requests",), "not with a trace; use trace.limit, or give arrivals too")
            self._check_absent(("duration_s",), "not with a trace; use trace.to_s")

    def _check_demand(self, demand: DemandSpec) -> None:
        excluded = (*ONE_KIND, "mix", "prefixes", "sessions", "agents")
        self._check_absent(excluded, "not with demand, which gives lengths by model")
        if demand.populations is None and self.arrivals is not None:
            raise ValueError("arrivals: not with demand.path, which gives the rates; use scale")
        if demand.populations is not None and not isinstance(self.arrivals, (int, float)):
            raise ValueError("arrivals: expected requests per second, as the populations' mean over a week")
        if demand.populations is not None and self.num_requests is None and self.duration_s is None:
            raise ValueError("num_requests: missing; give it or duration_s")

    def _check_synthetic(self) -> None:
        if self.mix is None and (self.prompt_tokens is None or self.output_tokens is None):
            raise ValueError("expected trace, builtin, mix, or prompt_tokens and output_tokens")
        self._check_arrivals()

    def _check_absent(self, names: tuple[str, ...], reason: str) -> None:
        for name in names:
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: {reason}")

    def _check_arrivals(self) -> None:
        if self.arrivals is None and self.concurrency is None:
            raise ValueError("arrivals: missing; give a rate per second, as in `arrivals: 8`")
        endless = self.num_requests is None and not isinstance(self.arrivals, Replay)
        if endless and (self.duration_s is None or self.arrivals is None):
            raise ValueError("num_requests: missing; give it or duration_s")


ONE_KIND = ("prompt_tokens", "output_tokens", "reasoning_tokens", "correlation")
"""Keys for lengths of a single kind of request."""


def resolved(spec: WorkloadSpec) -> WorkloadSpec:
    """Resolve the names of built-in workloads and tier mixes. Raises HeadwayError for an unknown built-in workload."""
    full = spec if spec.builtin is None else _overridden(_builtin(spec.builtin, "workload: builtin"), spec)
    if full.mix is not None:
        full = structs.replace(full, mix=tuple(_with_builtin_lengths(part) for part in full.mix))
    if isinstance(full.tiers, TierMix):
        numbered = enumerate(tier_shares(full.tiers.mix, full.tiers.num_tiers))
        full = structs.replace(full, tiers=tuple(TierSpec(tier, share) for tier, share in numbered))
    return full


def _overridden(known: WorkloadSpec, spec: WorkloadSpec) -> WorkloadSpec:
    """A built-in workload with the keys that `spec` gives in place of its own."""
    given = {n: v for n in spec.__struct_fields__ if (v := getattr(spec, n)) is not None and n != "builtin"}
    base = {n: getattr(known, n) for n in spec.__struct_fields__}
    if "num_requests" in given or "duration_s" in given:
        base |= {"num_requests": None, "duration_s": None}
    if "concurrency" in given:
        base |= {"sessions": None, "agents": None}
        if known.demand is None:
            base["arrivals"] = None
    if "mix" in given:
        base |= dict.fromkeys(ONE_KIND)
    try:
        return WorkloadSpec(**{**base, **given})
    except ValueError as error:
        raise HeadwayError(f"workload: {error}") from None


def _with_builtin_lengths(part: MixPart) -> MixPart:
    """Fill in the lengths of the part's built-in workload."""
    if part.builtin is None:
        return part
    known = _builtin(part.builtin, "workload: mix: builtin")
    if known.mix is not None:
        raise HeadwayError(f"workload: mix: builtin: {part.builtin} is a mix itself; expected a workload of one kind")
    own = {n: getattr(known, n) if getattr(part, n) is None else getattr(part, n) for n in ONE_KIND}
    return MixPart(part.share, **own)


def _builtin(name: str, where: str) -> WorkloadSpec:
    known = builtin_workloads()
    if name not in known:
        raise unknown("builtin workload", name, known, where)
    return known[name]


@cache
def builtin_workloads() -> dict[str, WorkloadSpec]:
    text = resources.files("headway.workload").joinpath("workloads.yaml").read_bytes()
    return msgspec.yaml.decode(text, type=dict[str, WorkloadSpec])


def _check_lengths(spec: MixPart | WorkloadSpec) -> None:
    for name in ("prompt_tokens", "output_tokens", "reasoning_tokens"):
        length: Length | None = getattr(spec, name)
        if length is not None:
            check_length(name, length, name)
    if spec.correlation is not None and not 0 <= spec.correlation <= 1:
        raise ValueError(f"correlation: {spec.correlation}; expected 0 to 1")
