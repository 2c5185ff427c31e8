"""Records what vLLM's scheduler decides, for tests that run without it: `python record.py VLLM MODEL`, in its folder.

Writes tests/vllm/recorded.json: by engine and ordering, the iterations of `arrivals`.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from iterations import ORDERINGS, Engine, arrivals, in_vllm

VERSION = "0.32.0"
NUM, GAP_S, PROMPT, OUTPUT = 40, 3.0, 150, 40
ENGINES = {"seats": Engine(4, 400), "memory": Engine(6, 17)}


def main() -> None:
    vllm, model = (Path(each) for each in sys.argv[1:])
    requests = arrivals(NUM, GAP_S, PROMPT, OUTPUT)
    pairs = [(limit, name) for limit in ENGINES for name in ORDERINGS]
    got = in_vllm(vllm, model, requests, [ORDERINGS[name] for _, name in pairs], [ENGINES[limit] for limit, _ in pairs])
    table: dict[str, dict[str, str]] = {}
    for (limit, name), iterations in zip(pairs, got, strict=True):
        lines = " ".join(",".join(f"{id}:{tokens}" for id, tokens in each) for each in iterations)
        table.setdefault(limit, {})[name] = lines.replace(":1,", ",").replace(":1 ", " ")
    out = Path(__file__).parents[1] / "vllm" / "recorded.json"
    out.write_text(json.dumps({"vllm": VERSION, "iterations": table}, indent=1) + "\n")


main()
