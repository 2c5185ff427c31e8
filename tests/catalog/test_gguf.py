"""A GGUF file becomes a model with the weights of its tensors, or an error that names the file and what it lacks."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headway import catalog, scenario
from headway.catalog.gguf_header import BLOCKS, read_header
from headway.catalog.hf import whole_config
from headway.config.fleet import unmeasured_of
from headway.core.errors import HeadwayError
from headway.core.model import Model
from headway.perf.memory import kv_bytes_per_token
from headway.perf.params import num_params, state_bytes, weights_bytes

gguf = pytest.importorskip("gguf")
np = pytest.importorskip("numpy")

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", "IQ4_XS", "Q3_K", "Q2_K", "MXFP4")
Draw = Callable[[int, int], int]


class Written:
    """A file with a model's header. Its tensors have the sizes of their types, and no meaning."""

    def __init__(self, path: Path, arch: str, kind_of: Callable[[str], str], **keys: Any) -> None:
        self.path, self._kind_of, self.num_weights, self.num_bytes = path, kind_of, 0, 0.0
        self._writer = gguf.GGUFWriter(path, arch)
        self._writer.add_token_list(["a", "b"])
        for key, value in keys.items():
            name = f"{arch}.{key.replace('__', '.')}"
            if isinstance(value, list):
                self._writer.add_array(name, value)
            elif isinstance(value, bool):
                self._writer.add_bool(name, value)
            else:
                self._writer.add_uint32(name, value)

    def add(self, name: str, *shape: int) -> None:
        """A tensor with `shape`, input columns first; norms and biases have one dimension."""
        kind = "F32" if len(shape) == 1 or "gate_inp" in name else self._kind_of(name)
        called = gguf.GGMLQuantizationType[kind]
        in_block, block_bytes = gguf.GGML_QUANT_SIZES[called]
        num = int(np.prod(shape))
        row_bytes = shape[0] * block_bytes // in_block
        data = np.zeros((*reversed(shape[1:]), row_bytes), np.uint8)
        self._writer.add_tensor(f"{name}.weight", data, raw_dtype=called)
        self.num_weights += num
        self.num_bytes += num * block_bytes / in_block

    def model(self) -> Model:
        self.write()
        return catalog.model_from_config(self.path)

    def write(self) -> None:
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()


def _feed_forward(file: Written, i: int, hidden: int, width: int) -> None:
    for name in ("ffn_gate", "ffn_up"):
        file.add(f"blk.{i}.{name}", hidden, width)
    file.add(f"blk.{i}.ffn_down", width, hidden)


def _experts(file: Written, i: int, hidden: int, width: int, num: int, shared: int = 0) -> None:
    file.add(f"blk.{i}.ffn_gate_inp", hidden, num)
    for name in ("ffn_gate_exps", "ffn_up_exps"):
        file.add(f"blk.{i}.{name}", hidden, width, num)
    file.add(f"blk.{i}.ffn_down_exps", width, hidden, num)
    if shared:
        for name in ("ffn_gate_shexp", "ffn_up_shexp"):
            file.add(f"blk.{i}.{name}", hidden, shared)
        file.add(f"blk.{i}.ffn_down_shexp", shared, hidden)


def _attention(file: Written, i: int, hidden: int, heads: int, kv_heads: int, dim: int) -> None:
    file.add(f"blk.{i}.attn_norm", hidden)
    file.add(f"blk.{i}.ffn_norm", hidden)
    file.add(f"blk.{i}.attn_q", hidden, heads * dim)
    file.add(f"blk.{i}.attn_k", hidden, kv_heads * dim)
    file.add(f"blk.{i}.attn_v", hidden, kv_heads * dim)
    file.add(f"blk.{i}.attn_output", heads * dim, hidden)


