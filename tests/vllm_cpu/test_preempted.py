"""Answers of requests that are preempted in vLLM are those of requests that are not: `make vllm-cpu`."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from subprocess import run
from typing import Any

from iterations import ENV
from vllm_cpu.servers import MARKS, ONE_THREAD, SOURCE, VLLM, make_model, show

pytestmark = MARKS
NUM_REQUESTS = 40
ALONE = {"seats": 1, "blocks": 64}
FEW = {"seats": 8, "blocks": 24}
"""768 tokens of KV cache, where eight requests have up to 3,200."""
ORDERINGS: dict[str, dict[str, Any]] = {
    "vLLM's own": {},
    "fcfs": {"ordering": "fcfs"},
    "shortest-remaining": {"ordering": "shortest-remaining"},
    "round-robin": {"ordering": {"name": "round-robin", "quantum_tokens": 15}},
}
KINDS = [
    *(("float32", name) for name in ("alone", *ORDERINGS)),
    *(("bfloat16", name) for name in ("alone", "vLLM's own", "round-robin")),
]
ROUNDED = 0.004
"""In bfloat16 tokens may change places whose logarithms of probability differ less: two units of the model's logits,
which are below 0.5 and have 8 binary digits. Half of all tokens lead by 0.036 or more."""


def requests() -> list[dict[str, Any]]:
    chance, made = random.Random(3), []
    for _ in range(NUM_REQUESTS):
        prompt = [chance.randrange(3, 259) for _ in range(chance.randint(10, 200))]
        output = chance.randint(60, 200)
        made.append({"prompt": prompt, "output_tokens": output, "headway_output_tokens": output})
    return made


def first_differences(alone: Any, found: Any) -> list[float]:
    """Of answers that differ, the margin of the first token that does, in the answer alone."""
    differ = []
    for expected, margins, tokens in zip(alone["tokens"], alone["margins"], found["tokens"], strict=True):
        differ += [margin for one, other, margin in zip(expected, tokens, margins, strict=True) if one != other][:1]
    return differ


def test_preempted_requests_have_the_tokens_of_others(tmp_path: Path) -> None:
    """In float32 all; in bfloat16, as with vLLM's own scheduler, all but tokens that are nearly as likely."""
    runs = [{**(ALONE if name == "alone" else FEW), "dtype": dtype, **ORDERINGS.get(name, {})} for dtype, name in KINDS]
    given = json.dumps({"requests": requests(), "runs": runs})
    env = os.environ | ENV | ONE_THREAD | {"PYTHONPATH": SOURCE, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [str(Path(VLLM).with_name("python")), str(Path(__file__).with_name("preempted.py"))]
    done = run([*command, str(make_model(tmp_path))], input=given, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    found = dict(zip(KINDS, json.loads(done.stdout.splitlines()[-1]), strict=True))
    for dtype, name in KINDS:
        alone, each = found[dtype, "alone"], found[dtype, name]
        differ = first_differences(alone, each)
        show(
            f"{dtype}, {name}: {each['preemptions']:.0f} preemptions, {NUM_REQUESTS - len(differ)} of {NUM_REQUESTS}"
            f" answers are identical; margins of others {[round(margin, 4) for margin in differ]}"
        )
        assert (each["preemptions"] > 0) == (name != "alone")
        assert all(margin < ROUNDED for margin in differ) and (not differ or dtype == "bfloat16")
        if name == "fcfs":
            own = found[dtype, "vLLM's own"]
            assert (each["tokens"], each["preemptions"]) == (own["tokens"], own["preemptions"])
