"""One request of a client, and the features that control reads."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec

from headway.control import token_blocks
from headway.core.request import Segment
from headway.gateway.relay import json_body
from headway.gateway.relay.features import NO_COST, CostFeatures, Features
from headway.gateway.relay.form_body import Form
from headway.gateway.relay.json_body import Fields
from headway.gateway.scheduling.stream_copy import StreamKey
from headway.gateway.upstream.loose_json import count_of

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
EMBEDDINGS: Final = "/v1/embeddings"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
RERANK, SCORE, TOKENIZE, DETOKENIZE = (
    ("/v1/rerank", "/rerank", "/v2/rerank"),
    ("/v1/score", "/score"),
    "/tokenize",
    "/detokenize",
)
POOLING, CLASSIFY, COUNT_TOKENS = "/pooling", ("/v1/classify", "/classify"), "/v1/messages/count_tokens"
SPEECH, IMAGES = "/v1/audio/speech", "/v1/images/generations"
FORMS = ("/v1/audio/transcriptions", "/v1/audio/translations")
"""Endpoints whose bodies are multipart forms with a file."""
PATHS = (
    CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, MESSAGES, *RERANK, *SCORE, TOKENIZE, DETOKENIZE, SPEECH, IMAGES, *FORMS,
    POOLING, *CLASSIFY, COUNT_TOKENS,
)  # fmt: skip
BLOCK_BYTES = 1024
"""Bytes of a block. Prompts with equal first N blocks share N segments."""
_BLOCK_TOKENS: Final = BLOCK_BYTES // 4
_MAX_SEGMENTS = 64
MAX_TOKENS: Final = 1 << 30
_MAX_SEQUENCES = 1 << 16
MAX_NAME_CHARS: Final = 512
"""Length limit of a model's name; of a session's name, this many characters are read."""
MAX_TIER = (1 << 15) - 1
MIN_SLO_MS, MAX_SLO_MS = 1e-3, 1e12
_BODY_CHARS, _MESSAGE_CHARS = 256, 40
"""(characters of a body's JSON, characters of each message's JSON) that never belong to a prompt."""
MEDIA_TOKENS = 16_384
"""Maximum number of tokens of an image: Qwen2.5-VL's `max_pixels`, 12,845,056, in patches of 28 x 28 pixels. Other
models have fewer."""
_PAIRS = (("query", "documents"), ("text_1", "text_2"), ("queries", "documents"), ("query", "items"))
"""Fields of texts that are compared, each with its partner field. Each text of a field is compared with every text of
the partner field."""
_CONTENTS = ("messages", "input", "content", *dict.fromkeys(name for pair in _PAIRS for name in pair))
_MEDIA_FIELDS = (
    "image_url",
    "video_url",
    "audio_url",
    "input_audio",
    "image",
    "source",
    "file",
    "file_data",
    "file_url",
    "image_embeds",
    "audio_embeds",
)
_MAX_MEDIA_DEPTH = 4
"""Maximum depth of nested contents that are read: in messages, and in results of tools inside messages."""
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "n_predict", "min_tokens")
"""Fields that limit an answer's length. If a request has several, engines differ in the field that they prefer."""
_REASONING_BUDGETS = ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens", "reasoning_budget")
_COST_FIELDS = frozenset((
    *_LIMITS[1:], *_REASONING_BUDGETS, "thinking", "reasoning", "n", "best_of", "n_cmpl", "echo", "input",
    *_CONTENTS[3:],
))  # fmt: skip
_UNSPLITTABLE_OPTIONS = ("echo", "prompt_logprobs", "use_beam_search")
"""Options that need the prompt's own computation, or several sequences."""


_COMPARING = frozenset((*RERANK, *SCORE))
_OF_ONE_MODEL: Final = frozenset((EMBEDDINGS, *RERANK, *SCORE, TOKENIZE, DETOKENIZE, POOLING, *CLASSIFY))
"""Endpoints whose answers are compared with other answers of the same model, or are sent back to the model."""
_MAY_BE_BYTES: Final = frozenset((SPEECH, IMAGES, EMBEDDINGS, POOLING, *FORMS))


