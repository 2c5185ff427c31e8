"""The fields that Headway reads of engines' reports about themselves and about prompts, except their load."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct


class Models(Struct):
    data: list[ListedModel]


class ListedModel(Struct):
    id: str
    max_model_len: Annotated[int, Meta(ge=1)] | None = None
    root: str | None = None
    """The model that the engine loaded. Entries with the same root are names of the same model."""
    parent: str | None = None
    """The model of a LoRA adapter."""


class LlamaProps(Struct):
    total_slots: int


class RenderedPrompt(Struct):
    prompt: str


class Tokens(Struct):
    """An engine's report of the tokens of a text: vLLM gives their number, llama.cpp lists them."""

    count: int | None = None
    tokens: list[Any] | None = None


class TokensText(Struct):
    """The text of tokens: vLLM calls it `prompt`, llama.cpp `content`."""

    prompt: str | None = None
    content: str | None = None


class SglangInfo(Struct):
    disaggregation_mode: str = ""
    disaggregation_bootstrap_port: int | None = None