def written(path: Path, arch: str, draw: Draw, kind_of: Callable[[str], str]) -> tuple[Written, dict[str, int]]:
    """A file of this architecture with drawn sizes, and the sizes."""
    hidden, layers, dim = 256 * draw(1, 2), draw(2, 4), 64 * draw(1, 2)
    kv_heads = draw(1, 2)
    heads = 4 * kv_heads  # rows of 256 weights, as the types with the largest blocks need
    width, vocabulary = 256 * draw(1, 3), 256 * draw(1, 9)
    keys: dict[str, Any] = {
        "block_count": layers,
        "embedding_length": hidden,
        "feed_forward_length": width,
        "context_length": 4096,
        "attention__head_count": heads,
        "attention__head_count_kv": kv_heads,
        "attention__key_length": dim,
        "attention__value_length": dim,
        "rope__dimension_count": dim,
    }
    experts, expert_width, dense = 0, 256 * draw(1, 2), layers
    if arch in ("qwen3moe", "gpt-oss", "deepseek2"):
        experts, dense = draw(2, 5), draw(0, 1) if arch == "deepseek2" else 0
        keys |= {"expert_count": experts, "expert_used_count": 2, "expert_feed_forward_length": expert_width}
    if arch in ("gemma3", "gpt-oss"):
        keys["attention__sliding_window"] = 128
    rank, rotary, value = 256, 64, 128
    if arch == "deepseek2":
        keys |= {
            "attention__q_lora_rank": rank,
            "attention__kv_lora_rank": rank,
            "attention__head_count_kv": 1,
            "attention__key_length": rank + rotary,
            "attention__value_length": rank,
            "attention__key_length_mla": dim + rotary,
            "attention__value_length_mla": value,
            "rope__dimension_count": rotary,
            "leading_dense_block_count": dense,
            "expert_shared_count": 1,
        }
    file = Written(path, arch, kind_of, **keys)
    file.add("token_embd", hidden, vocabulary)
    file.add("output_norm", hidden)
    if arch != "gemma3":
        file.add("output", hidden, vocabulary)
    for i in range(layers):
        if arch == "deepseek2":
            file.add(f"blk.{i}.attn_q_a", hidden, rank)
            file.add(f"blk.{i}.attn_q_b", rank, heads * (dim + rotary))
            file.add(f"blk.{i}.attn_kv_a_mqa", hidden, rank + rotary)
            file.add(f"blk.{i}.attn_k_b", dim, rank, heads)
            file.add(f"blk.{i}.attn_v_b", rank, value, heads)
            file.add(f"blk.{i}.attn_output", heads * value, hidden)
        else:
            _attention(file, i, hidden, heads, kv_heads, dim)
        if i < dense:
            _feed_forward(file, i, hidden, width)
        else:
            _experts(file, i, hidden, expert_width, experts, expert_width if arch == "deepseek2" else 0)
    return file, {"layers": layers, "kv_heads": kv_heads, "dim": dim, "latent": rank + rotary}


ARCHITECTURES = ("llama", "qwen3", "qwen3moe", "gemma3", "gpt-oss", "deepseek2")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_weights_and_bytes_are_those_of_the_tensors(arch: str, tmp_path: Path, data: st.DataObject) -> None:
    """Norms, of which the model counts its own, are at most 1%."""
    whole = st.integers
    # rows of 64 weights cannot have the types of 256 in a block
    kinds = {name: data.draw(st.sampled_from(TYPES)) for name in ("attn", "ffn", "exps", "down", "embd", "output")}
    small = data.draw(st.sampled_from(("F16", "BF16", "Q8_0", "Q4_0", "MXFP4")))

    def kind_of(name: str) -> str:
        if name.endswith("attn_k_b"):
            return small
        return next((kind for part, kind in kinds.items() if part in name), "F16")

    file, sizes = written(tmp_path / "model.gguf", arch, lambda low, high: data.draw(whole(low, high)), kind_of)
    model = file.model()
    assert num_params(model) == pytest.approx(file.num_weights, rel=0.01)
    assert weights_bytes(model) == pytest.approx(file.num_bytes, rel=0.03)
    width = sizes["latent"] if arch == "deepseek2" else 2 * sizes["kv_heads"] * sizes["dim"]
    assert kv_bytes_per_token(model) == 2 * sizes["layers"] * width
    header = read_header(file.path)
    assert sum(each.num_weights for each in header.tensors) == file.num_weights
    assert sum(each.num_bytes for each in header.tensors) == file.num_bytes
    other = tmp_path / "config.json"
    other.write_text(whole_config(file.path))
    assert catalog.model_from_config(other) == replace(model, source=str(other))


