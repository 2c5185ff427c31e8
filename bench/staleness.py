"""What it costs a router to know late what prefix caches hold: `python bench/staleness.py [PICTURE]`. Simulations.

Events alone count, as if the gateway did not know its own placements, except where it says so.

The scenario shared-prefix with its first 3,000 requests, and one seed. The picture shows the mean TTFT over the delay
of events.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from click import echo

import headway as hw
from headway.scenario import presets

ROUTERS = ("prefix-affinity", "lmetric", "llm-d-scorers", "preble", "dualmap", "headway")
NUM_REQUESTS = 3000
DELAYS_S = (0.05, 0.5, 2.0, 5.0, 20.0)
KNOWN: dict[str, dict[str, Any]] = {
    "at once": {"source": "exact"},
    "events 5 s late, and placements": {"source": "events", "delay_s": 5.0},
    "events 20 s late, and placements": {"source": "events", "delay_s": 20.0},
    "a guess from placements": {"source": "placements"},
    "30% of batches lost, replayed": {"source": "events", "loss": 0.3, "placed": False},
    "30% of batches lost for good": {"source": "events", "loss": 0.3, "replay": False, "placed": False},
}
"""Ways to know, beside events that are late."""


def main() -> None:
    base = hw.load(Path(presets.__file__).parent / "shared-prefix.yaml", {
        "workload.num_requests": NUM_REQUESTS, "observe.cache.placed": False,
    })  # fmt: skip
    swept = hw.sweep(base, {"observe.cache.delay_s": DELAYS_S}, routing=list(ROUTERS))
    echo(swept.table("ttft_s.mean"))
    if len(sys.argv) > 1:
        figure = swept.plot("ttft_s.mean", "observe.cache.delay_s").update_xaxes(type="log", dtick=1)
        figure.update_xaxes(title="delay of events, s")
        figure.update_yaxes(title="mean TTFT, s", type="log", dtick=1)
        figure.save(sys.argv[1], width=900, height=420)
    for name, cache in KNOWN.items():
        found = hw.compare(hw.load(base, {"observe.cache": cache}), routing=list(ROUTERS))
        shown = ", ".join(f"{each.policies['routing']} {each.metrics['ttft_s.mean']:.3f}" for each in found)
        echo(f"{name}: {shown}")


if __name__ == "__main__":
    main()
