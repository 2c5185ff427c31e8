"""Types of a checkpoint's weights, from its config.json or from a quantiser's file in the same folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cached_property
from pathlib import Path
from typing import Any

from headway.catalog.config_keys import ConfigKeys, read_json
from headway.core.errors import HeadwayError

BESIDE = ("hf_quant_config.json", "quantize_config.json")
"""Files in which NVIDIA's quantiser and older versions of GPTQ and AWQ store the quantisation."""

_MODELOPT = {
    "FP8": "fp8", "FP8_PER_CHANNEL_PER_TOKEN": "fp8", "FP8_PB_WO": "fp8", "FP8_PB_REAL": "fp8", "MXFP8": "fp8",
    "NVFP4": "nvfp4", "NVFP4_AWQ": "nvfp4", "W4A16_NVFP4": "nvfp4", "W4A8_NVFP4_FP8": "nvfp4", "MXFP4": "int4",
    "W4A8_MXFP4_FP8": "int4", "INT4_AWQ": "w4a16", "W4A16_AWQ": "w4a16", "W4A16": "w4a16", "W4A8_AWQ": "w4a16",
    "INT8_SQ": "int8", "W8A8_SQ_PER_CHANNEL": "int8", "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN": "int8",
    "W8A16": "w8a16", "NO_QUANT": "bf16",
}  # fmt: skip
_SIMPLE = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "mxfp8": "fp8",
    "modelopt_fp8": "fp8",
    "mxfp4": "int4",
    "gpt_oss_mxfp4": "int4",
    "modelopt_fp4": "nvfp4",
    "nvfp4": "nvfp4",
}
EXPECTED = (
    "fp8, mxfp4, nvfp4, awq, gptq, bitsandbytes, compressed-tensors, modelopt, quark of 4 or 8 bits, or no quantisation"
)


class ModuleNames:
    """Module names in quantisers' notation: complete names or dotted parts, prefixes, patterns, `re:` expressions."""

    def __init__(self, written: Iterable[str]) -> None:
        self._whole: set[str] = set()
        self._parts: list[str] = []
        expressions = []
        for name in written:
            if name.startswith("re:"):
                expressions.append(rf"(?:.*\.)?(?:{name[3:].lstrip('^')})")
            elif "*" in name:
                expressions.append(translate(_bare(name)))
            elif (own := _bare(name)).startswith("layers."):
                self._whole.add(own)
            else:
                self._parts.append(f".{own}.")
        self._expressions = [found for each in expressions if (found := _compiled(each)) is not None]

    def has(self, module: str) -> bool:
        """Whether one of the names matches the module, for example `layers.0.self_attn.q_proj`."""
        parents = module
        while parents:
            if parents in self._whole:
                return True
            parents = parents.rpartition(".")[0]
        if any(part in f".{module}." for part in self._parts):
            return True
        return any(each.match(module) or each.match(f"model.{module}") for each in self._expressions)


def _compiled(expression: str) -> re.Pattern[str] | None:
    try:
        return re.compile(expression)
    except re.error:
        return None


@dataclass(frozen=True)
class Quantization:
    """Types of the weights of linear layers, by module name."""

    dtype: str
    ignored: tuple[str, ...] = ()
    """Modules whose weights have 16 bits."""
    by_module: Mapping[str, str] = field(default_factory=dict)
    """Types by module, if a quantiser has mixed types; all other modules have 16 bits."""
    by_target: tuple[tuple[str, str], ...] = ()
    """Types of groups of modules, by a name or pattern, or `Linear` for all. The last match counts."""
    only_experts: bool = False

    def of(self, modules: Sequence[str]) -> str:
        """The most frequent type among these modules of one layer. The layer may lack some of them."""
        found = [dtype for each in modules if (dtype := self._of(each))] or ["bf16"]
        return max(dict.fromkeys(found), key=found.count)

    def _of(self, module: str) -> str:
        """The type of one module; empty if the checkpoint's list does not contain it."""
        if self.by_module:
            parents = module
            while parents:
                if (dtype := self._listed.get(parents)) is not None:
                    return dtype
                parents = parents.rpartition(".")[0]
            return ""
        if (self.only_experts and ".experts" not in module) or self._ignored.has(module):
            return "bf16"
        if self.by_target:
            named = [dtype for target, dtype in self._targets if target is None or target.has(module)]
            return named[-1] if named else "bf16"
        return self.dtype

    @cached_property
    def _listed(self) -> dict[str, str]:
        return {_bare(name): dtype for name, dtype in self.by_module.items()}

    @cached_property
    def _ignored(self) -> ModuleNames:
        return ModuleNames(self.ignored)

    @cached_property
    def _targets(self) -> list[tuple[ModuleNames | None, str]]:
        return [(None if name == "Linear" else ModuleNames([name]), dtype) for name, dtype in self.by_target]


