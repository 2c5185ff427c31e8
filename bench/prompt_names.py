"""What it takes to name a prompt by its tokens and to look it up: `python bench/prompt_names.py`.

Medians, in ms of this process's CPU and of wall time, with an emulated engine as another process. Prompts are chats of
one long message: cold ones are new; of those with cached blocks, the long message has been there before, and two short
ones are new. Texts are made of words of this machine's Python library, in random order.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec
from click import echo
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from headway.control.cache_index import CacheIndex
from headway.control.live import Live
from headway.gateway.fleet.local_resources import free_port
from headway.gateway.kv_events.local_tokenizer import read
from headway.gateway.kv_events.prompts import PromptBlocks
from headway.gateway.relay.request import ClientRequest
from headway.gateway.relay.request_reader import read_request
from headway.gateway.upstream.dialects import ADAPTERS
from headway.gateway.upstream.engine import EngineEndpoint

MODEL = "llama-3.1-8b"
PROMPT_TOKENS = 10_000
NUM_PROMPTS = 20
BLOCK, KV_BLOCKS, NUM_REPLICAS = 16, 20_000, 4
VOCABULARY = 32_000
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""Where the tokenizer of Llama 3 splits a text."""


def byte_pairs(folder: Path) -> list[str]:
    """Write a tokenizer of the kind of Llama 3's, trained on Python's library. Returns words of that."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))[:80]
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train(
        list(map(str, sources)),
        trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<|im_start|>", "<|im_end|>")]
    )
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHATML)
    words = " ".join(source.read_text() for source in sources).split(" ")
    return [word for word in words if word]


def request(*contents: str) -> ClientRequest:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": each} for i, each in enumerate(contents)]
    body = msgspec.json.encode({"model": MODEL, "messages": messages, "max_tokens": 1})
    return read_request("/v1/chat/completions", body, {})


async def settled(blocks: PromptBlocks, engine: EngineEndpoint) -> None:
    blocks.prepare(engine)
    while engine.tokenizer and not blocks._tokenizers[engine.tokenizer].is_settled:
        await asyncio.sleep(0.05)


async def medians(engine: EngineEndpoint, text: Callable[[], str]) -> list[str]:
    """Cold, with cached blocks, and the same body again: CPU and wall time in ms."""
    blocks = PromptBlocks()
    await settled(blocks, engine)
    indexes = [CacheIndex(BLOCK, KV_BLOCKS, guesses=False) for _ in range(NUM_REPLICAS)]
    taken: tuple[list[tuple[float, float]], ...] = ([], [], [])
    for _ in range(NUM_PROMPTS):
        long = text()
        for kind, contents in enumerate(((long,), (long, "w5 w6", "w7 w8 w9"), (long, "w5 w6", "w7 w8 w9"))):
            made = request(*contents)
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            await blocks.name(made, [engine])
            assert made.blocks is not None and made.counted_tokens is not None
            live = Live(0, 0.0, made.counted_tokens, 1, prefix=made.blocks)
            for index in indexes:
                index.cached_tokens(live)
            taken[kind].append((time.process_time() - start_cpu_s, time.perf_counter() - start_s))
            for share, index in enumerate(indexes, 1):
                index.apply([(each.id, 1, 0) for each in made.blocks[: len(made.blocks) * share // NUM_REPLICAS]])
    return [shown(each) for each in taken]


def shown(times: list[tuple[float, float]]) -> str:
    """Medians of CPU and wall times, in ms."""
    return " / ".join(f"{median(each) * 1e3:.2f}" for each in zip(*times, strict=True))


async def measure(folder: Path, port: int) -> None:
    chance = random.Random(1)

    def words() -> str:
        return " ".join(f"w{chance.randrange(3, VOCABULARY)}" for _ in range(PROMPT_TOKENS))

    engine = EngineEndpoint(0, "pool", MODEL, f"http://127.0.0.1:{port}", ADAPTERS["vllm"], 32_768)
    engine.event_block_tokens = BLOCK
    while await engine.tokenize({"prompt": "w3"}) is None:
        await asyncio.sleep(0.2)
    rows = {"/tokenize of an emulated engine": await medians(engine, words)}

    library = byte_pairs(folder / "pairs")
    tokenizer = Tokenizer.from_file(str(folder / "pairs" / "tokenizer.json"))

    def source() -> str:
        text = " ".join(chance.choices(library, k=PROMPT_TOKENS))
        return text[: tokenizer.encode(text).offsets[PROMPT_TOKENS - 1][1]]

    hosted = EngineEndpoint(1, "pool", MODEL, engine.url, ADAPTERS["sglang"], 32_768)  # which tells no tokens
    hosted.event_block_tokens, hosted.tokenizer = BLOCK, str(folder / "pairs")
    rows[f"local, {VOCABULARY:,} byte pairs"] = await medians(hosted, source)
    local = read(folder / "pairs")
    libraries = {"the library fastokens": local._encode_all, "the library tokenizers": tokenizer.encode_batch_fast}
    alone: dict[str, list[tuple[float, float]]] = {name: [] for name in libraries}
    for _ in range(NUM_PROMPTS):
        text = source()
        for name, encode in libraries.items():
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            encode([text])
            alone[name].append((time.process_time() - start_cpu_s, time.perf_counter() - start_s))
    echo(f"{'ms of CPU / of wall time, median':36}{'cold':>18}{'blocks cached':>18}{'same body':>18}")
    for name, found in rows.items():
        echo(f"{name:36}" + "".join(f"{each:>18}" for each in found))
    for name, times in alone.items():
        echo(f"{name + ', the same texts':36}{shown(times):>18}")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        port = free_port()
        command = [sys.executable, "-m", "headway", "emulate", "--model", MODEL, "--gpu", "h100", "--port", str(port)]
        engine = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            asyncio.run(measure(Path(name), port))
        finally:
            engine.terminate()
            engine.wait()


if __name__ == "__main__":
    main()
