"""A model's own tokenizer, from its files, in place of the engine's `/tokenize`.

Prompts are tokenized in pieces that begin at special tokens, as the messages of a chat do. A piece's tokens do not
depend on the text around the piece, so only the new messages of a continued chat are tokenized.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import fastokens
import msgspec
from msgspec import Struct
from tokenizers import AddedToken, Tokenizer

from headway.control import token_blocks
from headway.core.errors import HeadwayError
from headway.core.request import Segment
from headway.gateway.kv_events.chat_template import ChatTemplate, NotExactError

_MOST_PIECES, _MOST_BLOCKS = 1 << 16, 1 << 20
"""Cached pieces and blocks."""
_INLINE_CHARS, _FAST_INLINE_CHARS = 2048, 16_384
"""(limit with the usual library, limit with fastokens) of characters. Longer texts are tokenized in a thread, because
they would block the event loop for a millisecond or more."""
_SAMPLES = (
    "",
    " ",
    "a",
    "Don't WE'LL they've i'm 1 12 123 1234 12345.678",
    "  two  spaces\n\n\n\ttab \r\n trailing  \n",
    "def f(x: int=0)->dict[str,int]:\n    return {'a':x**2}  # ok!!!???",
    "Straße ñandú éa e\u0301a ſtop İi ﬁ Ⅷ ²",
    "東京とソウル 한국어 ภาษาไทย हिन्दी עברית العربية\u200f",
    "🙂👨‍👩‍👧‍👦🏳️‍🌈 \u200b\ufeff\x00\x7f\u00a0\u2028\u3000",
    "https://example.com/a_b-c?d=%20&e=[f]",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "=" * 70,
)
"""Texts that reveal differences between two tokenizer libraries."""
_Encode = Callable[..., Sequence[Any]]
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _Prefix(Struct, frozen=True, gc=False):
    """The prompt up to the end of a piece."""

    num_tokens: int
    name: int
    """The name of the prefix's last full block."""
    rest: tuple[int, ...]
    """The prefix's tokens after that block."""
    blocks: tuple[Segment, ...] = ()
    """The full blocks that the piece has added."""


class LocalTokenizer:
    """Names the blocks of prompts. Belongs to one event loop, except `ids`."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, no_template: str = "") -> None:
        """`no_template`: why there is no template."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._template, self._no_template = template, no_template
        fast = _by_fastokens(tokenizer)
        self.uses_fastokens = fast is not None
        """Whether fastokens tokenizes the texts. It reads byte-pair models only."""
        self._encode_all: _Encode = tokenizer.encode_batch_fast if fast is None else fast.encode_batch
        self._inline_chars = _INLINE_CHARS if fast is None else _FAST_INLINE_CHARS
        self._added = list(tokenizer.get_added_tokens_decoder().values())
        self._first_ids = self._ids_before()
        self._special: re.Pattern[str] | None = None
        self._special = self._splitting()
        self._prefixes: OrderedDict[bytes, _Prefix] = OrderedDict()
        self._num_blocks = 0
        self.num_tokenized = 0
        """Number of characters tokenized."""

    def text(self, body: Mapping[str, Any]) -> tuple[str, bool]:
        """The prompt of a request, and whether special tokens are added to it. NotExactError if only the engine knows
        the prompt."""
        if "messages" in body:
            if self._template is None:
                raise NotExactError(self._no_template)
            return self._template.render(body), bool(body.get("add_special_tokens", False))
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            raise NotExactError("a prompt that is not a text")
        return prompt, bool(body.get("add_special_tokens", True))

    def ids(self, body: Mapping[str, Any]) -> list[int]:
        """The tokens of a request's prompt. NotExactError if only the engine knows them."""
        text, adds_special = self.text(body)
        return self._encode([text], adds_special)[0]

    async def blocks(
        self, body: Mapping[str, Any], block_tokens: int, lora: str, salt: str = ""
    ) -> tuple[int, tuple[Segment, ...]]:
        """The number of a prompt's tokens, and its full blocks. NotExactError if only the engine knows them."""
        text, adds_special = self.text(body)
        is_whole = adds_special and self._first_ids is None
        pieces = [text] if is_whole else self._pieces(text)
        keys = _keys(pieces, repr((block_tokens, lora, salt, adds_special)))
        found: list[_Prefix] = []
        for key in keys:
            if (known := self._prefixes.get(key)) is None:
                break
            found.append(known)
        num, new = len(found), pieces[len(found) :]
        self.num_tokenized += (num_chars := sum(map(len, new)))
        if num_chars > self._inline_chars:
            encoded = await asyncio.to_thread(self._encode, new, is_whole)
        else:
            encoded = self._encode(new, is_whole)
        first = self._first_ids if adds_special and self._first_ids else ()
        last = found[-1] if found else _Prefix(len(first), token_blocks.root(lora, salt), first)
        for ids in encoded:
            last = _longer(last, ids, block_tokens)
            found.append(last)
        self._remember(keys, found, num)
        named = tuple([segment for prefix in found for segment in prefix.blocks])
        return last.num_tokens, named[: token_blocks.MAX_BLOCKS]

    def _encode(self, texts: Sequence[str], adds_special: bool) -> list[list[int]]:
        if not texts:
            return []
        try:
            encoded = self._encode_all(list(texts), add_special_tokens=adds_special)
        except Exception:  # the libraries raise nothing more specific
            raise NotExactError("a text that the tokenizer does not take") from None
        return [each.ids for each in encoded]

    def _remember(self, keys: Sequence[bytes], found: Sequence[_Prefix], num_known: int) -> None:
        for key, prefix in zip(keys[num_known:], found[num_known:], strict=True):
            if key not in self._prefixes:
                self._prefixes[key] = prefix
                self._num_blocks += len(prefix.blocks)
        for key in reversed(keys):  # forget a piece before the pieces in front of it
            if key in self._prefixes:
                self._prefixes.move_to_end(key)
        while len(self._prefixes) > _MOST_PIECES or self._num_blocks > _MOST_BLOCKS:
            _, oldest = self._prefixes.popitem(last=False)
            self._num_blocks -= len(oldest.blocks)

    def _pieces(self, text: str) -> list[str]:
        """The text, split before each special token that separates pieces."""
        starts = [] if self._special is None else [match.start() for match in self._special.finditer(text)]
        return [text[start:end] for start, end in pairwise([0, *starts, len(text)]) if end > start]

    def _ids_before(self) -> tuple[int, ...] | None:
        """The special tokens added before a prompt; None if the tokenizer also adds some after it or replaces part of
        it."""
        try:
            plain, special = (self._encode(["a b"], adds_special)[0] for adds_special in (False, True))
        except NotExactError:
            return None
        num = len(special) - len(plain)
        return tuple(special[:num]) if num >= 0 and special[num:] == plain else None

    def _splitting(self) -> re.Pattern[str] | None:
        """Matches special tokens that separate the texts on both sides; None if there are none."""
        added = self._added
        texts = sorted((each.content for each in added if _splits(each, added)), key=len, reverse=True)
        if not texts:
            return None
        self._special = re.compile("|".join(map(re.escape, texts)))
        sample = " ".join(f"a{text}Bc, {text} 12\n{text}" for text in texts[:64])
        try:
            whole, *pieces = self._encode([sample, *self._pieces(sample)], False)
        except NotExactError:
            return None
        return self._special if whole == [id for piece in pieces for id in piece] else None


