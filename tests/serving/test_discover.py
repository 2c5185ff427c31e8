"""Running engines -> a fleet file that serves and simulates, and what changed since."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import engines
import serving
from headway import scenario
from headway.cli import main
from headway.core.errors import HeadwayError
from headway.serving.discover import fleet_file
from headway.serving.discover.pools import pools
from headway.serving.discover.probe import FoundEngine, probe, unknown

VLLM = {
    "/v1/models": {
        "data": [
            {"id": "chat", "root": "meta-llama/Llama-3.1-8B-Instruct", "parent": None, "owned_by": "vllm"},
            {"id": "sql", "root": "/adapters/sql", "parent": "chat", "owned_by": "vllm"},
        ]
    },
    "/version": {"version": "0.25.1"},
    "/metrics": (
        'vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="True",engine="0",'
        'gpu_memory_utilization="0.92",num_gpu_blocks="28934",num_cpu_blocks="None"} 1.0\n'
        'vllm:num_requests_running{engine="0",model_name="chat"} 0.0\n'
    ),
}
SGLANG = {
    "/v1/models": {"data": [{"id": "Qwen/Qwen3-32B", "root": "Qwen/Qwen3-32B", "owned_by": "sglang"}]},
    "/get_server_info": {
        "model_path": "Qwen/Qwen3-32B",
        "version": "0.5.6",
        "tp_size": 2,
        "dp_size": 1,
        "pp_size": 1,
        "page_size": 1,
        "max_total_num_tokens": 303845,
        "max_running_requests": 256,
        "chunked_prefill_size": 8192,
        "context_length": None,
        "disable_radix_cache": False,
        "mem_fraction_static": 0.88,
        "kv_events_config": '{"publisher": "zmq", "endpoint": "tcp://*:5557"}',
    },
}
LLAMA = {
    "/v1/models": {"models": [{"name": "x"}], "data": [{"id": "gemma.gguf", "owned_by": "llamacpp"}]},
    "/props": {
        "total_slots": 4,
        "model_path": "/m/gemma-Q4_K_M.gguf",
        "build_info": "b6600-1a2b3c",
        "default_generation_settings": {"n_ctx": 4096},
    },
}
OLLAMA = {
    "/v1/models": {"data": [{"id": "qwen3:8b", "owned_by": "library"}, {"id": "llama3.1:8b", "owned_by": "library"}]},
    "/api/version": {"version": "0.12.3"},
}
TRT = {"/v1/models": {"data": [{"id": "gpt-oss-20b", "owned_by": "tensorrt_llm"}]}, "/version": {"version": "1.2.0"}}


def asked(pages: Mapping[str, Any], url: str = "http://a:8000") -> FoundEngine:
    def fetch(path: str) -> bytes | None:
        page = pages.get(path)
        return None if page is None else page.encode() if isinstance(page, str) else json.dumps(page).encode()

    return probe(url, fetch)


def test_vllm_says_its_cache_and_no_shape() -> None:
    found = asked(VLLM)
    assert (found.api, found.version, found.model) == ("vllm", "0.25.1", "chat")
    assert found.weights == "meta-llama/Llama-3.1-8B-Instruct" and found.adapters == ("sql",)
    assert found.kv_capacity_tokens == 462_944 and found.tp is None and found.is_idle
    assert found.settings == {"block_size_tokens": 16, "prefix_caching": True, "gpu_memory_utilization": 0.92}
    (pool,) = pools([found], token_s={found.url: 0.0066})
    assert pool.entry["model"] == "llama-3.1-8b" and pool.entry["engine"] == "vllm-0.25"
    assert (pool.entry["gpu"], pool.entry.get("tp", 1)) == ("h100-80gb-sxm", 1)  # where this was measured
    (blind,) = pools([found])
    assert pools([found], token_s={found.url: -0.001}) == [blind]  # noise: no speed
    assert "so would a100-80gb" in blind.notes["gpu"]  # A100s have as much memory
    assert "chat" in pool.notes["model"] and "sql" in pool.notes["endpoints"]
    assert pool.unknown == ("tensor parallelism", "the most sequences at once")


def test_sglang_says_its_shape_and_where_events_are() -> None:
    found = asked(SGLANG)
    assert (found.api, found.version, found.tp, found.kv_events) == ("sglang", "0.5.6", 2, "tcp://*:5557")
    (pool,) = pools([found], "a100")
    assert pool.entry["kv_events"] == {"endpoint": "tcp://{host}:5557"} and pool.entry["tp"] == 2
    assert pool.entry["engine"] == {"name": "sglang", "version": "0.5.6"}
    assert not pool.unknown


def test_slots_of_llama_cpp_and_what_others_say() -> None:
    found = asked(LLAMA)
    assert (found.api, found.kv_capacity_tokens, found.settings) == ("llama.cpp", 4096, {"max_num_seqs": 4})
    assert any("4,096 tokens in all" in each and "16,384" in each for each in unknown(found))
    ollama, trt = asked(OLLAMA), asked(TRT)
    assert (ollama.product, ollama.version, ollama.api) == ("Ollama", "0.12.3", "openai")
    assert ollama.other_models == ("llama3.1:8b",)
    assert (trt.product, trt.version) == ("TensorRT-LLM", "1.2.0")
    gateway = asked({"/v1/models": {"data": [{"id": "qwen3-8b", "owned_by": "headway"}]}, "/version": {"version": "9"}})
    assert (gateway.product, gateway.version, gateway.api) == ("Headway", "9", "openai")
    (pool,) = pools([ollama])
    assert pool.entry["api"] == "openai" and "engine" not in pool.entry and "llama3.1:8b" in pool.notes["endpoints"]


@pytest.mark.parametrize(
    "pages",
    [
        {},
        {"/v1/models": "<html>"},
        {"/v1/models": []},
        {"/v1/models": {"data": None}},
        {"/v1/models": {"data": [{"object": "model"}]}},
    ],
)
def test_a_server_without_models_is_none(pages: dict[str, Any]) -> None:
    with pytest.raises(HeadwayError, match="http://a:8000: lists no models at /v1/models"):
        asked(pages)


@pytest.mark.parametrize("odd", ["[]", "null", "{", '{"version": 3}', '{"total_slots": "many"}', '{"tp_size": null}'])
def test_odd_pages_leave_things_unknown(odd: str) -> None:
    pages = dict.fromkeys(("/version", "/metrics", "/props", "/server_info", "/api/version"), odd)
    found = asked({"/v1/models": {"data": [{"id": "house-model"}]}, **pages})
    assert found.model == "house-model" and found.kv_capacity_tokens is None
    (pool,) = pools([found])
    assert pool.entry["endpoints"] == ["http://a:8000"]


def test_replicas_of_a_pool_differ_in_their_caches_alone() -> None:
    first, second = (
        asked(VLLM),
        asked({**VLLM, "/metrics": VLLM["/metrics"].replace("28934", "28930")}, "http://b:8000"),
    )  # type: ignore[attr-defined]
    other = asked({**VLLM, "/version": {"version": "0.24.0"}}, "http://c:8000")
    one, two = pools([first, second, other])
    assert one.entry["endpoints"] == ["http://a:8000", "http://b:8000"]
    assert one.entry["kv_capacity_tokens"] == 28930 * 16
    assert (two.entry["name"], two.entry["engine"]["name"]) == ("chat-2", "vllm-0.15")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3-1-8b-instruct"),
        ("qwen3:8b", "qwen3-8b"),
        ("/models/01_ai", "pool-01-ai"),
        ("模型", "pool"),
        ("a" * 80, "a" * 50),
    ],
)
def test_pools_have_names_that_can_be_deployed(model: str, name: str) -> None:
    first, second = pools(
        [FoundEngine("http://a:1", "openai", model=model), FoundEngine("http://b:2", "vllm", model=model)]
    )
    assert (first.entry["name"], second.entry["name"]) == (name, f"{name}-2")


def test_replicas_on_other_gpus_are_another_pool() -> None:
    """Their KV caches are of another size, and an engine of each is measured, the first one that is idle."""
    h100, busy = asked(VLLM), asked(VLLM, "http://b:8000")
    page = VLLM["/metrics"].replace("28934", "13036")  # type: ignore[attr-defined]
    small, idle = (asked({**VLLM, "/metrics": page}, f"http://{name}:8000") for name in ("c", "d"))
    one, two = pools([h100, small, busy, idle], token_s={"http://b:8000": 0.0071, "http://d:8000": 0.0239})
    assert [each.entry["endpoints"] for each in (one, two)] == [
        ["http://a:8000", "http://b:8000"],
        ["http://c:8000", "http://d:8000"],
    ]
    assert (one.entry["gpu"], two.entry["gpu"]) == ("h100-80gb-sxm", "l40s")


def test_a_file_simulates_without_the_pools_that_have_no_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = pools([asked(VLLM), FoundEngine("http://c:3", "openai", model="another", weights="another")])
    path = tmp_path / "fleet.yaml"
    path.write_text(fleet_file.text(found, "fleet.yaml"))
    assert main(["simulate", str(path), "--num-requests", "20", "--no-progress"]) == 0
    assert "another has no gpu: it is left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("one", "other", "num"),
    [
        ("/tmp/a1/tiny.gguf", "/var/models/tiny.gguf", 1),
        ("C:\\models\\tiny.gguf", "/models/tiny.gguf", 1),
        ("/models/tiny.gguf", "/models/tiny-q4.gguf", 2),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", 1),
        ("Qwen/Qwen3-8B", "other/Qwen3-8B", 2),
    ],
)
def test_weights_are_the_same_wherever_their_folder_is(one: str, other: str, num: int) -> None:
    props = {"total_slots": 4, "default_generation_settings": {"n_ctx": 4096}}
    models = {"data": [{"id": "tiny", "owned_by": "llamacpp"}]}
    engines = [
        asked({"/v1/models": models, "/props": {**props, "model_path": path}}, f"http://{host}:8000")
        for host, path in (("a", one), ("b", other))
    ]
    assert len(pools(engines)) == num


FILES = {
    "block": (
        "# mine\nfleet:\n  - name: a  # keep\n    model: qwen3-8b\n    endpoints:\n      - http://a:1  # first\n"
        "gateway: {dashboard: open}\n"
    ),
    "flow": "fleet: [{name: a, model: qwen3-8b, endpoints: ['http://a:1']}] # mine\nslo: {ttft_s: 1}\n",
    "mixed": "slo: {ttft_s: 1}\nfleet:\n- name: a\n  endpoints: [http://a:1]  # one\n  model: qwen3-8b\n\n# last\n",
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_keeps_all_that_is_the_users(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(FILES[kind])
    found = pools(
        [
            FoundEngine("http://a:1", "openai", model="qwen3-8b"),
            FoundEngine("http://b:2", "openai", model="qwen3-8b"),
            FoundEngine("http://c:3", "openai", model="another", weights="another"),
        ]
    )
    changes = fleet_file.changes(path, found, [])
    assert [each.what for each in changes if each.is_added] == ["http://b:2 is new", "http://c:3 is new"]
    text = fleet_file.updated(path, found)
    rest = iter(text)
    assert all(character in rest for character in FILES[kind])  # in its order, with nothing lost
    before, after = yaml.safe_load(FILES[kind]), yaml.safe_load(text)
    assert {**before, "fleet": None} == {**after, "fleet": None}
    first, second = after["fleet"]
    assert first == {**before["fleet"][0], "endpoints": ["http://a:1", "http://b:2"]}
    assert second["endpoints"] == ["http://c:3"]
    path.write_text(text)
    assert not [each for each in fleet_file.changes(path, found, []) if each.is_added]


@pytest.fixture(scope="module")
def fleet() -> Iterator[tuple[str, str]]:
    one, two = serving.emulator(), serving.emulator()
    with serving.closing(one, two):
        yield one.url, two.url


def test_what_is_found_simulates_and_is_as_the_engines_are(
    fleet: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, hosts = tmp_path / "fleet.yaml", tmp_path / "hosts.txt"
    hosts.write_text(f"{fleet[0].removeprefix('http://')}  # the first\n\n{fleet[1]}/v1\n")
    assert main(["discover", str(hosts), "http://127.0.0.1:9", "--out", str(path)]) == 0
    printed = capsys.readouterr()
    assert "2 engines with qwen3-8b on h100-80gb-sxm (a guess: " in printed.out
    assert "http://127.0.0.1:9: gives no answer" in printed.err
    chosen = scenario.load(path)
    (pool,) = chosen.fleet.pools
    assert (pool.gpu.name, pool.engine.name, pool.replicas) == ("h100-80gb-sxm", "vllm-0.25", 2)
    assert len(scenario.run(chosen).records.requests["request"]) == 500
    before = path.read_text()
    assert main(["discover", *fleet, "--out", str(path), "--json", "--no-measure"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["changes"] == [] and path.read_text() == before and len(found["engines"]) == 2


@pytest.mark.skipif(engines.NO_LLAMA, reason="pip install xllamacpp gguf")
def test_a_real_llama_cpp_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.yaml"
    with serving.closing(server := engines.LLAMA.start()):
        assert main(["discover", server.url, "--out", str(path)]) == 0
    (pool,) = yaml.safe_load(path.read_text())["fleet"]
    assert pool["engine"]["name"] == "llama.cpp" and pool["model"] == "tiny-llama"
    assert pool["endpoints"] == [server.url]


def test_errors_are_told_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, loop, binary = tmp_path / "fleet.yaml", tmp_path / "hosts", tmp_path / "binary"
    loop.write_text(f"ftp://{loop}\n")
    binary.write_bytes(b"\xff\xfe\xfa")
    for words, why in (
        ([str(loop)], "expected an address such as http://host:8000"),
        ([str(binary)], "cannot be read as text"),
        (["ftp://a:1"], "expected an address such as http://host:8000"),
        (["http://a:99999"], "expected a port from 1 to 65535"),
        (["http://127.0.0.1:9"], "no engine has answered"),
        (["http://127.0.0.1:9", "--gpu", "h1000"], "unknown GPU 'h1000'"),
    ):
        assert main(["discover", *words, "--out", str(path)]) == 2
        assert why in capsys.readouterr().err
    assert not path.exists()
