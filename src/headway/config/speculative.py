"""The pool key `speculative`: the drafts of its engines, and the shape of the draft model."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from msgspec.structs import replace

from headway.catalog import model_of_config
from headway.catalog.load import repository_of
from headway.config.own_hardware import OwnHardware
from headway.config.spec import SpeculativeSpec
from headway.config.strict_yaml import Key, Places
from headway.core.fleet import Engine, Model, Parallel, Speculative, by_rate

EAGLE3_VOCAB_SIZE = 32_000
"""Vocabulary of the published heads for Llama 3.1 and 3.3 (`draft_vocab_size` in
yuhuili/EAGLE3-LLaMA3.1-Instruct-8B)."""


def with_speculation(
    spec: SpeculativeSpec,
    engine: Engine,
    target: Model,
    parallel: Parallel,
    at: Key,
    base_dir: Path,
    places: Places,
    own: OwnHardware,
) -> Engine:
    """The engine with its drafts; paths are relative to `base_dir`. Raises HeadwayError for an invalid key."""
    _check(spec, engine, parallel, at, places)
    num = spec.num_speculative_tokens
    draft = _draft(spec, target, at, base_dir, places, own)
    setting = Speculative(
        method=spec.method,
        num_speculative_tokens=num,
        acceptance=spec.acceptance if isinstance(spec.acceptance, tuple) else by_rate(spec.acceptance, num),
        num_speculative_tokens_per_batch_size=spec.num_speculative_tokens_per_batch_size,
        match_share=spec.match_share,
        model=_repository(spec, draft),
        draft=draft,
        draft_shares_embeddings=spec.method in ("eagle", "mtp"),
        draft_tensor_parallel_size=spec.draft_tensor_parallel_size,
        prompt_lookup_max=spec.prompt_lookup_max,
        prompt_lookup_min=spec.prompt_lookup_min,
    )
    return replace(engine, speculative=setting)


def _repository(spec: SpeculativeSpec, draft: Model | None) -> str:
    """The draft model or head that engines load."""
    if spec.hf_id or draft is None:
        return spec.hf_id
    if spec.method != "draft_model":
        return str(spec.model)
    return repository_of(draft, spec.model) if isinstance(spec.model, str) else draft.hf_id


def _check(spec: SpeculativeSpec, engine: Engine, parallel: Parallel, at: Key, places: Places) -> None:
    _check_acceptance(spec, at, places)
    _check_schedule(spec, engine, at, places)
    if (shared := spec.draft_tensor_parallel_size) not in (None, 1, parallel.tp):
        raise places.error((*at, "draft_tensor_parallel_size"), f"{shared}; expected 1 or tp ({parallel.tp})")
    for name in ("match_share", "prompt_lookup_max", "prompt_lookup_min"):
        if spec.method != "ngram" and getattr(spec, name) not in (None, 1.0):
            raise places.error((*at, name), f"goes with method ngram; this is {spec.method}")
    if parallel.pp > 1:
        raise places.error(at, f"pp is {parallel.pp}; drafts in a pipeline are not modelled; expected pp: 1")
    if engine.batching not in ("chunked", "whole-prompt"):
        what = f"engine {engine.name} runs prompts apart ({engine.batching}); expected chunked or whole-prompt batching"
        raise places.error(at, what)


def _check_acceptance(spec: SpeculativeSpec, at: Key, places: Places) -> None:
    rates, num = spec.acceptance, spec.num_speculative_tokens
    if not isinstance(rates, tuple):
        return
    if len(rates) != num:
        raise places.error((*at, "acceptance"), f"{len(rates)} numbers; expected {num}, one for each drafted token")
    if any(later > before for before, later in pairwise(rates)):
        what = f"{list(rates)}; expected shares that do not rise: a token counts only if those before it do"
        raise places.error((*at, "acceptance"), what)


def _check_schedule(spec: SpeculativeSpec, engine: Engine, at: Key, places: Places) -> None:
    key, num = (*at, "num_speculative_tokens_per_batch_size"), spec.num_speculative_tokens
    schedule = spec.num_speculative_tokens_per_batch_size
    if schedule and engine.name == "sglang":
        raise places.error(key, "SGLang has no such setting")
    for i, (first, last, each) in enumerate(schedule):
        if first > last or each > num or (i and first <= schedule[i - 1][1]):
            what = f"[first, last, tokens] behind the entry before it, with at most {num} tokens"
            raise places.error((*key, i), f"{[first, last, each]}; expected {what}")
    entries = schedule or ((1, engine.max_num_seqs, num),)
    most = max(min(last, engine.max_num_seqs) * (each + 1) for _, last, each in entries)
    if engine.max_num_batched_tokens < most:
        what = f"{most} tokens in an iteration of all sequences with their drafts"
        raise places.error(at, f"{what}; the engine's max_num_batched_tokens is {engine.max_num_batched_tokens}")


def _draft(
    spec: SpeculativeSpec, target: Model, at: Key, base_dir: Path, places: Places, own: OwnHardware
) -> Model | None:
    """The shape of the draft model or head; None: no model drafts."""
    if spec.method == "ngram":
        if spec.model:
            raise places.error((*at, "model"), "goes with a method that drafts with a model; ngram has none")
        return None
    if spec.method == "draft_model":
        if not spec.model:
            raise places.error((*at, "model"), "missing; expected the draft model")
        with places.at(*at, "model"):
            if isinstance(spec.model, str):
                found = own.model(spec.model, base_dir)
            else:
                found = model_of_config(spec.model.config, base_dir, spec.model.assume)
        unwindowed = tuple(replace(each, is_windowed=False) for each in found.layers)
        return replace(found, sampling=None, sliding_window_tokens=None, layers=unwindowed)
    layer = replace(
        target,
        num_layers=1,
        sampling=None,
        sliding_window_tokens=None,
        tie_embeddings=True,
        layers=(),
        other_params=0.0,
    )
    if spec.method == "mtp":
        moe = None if target.moe is None else replace(target.moe, num_dense_layers=0, moe_layer_every=1)
        return replace(layer, moe=moe)
    vocab_size = spec.draft_vocab_size or (EAGLE3_VOCAB_SIZE if spec.method == "eagle3" else target.vocab_size)
    return replace(layer, moe=None, vocab_size=vocab_size)
