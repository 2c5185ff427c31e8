"""What copies, starts and watts cost, as measured: coefficients of perf/links, coldstart and power. With sources."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import msgspec
from msgspec import Struct

from headway.core.errors import unknown


class Transfer(Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes over a link: `latency_s + bytes * s_per_byte`."""

    latency_s: float
    s_per_byte: float
    residuals: dict[str, float]
    """Absolute relative errors of the fit: median, mean, max."""
    source: str


class HostLink(Struct, frozen=True, forbid_unknown_fields=True):
    """A pinned copy between host and GPU: a latency, and a share of the link's raw rate."""

    latency_s: float
    efficiency: float
    source: str


class ColdStart(Struct, frozen=True, forbid_unknown_fields=True):
    """From nothing to serving: weights into GPU memory, then what the engine does before its first request."""

    download_bytes_per_s: float
    """Of a whole model from a hub to a node's disk."""
    local_bytes_per_s_gpu: float
    """From the node's memory into one GPU; GPUs load at the same time."""
    stream_bytes_per_s: dict[str, float]
    """Of a whole model from a storage into GPU memory, by the storage's name."""
    init_s: float
    """Processes, memory profile, KV cache."""
    graphs_s: float
    """CUDA graph capture."""
    compile_s: float
    """torch.compile without its cache."""
    residuals: dict[str, float]
    """Signed relative errors of the totals that were measured, by setup."""
    source: str


class Power(Struct, frozen=True, forbid_unknown_fields=True):
    """Watts of one busy GPU: `base_w + memory_w * m + compute_w * sqrt(c)`, at most `limit_w`.

    m: HBM bytes over peak bandwidth. c: FLOPs over the 16-bit peak.
    """

    gpus: tuple[str, ...]
    base_w: float
    memory_w: float
    compute_w: float
    limit_w: float
    measured_on: str
    """`serving`, or `kernels`: matrix products in a closed loop, which draw more than a server does."""
    residuals: dict[str, float]
    """Absolute relative errors: median, mean, p90; `left_out` = mean where the model was left out of the fit."""
    source: str


class Costs(Struct, frozen=True, forbid_unknown_fields=True):
    """The data file."""

    kv_transfer: dict[str, Transfer]
    """By the network it was measured on."""
    host_link: HostLink
    cold_start: ColdStart
    power: tuple[Power, ...]


@cache
def costs() -> Costs:
    """Everything that `scripts/fit_costs.py` fitted."""
    data = files("headway.catalog") / "data" / "costs.json"
    return msgspec.json.decode(data.read_bytes(), type=Costs)


def kv_transfer(network: str) -> Transfer:
    """The cost of moving KV over this network. HeadwayError for one that nobody measured."""
    known = costs().kv_transfer
    if network not in known:
        raise unknown("network", network, known)
    return known[network]


def power(gpu_name: str) -> Power | None:
    """The power of this GPU, by its short name; None where nobody measured it."""
    return next((each for each in costs().power if gpu_name in each.gpus), None)