def quantization_of(config: ConfigKeys, outer: Mapping[str, Any]) -> Quantization | None:
    """The quantisation in the config or in a separate file; None if the weights have the config's own type.

    Raises HeadwayError for an unknown method.
    """
    config.read |= {"quantization_config", "compression_config", "quantization"}
    for keys in (config, outer):
        for name in ("quantization_config", "compression_config", "quantization"):
            stated = keys.get(name)
            if isinstance(stated, dict) and stated:
                return _stated(config.file, name, stated)
    for name in BESIDE:
        beside = config.file.with_name(name)
        if config.file.name == "config.json" and beside.exists():
            keys = read_json(beside)
            stated = keys.get("quantization", keys)
            if not isinstance(stated, dict):
                raise HeadwayError(f"{beside}: quantization is {stated!r}; expected an object")
            return _modelopt(beside, name, stated) if name == BESIDE[0] else _gptq(beside, name, stated)
    return None


def _stated(file: Path, name: str, stated: dict[str, Any]) -> Quantization | None:
    method = str(stated.get("quant_method") or "").lower().replace("_", "-")
    ignored = _names(stated, "modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "exclude")
    if method in ("modelopt", "nvfp4", "modelopt-mixed") or (not method and _algorithm(stated)):
        return _modelopt(file, name, stated)
    if method.replace("-", "_") in _SIMPLE:
        dtype = _SIMPLE[method.replace("-", "_")]
        return Quantization(dtype, ignored, only_experts=dtype == "int4")
    if method in ("awq", "gptq", "auto-round", "auto-gptq", "auto-awq", "gptq-marlin", "awq-marlin", "inc"):
        return _gptq(file, name, stated)
    if method == "bitsandbytes" or "load_in_4bit" in stated or "load_in_8bit" in stated:
        return _bitsandbytes(stated)
    if method in ("compressed-tensors", "quark", "fp-quant") or (not method and "config_groups" in stated):
        return _groups(file, name, stated, ignored)
    if method == "torchao":
        return _torchao(file, name, stated)
    raise _unknown(file, name, f"of method {stated.get('quant_method')!r}")


def _algorithm(stated: Mapping[str, Any]) -> str:
    return str(stated.get("quant_algo") or stated.get("quantization_algo") or "").upper()


def _modelopt(file: Path, name: str, stated: dict[str, Any]) -> Quantization | None:
    ignored = _names(stated, "exclude_modules", "ignore", "modules_to_not_convert")
    algorithm = _algorithm(stated)
    parts = stated.get("quantized_layers")
    if algorithm in ("MIXED_PRECISION", "") and isinstance(parts, dict) and parts:
        by_module = {}
        for module, part in parts.items():
            own = _algorithm(part) if isinstance(part, dict) else ""
            if own not in _MODELOPT:
                raise _unknown(file, name, f"of {own or part!r} in quantized_layers.{module}")
            by_module[module] = _MODELOPT[own]
        most = max(set(by_module.values()), key=list(by_module.values()).count)
        return Quantization(most, (), by_module)
    if not algorithm and isinstance(stated.get("config_groups"), dict):
        return _groups(file, name, stated, ignored)
    if not algorithm:
        return None
    if algorithm not in _MODELOPT:
        raise _unknown(file, name, f"of quant_algo {algorithm!r}")
    dtype, group = _MODELOPT[algorithm], stated.get("group_size")
    if dtype in ("w4a16", "w8a16") and isinstance(group, int) and group > 0:
        dtype = _grouped(dtype, group)
    return None if dtype == "bf16" else Quantization(dtype, ignored)


def _gptq(file: Path, name: str, stated: dict[str, Any]) -> Quantization:
    """GPTQ, AWQ and AutoRound: integers of `bits` with a scale and a zero for each `group_size`."""
    bits, group = stated.get("bits", stated.get("w_bit", 4)), stated.get("group_size", stated.get("q_group_size", 128))
    if bits not in (4, 8):
        raise _unknown(file, name, f"of {bits!r} bits")
    ignored = _names(stated, "modules_to_not_convert")
    dynamic = stated.get("dynamic")
    if isinstance(dynamic, dict):  # GPTQModel: "-:" before a regular expression excludes modules
        ignored += tuple(f"re:{each[2:]}" for each in dynamic if each.startswith("-:"))
    extra = stated.get("extra_config")
    if isinstance(extra, dict):  # AutoRound
        ignored += tuple(each for each, part in extra.items() if isinstance(part, dict) and part.get("bits", 4) >= 16)
    return Quantization(_grouped("w4a16" if bits == 4 else "w8a16", group), (*ignored, "lm_head"))


def _bitsandbytes(stated: dict[str, Any]) -> Quantization:
    ignored = _names(stated, "llm_int8_skip_modules")
    if stated.get("load_in_8bit") or stated.get("_load_in_8bit"):
        return Quantization("int8", ignored)
    return Quantization("nf4" if stated.get("bnb_4bit_use_double_quant") else "w4a16-g64", ignored)


def _torchao(file: Path, name: str, stated: dict[str, Any]) -> Quantization:
    kind = str(stated.get("quant_type"))
    for pattern, dtype in (("float8|fp8", "fp8"), ("int4|4w", "w4a16"), ("int8|8w|8d", "int8")):
        if re.search(pattern, kind, re.IGNORECASE):
            return Quantization(dtype, _names(stated, "modules_to_not_convert"))
    raise _unknown(file, name, f"of torchao's {kind}")


def _groups(file: Path, name: str, stated: dict[str, Any], ignored: tuple[str, ...]) -> Quantization | None:
    """compressed-tensors: groups of modules with their weight types."""
    groups = stated.get("config_groups") or stated.get("global_quant_config")
    groups = (
        [groups]
        if isinstance(groups, dict) and ("weight" in groups or "weights" in groups)
        else (list(groups.values()) if isinstance(groups, dict) else [])
    )
    dtypes: dict[str, str] = {}
    for group in groups:
        weights = group.get("weights") or group.get("weight") or {} if isinstance(group, dict) else {}
        if isinstance(weights, list):
            weights = weights[0]
        dtype = _group_dtype(weights)
        if dtype is None:
            raise _unknown(file, name, f"of weights {weights!r}")
        for target in group.get("targets") or ["Linear"]:
            dtypes[str(target)] = dtype
    if not dtypes:
        raise _unknown(file, name, "without groups of weights (config_groups)")
    if len(set(dtypes.values())) == 1:
        dtype = next(iter(dtypes.values()))
        experts = all("expert" in target for target in dtypes)
        return None if dtype == "bf16" else Quantization(dtype, ignored, only_experts=experts)
    return _mixed(dtypes, ignored)


def _mixed(dtypes: dict[str, str], ignored: tuple[str, ...]) -> Quantization:
    most = dtypes.get("Linear") or max(set(dtypes.values()), key=list(dtypes.values()).count)
    ordered = sorted(dtypes.items(), key=lambda each: each[0] != "Linear")
    return Quantization(most, ignored, by_target=tuple(ordered))


def _group_dtype(weights: Mapping[str, Any]) -> str | None:
    bits, kind, group = weights.get("num_bits"), str(weights.get("type") or "int"), weights.get("group_size")
    own = str(weights.get("dtype") or "").lower()
    if own:  # AMD Quark
        known = {"fp8_e4m3": "fp8", "fp4": "int4", "int4": "w4a16", "uint4": "w4a16", "int8": "int8"}
        return known.get(own)
    if bits == 8:
        if kind == "float":
            return "fp8"
        return _grouped("w8a16", group) if isinstance(group, int) and group > 0 else "int8"
    if bits == 4:
        if kind == "float":
            return "int4" if group == 32 else "nvfp4"
        return _grouped("w4a16", group)
    return "bf16" if bits == 16 else None


def _grouped(dtype: str, group: Any) -> str:
    """The name of a type with this group size: 128 is the usual size, and -1 means one scale per channel."""
    if not isinstance(group, int) or group == 128:
        return dtype
    return f"{dtype}-g{group if group > 0 else 4096}"


def _names(stated: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    found: Iterable[Any] = ()
    for key in keys:
        if isinstance(stated.get(key), list):
            found = [*found, *stated[key]]
    return tuple(str(each) for each in found)


def _bare(name: str) -> str:
    """A module's name without the outer model names around its layers."""
    return re.sub(r"^.*?(?=layers\.)", "", name)


def _unknown(file: Path, name: str, what: str) -> HeadwayError:
    at = name if name in ("quantization_config", "compression_config", "quantization") else "quantisation"
    return HeadwayError(f"{file}: {at} {what} is not supported; expected {EXPECTED}")