def test_types_are_those_of_ggml() -> None:
    known = {kind.value: (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert known == BLOCKS


def plain(path: Path, arch: str = "llama", **keys: Any) -> Written:
    """A file of one layer, 256 wide, with 4 heads of 64."""
    sizes = {"block_count": 1, "embedding_length": 256, "context_length": 64, "attention__head_count": 4}
    file = Written(path, arch, lambda _: "F16", **(sizes | keys))
    file.add("token_embd", 256, 512)
    return file


def full(path: Path, arch: str = "llama", **keys: Any) -> Written:
    file = plain(path, arch, **keys)
    _attention(file, 0, 256, 4, 4, 64)
    _feed_forward(file, 0, 256, 512)
    return file


def test_windows_are_llama_cpps(tmp_path: Path) -> None:
    """A list of layers counts for every architecture; a window alone for those in which llama.cpp applies it."""
    windows = {}
    for name, arch, keys in (
        ("unused", "phi3", {"attention__sliding_window": 32}),
        ("alone", "gpt-oss", {"attention__sliding_window": 32}),
        ("listed", "llama", {"attention__sliding_window": 32, "attention__sliding_window_pattern": [True]}),
    ):
        model = full(tmp_path / f"{name}.gguf", arch, **keys).model()
        windows[name] = model.sliding_window_tokens
    assert windows == {"unused": None, "alone": 32, "listed": 32}


def test_heads_may_differ_between_layers(tmp_path: Path) -> None:
    file = plain(
        tmp_path / "model.gguf", block_count=2, attention__head_count=[4, 8], attention__head_count_kv=[1, 2],
        attention__key_length=64, attention__value_length=64,
    )  # fmt: skip
    for i, (heads, kv_heads) in enumerate(((4, 1), (8, 2))):
        _attention(file, i, 256, heads, kv_heads, 64)
        _feed_forward(file, i, 256, 512)
    model = file.model()
    assert [(each.num_heads, each.num_kv_heads) for each in model.all_layers] == [(4, 1), (8, 2)]
    assert model.dtype == model.embedding_dtype == "fp16"


def test_layers_that_draft_tokens_are_left_out(tmp_path: Path) -> None:
    one = full(tmp_path / "one.gguf", "glm4moe").model()
    file = full(tmp_path / "two.gguf", "glm4moe", block_count=2, nextn_predict_layers=1)
    _attention(file, 1, 256, 4, 4, 64)
    assert num_params(file.model()) == num_params(one)


def _parted(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=4)
    for key, value in {"block_count": 1, "embedding_length": 256, "context_length": 64}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.attention.head_count", 4)
    shapes = {"token_embd": (512, 256)} | {
        f"blk.0.{name}": shape
        for name, shape in {
            "attn_q": (256, 256), "attn_k": (256, 256), "attn_v": (256, 256), "attn_output": (256, 256),
            "ffn_gate": (512, 256), "ffn_up": (512, 256), "ffn_down": (256, 512),
        }.items()
    }  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float16))
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_any_part_of_a_split_model_stands_for_all(tmp_path: Path) -> None:
    _parted(tmp_path / "model.gguf")
    whole = full(tmp_path / "whole.gguf").model()
    for i in (1, 2):
        part = catalog.model_from_config(tmp_path / f"model-{i:05}-of-00002.gguf")
        assert num_params(part) == num_params(whole)
    (tmp_path / "model-00001-of-00002.gguf").unlink()
    with pytest.raises(HeadwayError, match=r"model-00001-of-00002.gguf: No such file"):
        catalog.model_from_config(tmp_path / "model-00002-of-00002.gguf")


