"""The keys of a Hugging Face config.json. Reads keys by name, and reports unread keys that may matter."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import HeadwayError

MATTERS = re.compile(
    r"expert|moe|layer|(^|_)kv|window|quant|mamba|ssm|intermediate|ffn|head_dim|latent|lora_rank|swa_|sliding|indexer"
    r"|shared|state_size|d_state|conv_dim|block_type|altup|laurel|per_stack"
)
"""Keys on which sizes or layer kinds may depend, by their names."""
HARMLESS = re.compile(
    r"norm|drop|loss|aux|bias|scal|multiplier|init|nextn|mtp|output_|_id$|_ids$|theta|rope|token_|_fn$|_act$"
    r"|_activation$|activation_|dtype|jitter|scor|group|softcap|limit|_impl|chunk_size|index_topk|temperature|interleave"
    r"|alpha|beta|residual|pdrop|cross_attention|tie_|_type$|kernels|tuning|factor|_method$|router_|moe_layer_use"
    r"|use_mup|freeze|layer_class|gating|capacity|parallel_attn|kv_cache|_path$|selection|select_layer|feature_layer"
    r"|n_layer_indices|vision|image|audio|video|deepstack|recompute|upcast|elementwise|renormal|auto_map|float|exclude"
    r"|expert_map|lm_head|overlap|sink|combination|is_moe_first|dense_act|no_split|keep_|load_balanc|fused|deterministic"
)
"""Keys that affect a model's values, its training or other parts of it, but no sizes."""


@cache
def _families() -> dict[str, dict[str, Any]]:
    data = files("headway.catalog") / "data" / "families.json"
    return msgspec.json.decode(data.read_bytes(), type=dict[str, dict[str, Any]])


def family_defaults(model_type: str) -> dict[str, Any]:
    """`transformers`' data on a family: its key `aliases`, its `defaults`, and the family of its `text` part."""
    return _families().get(model_type, {})


def _family_of(keys: Mapping[str, Any]) -> str:
    """The config's `model_type`. If `transformers` does not know it, the family that the architecture names."""
    stated, architectures = str(keys.get("model_type") or ""), keys.get("architectures")
    if stated in _families() or not isinstance(architectures, list):
        return stated
    names = [str(each).partition("For")[0].lower() for each in architectures]
    return next((family for name in names if (family := _by_architecture().get(name))), stated)


@cache
def _by_architecture() -> dict[str, str]:
    """Families by the first part of their class name, for example `deepseekv3` for DeepseekV3ForCausalLM."""
    return {name.replace("_", ""): name for name in _families()}


class ConfigKeys(dict[str, Any]):
    """The keys of a config, with its family's names and defaults for missing keys."""

    def __init__(self, file: Path, keys: Mapping[str, Any], defaults: bool = True) -> None:
        super().__init__(keys)
        self.file = file
        self.read: set[str] = set()
        self.family = _family_of(keys)
        family = _families().get(self.family, {}) if defaults else {}
        self.is_known = bool(family)
        self._aliases: dict[str, str] = family.get("aliases", {})
        self._defaults: dict[str, Any] = family.get("defaults", {})

    def value(self, *names: str, default: Any = None) -> Any:
        """The value of the first of `names` that is present and not null, otherwise the family's default."""
        synonyms = list(dict.fromkeys(each for name in names for each in (self._aliases.get(name, name), name)))
        found = next((self[each] for each in synonyms if self.get(each) is not None), None)
        self.read.update(each for each in synonyms if found is None or self.get(each) in (found, None))
        if found is not None or any(each in self for each in synonyms):  # an explicit null prevents the default
            return default if found is None else found
        for name in names:
            own = self._aliases.get(name, name)
            if (found := self._defaults.get(own, self._defaults.get(name))) is not None:
                return found
        return default

    def given(self, name: str) -> bool:
        """Whether the config itself contains the key."""
        self.read.add(name)
        return self.get(name) is not None

    def count(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """The whole number, at least `least`, under the first of `names` that is present."""
        value = self.value(*names, default=default)
        if value is None:
            named = "intermediate_size" if "intermediate_size" in names else names[0]
            raise HeadwayError(
                f"{self.file}: key {named!r} is missing; expected a positive whole number, as in a "
                "Hugging Face config.json of a transformer"
            )
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            name = next((n for n in names if self.get(self._aliases.get(n, n), self.get(n)) is not None), names[0])
            what = "a positive whole number" if least == 1 else f"a whole number, {least} or more"
            raise self.error(self._aliases.get(name, name), value, what)
        return value

    def per_layer(self, name: str, num_layers: int) -> list[Any] | None:
        """A list with a value for each layer; None if the key is absent. Raises HeadwayError for a list that is too
        short."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < num_layers:
            raise self.error(name, value, f"a list of {num_layers} values, one for each layer")
        return value[:num_layers]

    def error(self, name: str, value: Any, expected: str) -> HeadwayError:
        shown = repr(value)
        if len(shown) > 80:
            shown = f"{shown[:60]}... ({len(value)} values)" if isinstance(value, list | dict) else f"{shown[:60]}..."
        return HeadwayError(f"{self.file}: {name} is {shown}; expected {expected}")

    def not_understood(self) -> list[str]:
        """Keys on which sizes may depend, and that were not read."""
        read = self.read | set(self.get("_parts") or ())
        return [key for key, value in self.items() if key not in read and self._matters(key, value)]

    def _matters(self, key: str, value: Any) -> bool:
        if value in (None, False, 0, "", [], {}) or key.startswith("_") or isinstance(value, dict):
            return False
        if not MATTERS.search(key) or HARMLESS.search(key):
            return False
        return not (key in self._defaults and self._defaults[key] == value)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file as Python writes it, with Infinity and NaN, and with an optional byte order mark."""
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise HeadwayError(f"{file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise HeadwayError(f"{file}: not JSON: {error}") from error
    try:
        keys = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HeadwayError(f"{file}: not JSON: {error}") from error
    if not isinstance(keys, dict):
        raise HeadwayError(f"{file}: expected an object of keys, as in a Hugging Face config.json")
    return keys
