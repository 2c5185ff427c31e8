"""A load generator that writes what `vllm bench serve --save-result --save-detailed` writes.

It sends prompts of token ids to `/v1/completions` and reads the streams; vLLM's own client needs vLLM.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from headway.workload.random_streams import stream


@dataclass(frozen=True)
class Load:
    """Requests of one run. With a rate, arrivals are Poisson; else `concurrency` clients send one after the other."""

    num: int
    prompt_tokens: tuple[int, int]
    """Range."""
    output_tokens: tuple[int, int]
    rate_rps: float | None = None
    concurrency: int | None = None
    seed: int = 0


@dataclass
class _Answer:
    start_s: float = 0.0
    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str = ""


def run(url: str, model: str, load: Load, token_ids: tuple[int, int]) -> dict[str, Any]:
    """The result, as vLLM's client writes it. `token_ids`: range of the prompts' tokens."""
    return asyncio.run(_run(url.removeprefix("http://"), model, load, token_ids))


async def _run(host: str, model: str, load: Load, token_ids: tuple[int, int]) -> dict[str, Any]:
    draw = random.Random(load.seed)
    lengths = [(draw.randint(*load.prompt_tokens), draw.randint(*load.output_tokens)) for _ in range(load.num)]
    bodies = [
        {
            "model": model,
            "prompt": [draw.randint(*token_ids) for _ in range(prompt)],
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "cache_prompt": False,
            "stream_options": {"include_usage": True},
        }
        for prompt, output in lengths
    ]
    begun_s = time.perf_counter()
    if load.rate_rps is None:
        free = asyncio.Semaphore(load.concurrency or load.num)

        async def limited(body: dict[str, Any]) -> _Answer:
            async with free:
                return await _ask(host, body)

        answers = await asyncio.gather(*map(limited, bodies))
    else:
        gaps_s = stream(load.seed, "bench").exponential(1 / load.rate_rps, load.num)
        tasks = []
        for gap_s, body in zip(gaps_s, bodies, strict=True):
            await asyncio.sleep(float(gap_s))
            tasks.append(asyncio.create_task(_ask(host, body)))
        answers = await asyncio.gather(*tasks)
    return _result(model, load, lengths, answers, time.perf_counter() - begun_s)


async def _ask(host: str, body: dict[str, Any]) -> _Answer:
    answer = _Answer(start_s=time.perf_counter())
    name, port = host.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(name, int(port))
    try:
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
        last_s = answer.start_s
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            now_s = time.perf_counter()
            event = json.loads(line[6:])
            answer.tokens = (event.get("usage") or {}).get("completion_tokens", answer.tokens)
            if not any(choice.get("text") for choice in event.get("choices", ())):
                continue
            if answer.ttft_s:
                answer.gaps_s.append(now_s - last_s)
            else:
                answer.ttft_s = now_s - answer.start_s
            last_s = now_s
    except (OSError, ValueError) as error:
        answer.error = str(error)
    finally:
        writer.close()
    return answer


def _result(
    model: str, load: Load, lengths: list[tuple[int, int]], answers: list[_Answer], duration_s: float
) -> dict[str, Any]:
    good = [one for one in answers if not one.error and one.tokens]
    e2els = [one.ttft_s + sum(one.gaps_s) for one in good]
    found = {
        "backend": "openai", "endpoint_type": "openai", "label": None, "model_id": model, "tokenizer_id": model,
        "num_prompts": load.num, "request_rate": "inf" if load.rate_rps is None else load.rate_rps, "burstiness": 1.0,
        "max_concurrency": load.concurrency, "duration": duration_s, "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": sum(p for (p, _), one in zip(lengths, answers, strict=True) if one in good),
        "total_output_tokens": sum(one.tokens for one in good), "request_throughput": len(good) / duration_s,
        "input_lens": [prompt for prompt, _ in lengths], "output_lens": [one.tokens for one in answers],
        "ttfts": [one.ttft_s for one in answers], "itls": [one.gaps_s for one in answers],
        "start_times": [one.start_s for one in answers], "errors": [one.error for one in answers],
    }  # fmt: skip
    tpots = [(e2el - one.ttft_s) / (one.tokens - 1) for one, e2el in zip(good, e2els, strict=True) if one.tokens > 1]
    kinds = {
        "ttft": [one.ttft_s for one in good],
        "tpot": tpots,
        "itl": [gap for one in good for gap in one.gaps_s],
        "e2el": e2els,
    }
    for name, values in kinds.items():
        found |= dict(_statistics(name, values))
    return found


def _statistics(name: str, values: list[float]) -> Iterator[tuple[str, float]]:
    ordered = sorted(values)
    yield f"mean_{name}_ms", 1e3 * sum(ordered) / len(ordered)
    yield f"median_{name}_ms", 1e3 * ordered[len(ordered) // 2]
    yield f"p99_{name}_ms", 1e3 * ordered[min(round(0.99 * len(ordered)), len(ordered) - 1)]


DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "errors")
"""Keys that `vllm bench serve` leaves out without `--save-detailed`."""