@pytest.mark.parametrize(
    ("arch", "keys", "why"),
    [
        ("rwkv7", {}, "model.gguf: architecture 'rwkv7' .*is not understood; expected a model of llama, "),
        ("llama", {"expert_chunk_feed_forward_length": 64}, "not understood: expert_chunk_feed_forward_length"),
        ("llama", {"attention__head_count": 0}, "llama.attention.head_count is 0; expected heads"),
        ("llama", {"block_count": 2, "attention__head_count": [4]}, "head_count has 1 values for 2 layers"),
        ("llama", {"attention__key_length": 128}, "its mixers have 262,144 weights, and 524,288 by its keys"),
        ("llama", {"block_count": 2**32 - 1}, "has 8 tensors for 4294967295 layers"),
        ("llama", {"nextn_predict_layers": 2}, "has 1 tensors for -1 layers"),
        ("llama", {"block_count": 2}, "its mixers have 262,144 weights, and 524,288 by its keys"),
    ],
)
def test_what_is_not_understood_is_refused(arch: str, keys: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match=why):
        full(tmp_path / "model.gguf", arch, **keys).model()


def test_a_file_without_tensors_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(HeadwayError, match=r"has no tensor token_embd.weight"):
        catalog.model_from_config(path)


def test_a_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    """At each byte of its header: a download that broke off."""
    file = full(tmp_path / "model.gguf")
    file.model()
    content = file.path.read_bytes()
    end = content.rindex(b"ffn_down.weight") + len("ffn_down.weight") + 4 + 2 * 8 + 4 + 8
    short = tmp_path / "short.gguf"
    for num in (0, 3, *range(4, end, 7), end - 1):
        short.write_bytes(content[:num])
        with pytest.raises(HeadwayError, match=r"short.gguf: (not a GGUF file|ends within its header|.*empty)"):
            read_header(short)
    short.write_bytes(content[:end])
    assert read_header(short) == read_header(file.path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{}", "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1), "of version 1; expected"),
        (b"GGUF" + struct.pack(">I", 3), "of version 50331648; expected little-endian"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 99), "a value of unknown type 99"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 8, 2**60), "ends within its header"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 4, 2**60), "ends within its header"),
        (b"GGUF" + struct.pack("<IQQQ1sIQ", 3, 0, 1, 1, b"a", 8, 2**63), "ends within its header"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQQ", 3, 0, 1, 1, b"a", 9, 8, 2, 2**64 - 1), "ends within its header"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 9) + 9999 * struct.pack("<IQ", 9, 1), "unknown type 9;"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"a", 1, 32, 99, 0), "a is of unknown type 99"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"a", 1, 0, 0, 0), r"shape \(0,\) without weights"),
    ],
)
def test_other_files_are_refused(content: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(HeadwayError, match=why):
        catalog.model_from_config(path)


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Files of several architectures, without weights."""
    folder, found = tmp_path_factory.mktemp("whole"), []
    for arch in ("llama", "deepseek2", "gpt-oss"):
        written(folder / arch, arch, lambda least, most: least, lambda name: "F16")[0].write()
        found.append((folder / arch).read_bytes())
    for arch, (keys, _) in STATES.items():
        file = plain(folder / arch, arch, block_count=2, **keys)
        _state_layers(arch, file)
        file.write()
        found.append((folder / arch).read_bytes())
    return [content[: content.rindex(b".weight") + 50] for content in found]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_header_is_a_model_or_an_error(headers: list[bytes], tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(data.draw(st.sampled_from(headers)))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(8, len(content) - 1))] = data.draw(st.sampled_from([*range(13), 32, 127, 255]))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    try:
        model = catalog.model_from_config(path)
    except HeadwayError as error:
        assert "damaged.gguf" in str(error)
    else:
        assert weights_bytes(model) > 0


def test_a_scenario_may_name_it(tmp_path: Path) -> None:
    full(tmp_path / "model.gguf").model()
    document: dict[str, Any] = {
        "fleet": [{"model": {"config": "model.gguf"}, "gpu": "cpu", "engine": "llama.cpp"}],
        "workload": {"prompt_tokens": 8, "output_tokens": 4, "num_requests": 3, "arrivals": 1.0},
    }
    path = tmp_path / "scenario.yaml"
    path.write_text(json.dumps(document))
    chosen = scenario.load(path)
    assert chosen.fleet.pools[0].model.name == "model"
    assert len(scenario.run(chosen).records.requests["request"]) == 3
    document["fleet"][0]["quantization"] = "none"
    path.write_text(json.dumps(document))
    with pytest.raises(HeadwayError, match=r"fleet\[0\].quantization: the weights of a GGUF file have its types"):
        scenario.load(path)


def test_step_times_of_its_types_are_not_calibrated() -> None:
    """On no GPU: 8 bits are not those of a measured type, nor is a type of the embeddings alone."""
    plain = catalog.model("llama-3.1-8b")
    for types in ({"dtype": "q4.5"}, {"dtype": "q8.5"}, {"embedding_dtype": "q6.56"}):
        assert unmeasured_of(replace(plain, **types)) == [
            *unmeasured_of(plain), "products of GGUF's types with the efficiencies of other types",
        ]  # fmt: skip


def _state_layers(arch: str, file: Written) -> None:
    """Layer 0 has a state, layer 1 attention, as far as the architecture has any; with the shapes of llama.cpp."""
    if arch == "lfm2":
        for name, shape in (("in_proj", (256, 768)), ("conv", (3, 256)), ("out_proj", (256, 256))):
            file.add(f"blk.0.shortconv.{name}", *shape)
    elif arch == "mamba2":
        for i in range(2):
            file.add(f"blk.{i}.ssm_in", 256, 2 * 512 + 2 * 2 * 64 + 8)
            file.add(f"blk.{i}.ssm_conv1d", 4, 512 + 2 * 2 * 64)
            file.add(f"blk.{i}.ssm_a", 1, 8)
            file.add(f"blk.{i}.ssm_d", 1, 8)
            file.add(f"blk.{i}.ssm_norm", 256, 2)
            file.add(f"blk.{i}.ssm_out", 512, 256)
    else:
        for name, shape in (
            ("attn_qkv", (256, 2 * 4 * 32 + 8 * 32)), ("attn_gate", (256, 8 * 32)), ("ssm_beta_alpha", (256, 16)),
            ("ssm_conv1d", (4, 2 * 4 * 32 + 8 * 32)), ("ssm_out", (8 * 32, 256)),
        ):  # fmt: skip
            file.add(f"blk.0.{name}", *shape)
    if arch != "mamba2":
        gate = 2 if arch == "qwen3next" else 1
        file.add("blk.1.attn_q", 256, gate * 256)
        file.add("blk.1.attn_k", 256, 128)
        file.add("blk.1.attn_v", 256, 128)
        file.add("blk.1.attn_output", 256, 256)
        for i in range(2):
            _feed_forward(file, i, 256, 512)


SSM = {"ssm__conv_kernel": 4, "ssm__group_count": 2, "ssm__state_size": 64, "ssm__inner_size": 512}
STATES: dict[str, tuple[dict[str, Any], float]] = {
    "lfm2": ({"attention__head_count_kv": [0, 2], "shortconv__l_cache": 3}, 2.0 * 256 * 3),
    "mamba2": ({**SSM, "ssm__time_step_rank": 8}, 2 * (4.0 * 512 * 64 + 2 * 4 * (512 + 2 * 2 * 64))),
    "qwen3next": (
        {
            "attention__head_count_kv": 2, "full_attention_interval": 2, "attention__key_length": 64,
            "attention__value_length": 64, "ssm__conv_kernel": 4, "ssm__group_count": 4, "ssm__state_size": 32,
            "ssm__time_step_rank": 8, "ssm__inner_size": 256,
        },
        4.0 * 8 * 32 * 32 + 2 * 4 * (2 * 4 * 32 + 8 * 32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("arch", STATES)
def test_states_are_those_of_the_keys(arch: str, tmp_path: Path) -> None:
    keys, state = STATES[arch]
    file = plain(tmp_path / "model.gguf", arch, block_count=2, **keys)
    _state_layers(arch, file)
    model = file.model()
    assert num_params(model) == pytest.approx(file.num_weights, rel=0.01)
    assert state_bytes(model) == state
    assert kv_bytes_per_token(model) == (0 if arch == "mamba2" else 2 * 2 * 2 * 64)