class ClientRequest:
    """One request of a client."""

    # Initial values are set in the class, because most requests keep many of them.
    model = ""
    stream = False
    can_resume = False
    """Whether another engine can continue the answer once it has begun."""
    wants_usage = False
    max_tokens: int | None = None
    text = ""
    """The prompt's text; empty if the prompt has none."""
    prompt_ids: list[int] | None = None
    """The prompt's token ids, if it was given as token ids."""
    tier = 0
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    session: str | None = None
    region = ""
    """The client's own region."""
    engine_headers = ""
    """Header lines that are forwarded to the engine."""
    wants_explanation = False
    """Whether the client asked for headers with hold time, attempt and tier."""
    counted_tokens: int | None = None
    """The prompt's tokens, if an engine has counted them."""
    blocks: tuple[Segment, ...] | None = None
    """The prompt's KV blocks by their tokens, if an engine's events name blocks by tokens."""
    stream_key: StreamKey | None = None
    """The key under which a retry can continue the stream; None if no retry can."""
    form: Form | None = None
    """The body if it is a form; `body` then holds the fields that the gateway uses."""
    content_type = "application/json"
    is_flex = False
    """Whether `service_tier` is `flex`: the request may then wait until a deadline."""
    has_media = False
    """Whether the prompt may have images, audio or files, whose tokens only the engine knows."""
    received_s: float | None = None
    """Time at which the last byte came; None once the gateway's overhead was measured."""
    may_be_several = False
    """Whether the body has a field that asks for several sequences, or may have several prompts."""

    def __init__(self, path: str, body: dict[str, Any], raw: bytes, sent_fields: Fields | None) -> None:
        """`raw`: the original body. `sent_fields`: the raw fields of a long body."""
        self.path, self.body, self.raw, self.sent_fields = path, body, raw, sent_fields
        self.is_chat = path == CHAT
        self.is_passthrough = path != CHAT and path != COMPLETIONS
        """Whether the answer is passed on unchanged."""

    @property
    def is_single(self) -> bool:
        """Whether the answer is one sequence."""
        body = self.body
        if body.get("n") not in (None, 1) or body.get("best_of") not in (None, 1):
            return False
        return self.is_chat or self.is_passthrough or self.num_prompts == 1

    @property
    def may_be_bytes(self) -> bool:
        """Whether the answer may have a format other than JSON or JSON events, such as audio or text."""
        return self.path in _MAY_BE_BYTES

    @property
    def needs_end(self) -> bool:
        """Whether streams of this endpoint have an end marker."""
        return self.stream and (not self.is_passthrough or self.path in (RESPONSES, MESSAGES))

    @property
    def num_prompts(self) -> int:
        """Number of prompts that are answered separately."""
        prompt = self.body.get("prompt")
        if self.path != COMPLETIONS or self.prompt_ids is not None or not isinstance(prompt, list):
            return 1
        return max(len(prompt), 1)

    @property
    def num_sequences(self) -> int:
        """The largest number of sequences that the engine generates, each with the request's token limit."""
        num = 1
        for name in ("n", "best_of", "n_cmpl"):
            value = self.body.get(name)
            if isinstance(value, int | float) and num < value:
                num = int(min(value, _MAX_SEQUENCES))
        return num * self.num_prompts

    def cost(self) -> CostFeatures:
        """The possible cost of the request, apart from its prompt's text."""
        body, max_tokens = self.body, self.max_tokens or 0
        num_chars = 0
        if self.prompt_ids is None and self.counted_tokens is None:
            messages = body.get("messages")
            num_known = len(messages) if isinstance(messages, list) else 0
            num_chars = max(len(self.raw) - len(self.text) - _BODY_CHARS - _MESSAGE_CHARS * num_known, 0)
        if not self.has_media and _COST_FIELDS.isdisjoint(body) and not isinstance(body.get("prompt"), list):
            return CostFeatures(max_tokens, 1, num_chars)
        num_media, media_chars = _media(body) if self.has_media else (0, 0)
        if self.form is not None:
            num_media, media_chars = 1, num_chars
        num_ids = 0 if self.prompt_ids is not None else _num_nested_ids(body)
        num_chars = 0 if num_ids else max(num_chars - media_chars, 0)
        limits = [count_of(body[name]) or 0 for name in _LIMITS if name in body]
        max_tokens = max([max_tokens, *limits]) + _reasoning_budget(body)
        num_sequences = self.num_sequences if self.may_be_several else 1
        if self.path in _COMPARING:
            more_chars, more_media = _repeated(body)
            num_chars, num_media = num_chars + more_chars, num_media + more_media
        num_tokens = num_media * MEDIA_TOKENS + num_ids
        return CostFeatures(min(max_tokens, MAX_TOKENS), num_sequences, num_chars, num_tokens, bool(body.get("echo")))

    @property
    def previous_response_id(self) -> str | None:
        """The response that the request continues; None if there is none."""
        id = self.body.get("previous_response_id") if self.path == RESPONSES else None
        return id if isinstance(id, str) and 0 < len(id) <= MAX_NAME_CHARS else None

    @property
    def can_be_split(self) -> bool:
        """Whether one replica can prefill the request and another can decode it: it must be one sequence of several
        tokens."""
        body = self.body
        if self.is_passthrough or self.max_tokens == 1 or any(body.get(name) for name in _UNSPLITTABLE_OPTIONS):
            return False
        return self.is_single

    def encoded(self, body: dict[str, Any]) -> bytes:
        """`body`, this request's body with changes, encoded in the request's original format."""
        if self.form is not None:
            return self.raw if body["model"] == self.model else self.form.with_field("model", str(body["model"]))
        if body == self.body:
            return self.raw
        fields = self.sent_fields
        return msgspec.json.encode(body) if fields is None else json_body.encode(body, self.body, fields)

    def features(self, arrival_s: float, has_cost: bool = True) -> Features:
        """The features for control of a request that arrived at `arrival_s`. `has_cost`: the client has a key, whose
        limits need the cost."""
        num_tokens = self.counted_tokens if self.prompt_ids is None else len(self.prompt_ids)
        session_id = None
        if self.session is not None:
            session_id = _number(hashlib.sha1(_bytes(self.session[:MAX_NAME_CHARS]), usedforsecurity=False).digest())
        is_short = self.blocks is None and self.prompt_ids is None and len(self.text) < _BLOCK_TOKENS
        return Features(
            arrival_s=arrival_s,
            model=self.model,
            is_passthrough=self.is_passthrough,
            num_chars=len(self.text),
            prompt_tokens=num_tokens,
            max_tokens=self.max_tokens,
            tier=self.tier,
            region=self.region,
            session_id=session_id,
            prefix=() if is_short else self.prefix(),
            slo_ttft_s=self.slo_ttft_s,
            slo_tpot_s=self.slo_tpot_s,
            has_media=self.has_media,
            keeps_model=self.is_passthrough and self.path in _OF_ONE_MODEL,
            is_flex=self.is_flex,
            cost=self.cost() if has_cost else NO_COST,
            response_id=self.previous_response_id if self.path == RESPONSES else None,
            num_sequences=self.num_sequences if self.may_be_several else 1,
        )

    def prefix(self) -> tuple[Segment, ...]:
        """The prompt's leading segments. A segment's id is a hash of all text, or all tokens, up to its end."""
        if self.blocks is not None:
            return self.blocks
        if self.prompt_ids is not None:
            return token_blocks.segments(self.prompt_ids, _BLOCK_TOKENS)
        data = memoryview(_bytes(self.text[: _MAX_SEGMENTS * BLOCK_BYTES]))
        chained, segments = hashlib.sha1(usedforsecurity=False), []
        for i in range(min(len(data) // BLOCK_BYTES, _MAX_SEGMENTS)):
            chained.update(data[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES])
            segments.append(Segment(_number(chained.digest()), _BLOCK_TOKENS))
        return tuple(segments)


def _reasoning_budget(body: dict[str, Any]) -> int:
    """Reasoning tokens that a request allows, by the fields of several engines. The sum with the answer's limit
    overestimates engines that count both together."""
    budgets = [body[name] for name in _REASONING_BUDGETS if name in body]
    for name, field in (("thinking", "budget_tokens"), ("reasoning", "max_tokens")):
        if isinstance(value := body.get(name), dict):
            budgets.append(value.get(field))
    return max((count_of(value) or 0 for value in budgets), default=0)


def _num_nested_ids(body: dict[str, Any]) -> int:
    """Tokens of prompts given as several lists of token ids."""
    prompts = body.get("prompt") or body.get("input")
    return sum(len(each) for each in prompts if isinstance(each, list)) if isinstance(prompts, list) else 0


def _repeated(body: dict[str, Any]) -> tuple[int, int]:
    """(characters, media) that an engine reads again, because it compares one text with many."""
    num_chars = num_media = 0
    for names in _PAIRS:
        values = [value if isinstance(value := body.get(name), list) else [value] for name in names]
        num_pairs = max(map(len, values))
        for value in values:
            if body.keys() >= set(names) and 0 < len(value) < num_pairs:
                times = -(-num_pairs // len(value)) - 1
                num, data_chars = _media(value)
                num_chars += times * max(len(msgspec.json.encode(value)) - data_chars, 0)
                num_media += times * num
    return num_chars, num_media


def _media(value: object, depth: int = 0) -> tuple[int, int]:
    """Images, audio and files in the contents of a body, and the characters of their data."""
    num, num_chars = 0, 0
    if isinstance(value, list):
        for each in value:
            found = _media(each, depth)
            num, num_chars = num + found[0], num_chars + found[1]
    elif isinstance(value, dict) and depth < _MAX_MEDIA_DEPTH:
        for name in _CONTENTS:
            if name in value:
                found = _media(value[name], depth + 1)
                num, num_chars = num + found[0], num_chars + found[1]
        for name in _MEDIA_FIELDS:
            data = value.get(name)
            if data is not None and not (isinstance(data, dict) and data.get("type") == "text"):
                texts = [data] if isinstance(data, str) else data.values() if isinstance(data, dict) else ()
                num, num_chars = num + 1, num_chars + sum(len(each) for each in texts if isinstance(each, str))
    return num, num_chars


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _number(digest: bytes) -> int:
    """A nonnegative number that is the same in every process, unlike Python's hashes."""
    return int.from_bytes(digest[:8]) >> 1
