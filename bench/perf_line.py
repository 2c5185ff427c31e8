# ruff: noqa: T201 (a script prints)
"""Cost of one call of StepModel.line, by kind of batch: best of five rounds, after warming up."""

from __future__ import annotations

import random
from collections.abc import Callable
from time import perf_counter_ns

from headway import catalog
from headway.core.fleet import Parallel
from headway.perf.step import StepModel

CALLS = 100_000


def best_ns(call: Callable[[int], object]) -> float:
    rounds = []
    for _ in range(5):
        start = perf_counter_ns()
        for i in range(CALLS):
            call(i)
        rounds.append((perf_counter_ns() - start) / CALLS)
    return min(rounds)


def main() -> None:
    rng = random.Random(0)
    n = [rng.randrange(1, 200) for _ in range(CALLS)]
    new = [rng.randrange(16, 4096) for _ in range(CALLS)]
    empty_ns = best_ns(lambda i: n[i])
    for name, tp in (("llama-2-70b", 4), ("llama-3.1-8b", 1), ("deepseek-v3", 8), ("gpt-oss-20b", 1)):
        gpu = "h200" if name == "deepseek-v3" else "h100"
        step = StepModel(catalog.model(name), catalog.gpu(gpu), catalog.engine("simulated"), Parallel(tp=tp))
        start = perf_counter_ns()
        for tokens in range(1, 8193):
            step.line(0, 0, [(tokens, 0)])
        first_ns = (perf_counter_ns() - start) / 8192
        line = step.line
        for i in range(CALLS):
            line(n[i], 1000 * n[i], ((new[i], 0),))
        decode_ns = best_ns(lambda i, line=line: line(n[i], 1000 * n[i])) - empty_ns
        chunk_ns = best_ns(lambda i, line=line: line(n[i], 1000 * n[i], ((new[i], 0),))) - empty_ns
        three_ns = best_ns(lambda i, line=line: line(n[i], 1000 * n[i], ((16, 0), (64, 0), (new[i], 512)))) - empty_ns
        print(
            f"{name:14} decode {decode_ns:5.0f} ns   one chunk {chunk_ns:5.0f} ns   "
            f"three chunks {three_ns:5.0f} ns   first of its token count {first_ns / 1e3:.1f} us"
        )


if __name__ == "__main__":
    main()