def _by_fastokens(tokenizer: Tokenizer) -> fastokens.Tokenizer | None:
    """The model's tokenizer in fastokens; None if fastokens cannot read it, or tokenizes a sample differently."""
    added = tokenizer.get_added_tokens_decoder().values()
    samples = [*_SAMPLES, " ".join(f"a{each.content}Bc, {each.content}  1\n{each.content}" for each in added)]
    try:
        fast = fastokens.Tokenizer.from_json_str(tokenizer.to_str())
        for adds_special in (False, True):
            expected = tokenizer.encode_batch_fast(samples, add_special_tokens=adds_special)
            found = fast.encode_batch(samples, add_special_tokens=adds_special)
            if [each.ids for each in found] != [each.ids for each in expected]:
                return None
    except Exception:  # the libraries raise nothing more specific
        return None
    return fast


def _keys(pieces: Iterable[str], root: str) -> list[bytes]:
    """A digest for each piece, of the prompt up to the piece's end."""
    digest, found = hashlib.sha1(root.encode(), usedforsecurity=False).digest(), []
    for piece in pieces:
        digest = hashlib.sha1(digest + piece.encode(errors="surrogatepass"), usedforsecurity=False).digest()
        found.append(digest)
    return found


def _splits(token: AddedToken, added: Sequence[AddedToken]) -> bool:
    if not token.special or token.normalized or token.lstrip or token.rstrip or token.single_word:
        return False
    return not any(token.content in each.content and each.content != token.content for each in added)


def _longer(before: _Prefix, ids: Sequence[int], block_tokens: int) -> _Prefix:
    """The prefix extended by these tokens."""
    tokens = [*before.rest, *ids]
    names = token_blocks.names(before.name, tokens, block_tokens)
    blocks = tuple([Segment(name, block_tokens) for name in names])
    rest = tuple(tokens[len(names) * block_tokens :])
    return _Prefix(before.num_tokens + len(ids), names[-1] if names else before.name, rest, blocks)


def read(path: Path) -> LocalTokenizer:
    """The tokenizer in a model's folder or in a file. Raises HeadwayError if there is none."""
    folder, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
    if not file.is_file():
        raise HeadwayError(f"{file}: no such file; expected a tokenizer.json, or a model's folder with one")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise HeadwayError(f"{file}: not a tokenizer that the library `tokenizers` reads: {error}") from None
    config = _config(folder / "tokenizer_config.json")
    special = {name: text for name in _SPECIAL if (text := _content(config.get(name))) is not None}
    source = _template(folder, config)
    if source is None:
        return LocalTokenizer(tokenizer, None, "a chat, as the model's files have no chat template")
    try:
        return LocalTokenizer(tokenizer, ChatTemplate(source, special))
    except HeadwayError as error:
        return LocalTokenizer(tokenizer, None, f"a chat: {error}")


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise HeadwayError(f"{file}: {error}") from None
    found = config.get("chat_template")
    if isinstance(found, list):  # of several templates, the default
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _config(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any]) if file.exists() else {}
    except (OSError, msgspec.DecodeError) as error:
        raise HeadwayError(f"{file}: {error}; expected the settings of a tokenizer in JSON") from None


def _content(token: Any) -> str | None:
    """The text of a special token, which may be stored with settings."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
