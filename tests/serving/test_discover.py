"""Running engines -> a fleet file that serves and simulates, and what changed since."""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from msgspec.structs import replace

import engines
import serving
from headway import catalog, scenario
from headway.cli import main
from headway.core.errors import HeadwayError
from headway.core.fleet import Parallel
from headway.perf.params import num_params, weights_bytes
from headway.perf.speculation import step_model
from headway.serving.discover import fleet_file
from headway.serving.discover.model import shape_of
from headway.serving.discover.pages import fetcher
from headway.serving.discover.pools import LIKELY, pools
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
    "/api/show": {
        "details": {"format": "gguf", "family": "qwen3", "parameter_size": "8.2B", "quantization_level": "Q4_K_M"},
        "model_info": {
            "general.architecture": "qwen3",
            "general.parameter_count": 8190735360,
            "qwen3.context_length": 40960,
            "qwen3.embedding_length": 4096,
        },
    },
    "/api/tags": {"models": [{"name": "llama3.1:8b", "size": 4}, {"name": "qwen3:8b", "size": 5225388164}]},
    "/api/ps": {"models": [{"name": "qwen3:8b", "model": "qwen3:8b", "context_length": 4096}]},
}
TRT = {"/v1/models": {"data": [{"id": "gpt-oss-20b", "owned_by": "tensorrt_llm"}]}, "/version": {"version": "1.2.0"}}


def asked(pages: Mapping[str, Any], url: str = "http://a:8000") -> FoundEngine:
    def fetch(path: str, body: Any = None) -> bytes | None:
        assert (path == "/api/show") == (body is not None)
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
    assert any("they share 4,096 tokens" in each and "16,384" in each for each in unknown(found))
    built_elsewhere = asked(LLAMA | {"/props": {**LLAMA["/props"], "build_info": "b0-unknown"}})
    assert (found.version, built_elsewhere.version) == ("b6600-1a2b3c", "")
    ollama, trt = asked(OLLAMA), asked(TRT)
    assert (ollama.product, ollama.version, ollama.api) == ("Ollama", "0.12.3", "openai")
    assert ollama.other_models == ("llama3.1:8b",)
    assert ollama.sizes == {"n_params": 8190735360, "n_embd": 4096, "n_ctx_train": 40960, "size": 5225388164}
    assert ollama.context_tokens == 4096  # as it is loaded
    bare = asked({key: OLLAMA[key] for key in ("/v1/models", "/api/version")})
    assert (bare.product, bare.sizes, bare.context_tokens) == ("Ollama", {}, None)
    assert (trt.product, trt.version) == ("TensorRT-LLM", "1.2.0")
    gateway = asked({"/v1/models": {"data": [{"id": "qwen3-8b", "owned_by": "headway"}]}, "/version": {"version": "9"}})
    assert (gateway.product, gateway.version, gateway.api) == ("Headway", "9", "openai")
    (pool,) = pools([ollama])
    assert pool.entry["api"] == "openai" and "engine" not in pool.entry and "llama3.1:8b" in pool.notes["endpoints"]
    assert "8,190,735,360 weights" in pool.notes["model"]


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
    listed = {"/v1/models": {"data": [{"id": "house-model"}]}}
    found = asked({**listed, **pages})
    assert found.model == "house-model" and found.kv_capacity_tokens is None
    ollama = asked({**listed, **OLLAMA, **dict.fromkeys(("/api/show", "/api/tags", "/api/ps"), odd)})
    assert (ollama.product, ollama.sizes) == ("Ollama", {})
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


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("folder", ["", "fits"])
def test_coefficients_are_named_in_their_pool_alone(kind: str, folder: str, tmp_path: Path) -> None:
    path, fitted = tmp_path / "fleet.yaml", tmp_path / folder / "fitted.json"
    path.write_text(FILES[kind])
    for file in (fitted, fitted.with_name("other: one.json")):  # replaced by a later one
        text = fleet_file.with_coefficients(path, "a", file)
        before, after = yaml.safe_load(FILES[kind]), yaml.safe_load(text)
        expected = str(file) if folder else file.name
        assert after == {**before, "fleet": [{**before["fleet"][0], "coefficients": expected}]}
        rest = iter(text)
        assert all(character in rest for character in FILES[kind])
        path.write_text(text)
    with pytest.raises(HeadwayError, match=r"fleet.yaml: has no pool 'b'"):
        fleet_file.with_coefficients(path, "b", fitted)


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


