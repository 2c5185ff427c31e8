"""The fields that Headway reads of what engines report about themselves and of prompts, apart from their load."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct


class Models(Struct):
    data: list[ListedModel]


class ListedModel(Struct):
    id: str
    max_model_len: Annotated[int, Meta(ge=1)] | None = None
    root: str | None = None
    """What the engine loaded: entries with one root are names of one model."""
    parent: str | None = None
    """Of a LoRA adapter: its model."""


class LlamaProps(Struct):
    total_slots: int


class RenderedPrompt(Struct):
    prompt: str


class Tokens(Struct):
    """vLLM counts the tokens, llama.cpp lists them."""

    count: int | None = None
    tokens: list[Any] | None = None


class TokensText(Struct):
    """vLLM calls the text of tokens `prompt`, llama.cpp `content`."""

    prompt: str | None = None
    content: str | None = None


class SglangInfo(Struct):
    disaggregation_mode: str = ""
    disaggregation_bootstrap_port: int | None = None
