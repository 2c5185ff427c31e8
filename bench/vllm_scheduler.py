"""What a Headway ordering costs inside vLLM's scheduler, without a model.

    PYTHONPATH=src .venv-vllm/bin/python bench/vllm_scheduler.py MODEL [ORDERING...]

By vLLM's own Python. 256 requests run and 1,000 wait; as one ends, another comes. vLLM's scheduler and the plug-in take
turns, step by step, and each step of the one is divided by that of the other beside it: what else the machine does
disturbs both. Prints the median of these ratios of CPU times in each round (rounds differ by where their memory lies),
their mean with its 95% interval, and the bytecodes of a step, which other processes cannot disturb.
"""
# ruff: noqa: T201

import gc
import random
import statistics
import sys
from pathlib import Path
from time import thread_time_ns

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "vllm_cpu"))

from lockstep import made, request_of, tokens_of

SEATS, WAITING, STEPS, ROUNDS = 256, 1000, 250, 8
WARM = 50
"""Steps of a round before the times count."""
T_975 = 2.365
"""Student's t for as many rounds."""
TRACED = 20
LIMITS = {"seats": SEATS, "blocks": 20_000, "budget": 8192}


class Side:
    """One scheduler and its own copy of the requests."""

    def __init__(self, model, run, seed):
        self.scheduler = made(model, {**LIMITS, **run})
        self.scheduler.clock = lambda: 0.0
        self.chance, self.num = random.Random(seed), 0
        self.ns, self.steps = [], []
        self.trace = None
        self.fill()

    def fill(self):
        """Requests come until as many as ever run and wait. Returns the nanoseconds that the scheduler took."""
        spent = 0
        while len(self.scheduler.requests) < SEATS + WAITING:
            output = self.chance.randint(100, 400)
            request = request_of({
                "id": self.num, "arrival_s": self.num * 0.01, "prompt_tokens": self.chance.randint(50, 200),
                "output_tokens": output, "reasoning_tokens": output // 2, "tier": self.chance.randint(0, 3),
                "headway_output_tokens": output,
            })  # fmt: skip
            self.num += 1
            spent += self.timed(self.scheduler.add_request, request)[1]
        return spent

    def timed(self, call, *arguments):
        """What the call returns, and its nanoseconds."""
        began = thread_time_ns()
        sys.settrace(self.trace)
        done = call(*arguments)
        sys.settrace(None)
        return done, thread_time_ns() - began

    def step(self):
        one = self.scheduler
        output, spent = self.timed(one.schedule)
        half = dict.fromkeys(output.num_scheduled_tokens, 60)
        answer = tokens_of(one, output, half)
        spent += self.timed(one.update_from_output, output, answer)[1]
        self.ns.append(spent + self.fill())
        self.steps.append((dict(output.num_scheduled_tokens), output.preempted_req_ids, output.finished_req_ids))


def bytecodes(model, run):
    """Mean number of bytecodes of a step, arrivals included."""
    side, num = Side(model, run, 0), 0

    def count(frame, event, argument):
        nonlocal num
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        num += event == "opcode"
        return count

    for _ in range(WARM):
        side.step()
    side.trace = count
    for _ in range(TRACED):
        side.step()
    return num / TRACED


def compare(model, ordering):
    rounds, steps_us = [], []
    for seed in range(ROUNDS):
        own, ours = Side(model, {}, seed), Side(model, {"ordering": ordering}, seed)
        gc.collect()
        gc.freeze()  # as vLLM's engine does once it is up
        for at in range(STEPS):
            for side in (own, ours) if at % 2 else (ours, own):
                side.step()
        if ordering == "fcfs":
            assert own.steps == ours.steps, "the decisions differ"
        ratios = [two / one for one, two in zip(own.ns[WARM:], ours.ns[WARM:], strict=True)]
        rounds.append(statistics.median(ratios) - 1)
        steps_us.append(statistics.median(own.ns[WARM:]) / 1000)
    mean, half = statistics.mean(rounds), T_975 * statistics.stdev(rounds) / ROUNDS**0.5
    own, ours = (bytecodes(model, run) for run in ({}, {"ordering": ordering}))
    each = ", ".join(f"{ratio:+.1%}" for ratio in rounds)
    print(f"{ordering!s:20} vLLM {statistics.median(steps_us):.0f} us of CPU a step; Headway {mean:+.1%}", end=" ")
    print(f"({mean - half:+.1%} to {mean + half:+.1%}); rounds {each}", flush=True)
    print(f"{'':20} vLLM {own:.0f} bytecodes a step; Headway {ours / own - 1:+.2%}")


if __name__ == "__main__":
    for each in sys.argv[2:] or ("fcfs",):
        compare(sys.argv[1], each)