def test_an_emulated_sglang_is_an_sglang(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    with serving.closing(server := serving.emulator("--engine", "sglang")):
        assert main(["discover", server.url, "--out", str(path)]) == 0
    (pool,) = scenario.load(path).fleet.pools
    assert (pool.gpu.name, pool.engine.name, pool.replicas) == ("h100-80gb-sxm", "sglang", 1)


@pytest.mark.skipif(engines.NO_LLAMA, reason="pip install xllamacpp gguf")
def test_a_real_llama_cpp_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, other = tmp_path / "fleet.yaml", tmp_path / "other.yaml"
    with serving.closing(server := engines.LLAMA.start()):
        assert main(["discover", server.url, "--gpu", "cpu", "--out", str(path)]) == 0
        assert main(["discover", server.url, "--no-measure", "--out", str(other)]) == 0
        (pool,) = yaml.safe_load(path.read_text())["fleet"]
        assert (pool["engine"], pool["served_name"], pool["endpoints"]) == (
            "llama.cpp", "tiny-llama", [server.url],
        )  # fmt: skip
        chosen = scenario.load(path)
        (simulated,) = chosen.fleet.pools
        assert num_params(simulated.model) == asked_of(server.url).sizes["n_params"] == 676_224
        assert weights_bytes(simulated.model) == pytest.approx(asked_of(server.url).sizes["size"], rel=0.01)
        assert "tiny-llama" in simulated.model.names and simulated.gpu.name == "cpu-server"
        assert len(scenario.run(chosen).records.requests["request"]) == 500
        (served,) = yaml.safe_load(other.read_text())["fleet"]  # nothing tells the GPU
        assert served["model"] == "tiny-llama" and "gpu" not in served
        assert str(pool["model"]["config"]) in other.read_text()
        with serving.closing(front := serving.gateway(path)):  # what is simulated serves as well
            serving.all_up(front, 1)
            listed = [each["id"] for each in serving.send(front, "/v1/models").json()["data"]]
            assert listed == ["tiny-llama", simulated.model.name]
            answer = httpx2.post(
                f"{front.url}/v1/completions", json={"model": "tiny-llama", "prompt": "a", "max_tokens": 2}
            )
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] <= 2


def asked_of(url: str) -> FoundEngine:
    return probe(url, fetcher(url, None, 5.0))


@pytest.mark.skipif(engines.NO_LLAMA, reason="pip install xllamacpp gguf")
def test_a_file_of_weights_counts_if_it_is_the_engines(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    runpy.run_path(str(engines.EXAMPLES / "tiny_llama.py"))["write_model"](path)
    sizes = {"n_params": 676_224, "size": 2_704_896, "n_embd": 128, "n_ctx_train": 4096}
    engine = FoundEngine("http://a:1", "llama.cpp", model="tiny", weights=str(path), sizes=sizes)
    found = shape_of(engine)
    assert found.model is not None and num_params(found.model) == sizes["n_params"]
    assert found.entry == {"config": str(path)} and not found.note
    for other_size in (400_000, int(0.9 * sizes["size"])):  # of the same shape, quantised
        other = shape_of(replace(engine, sizes={**sizes, "size": other_size}))
        assert other.model is None and "is another model on this machine (size is 2,70" in other.note
    absent = shape_of(replace(engine, weights="/models/other/tiny.gguf"))
    assert absent.model is None and "676,224 weights, 2,704,896 bytes, 128 wide, 4,096 tokens of context" in absent.note
    (pool,) = pools([replace(engine, weights="/models/other/tiny.gguf")])
    assert pool.entry["model"] == "tiny" and "gpu" not in pool.entry
    known = replace(engine, model="qwen3-8b", weights="/m/Qwen3-8B.gguf", sizes={"size": 5_000_000_000})
    assert "its weights have 5 GB, the catalog's 16.4: `model: {config: FILE.gguf}`" in shape_of(known).note


def test_llama_cpp_has_the_gpu_of_its_speed_and_others_no_processor() -> None:
    """Its KV cache has the size of its options. At the speed that is expected of a GPU, that GPU or its like fits."""
    llama = FoundEngine("http://a:1", "llama.cpp", model="qwen3-8b", kv_capacity_tokens=4096, is_idle=True)
    model, engine = catalog.model("qwen3-8b"), catalog.engine("llama.cpp")
    expected = {}
    for gpu in catalog.gpus():
        with suppress(HeadwayError):  # too small
            expected[gpu.name] = step_model(model, gpu, engine, Parallel()).line(1, 64)[0]
    for name, token_s in expected.items():
        (pool,) = pools([llama], token_s={llama.url: token_s})
        assert abs(math.log(expected[pool.entry["gpu"]] / token_s)) < LIKELY, name
    assert _guessed(llama, expected["cpu-server"]) == "cpu-server"
    assert _guessed(llama, 10 * expected["cpu-server"]) == "cpu-server"  # slower than all
    assert _guessed(llama, None) is None
    vllm = replace(llama, api="vllm", kv_capacity_tokens=None)
    assert _guessed(vllm, expected["cpu-server"]) is None


def _guessed(engine: FoundEngine, token_s: float | None) -> str | None:
    (pool,) = pools([engine], token_s={} if token_s is None else {engine.url: token_s})
    return pool.entry.get("gpu")


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
