"""Renders chats with the template of a model's files, as vLLM and SGLang do through `transformers`.

Source: `transformers/utils/chat_template_utils.py`, whose environment, filters and functions are the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headway.core.errors import HeadwayError

_MESSAGE_FIELDS = {"role", "content", "name"}
_OTHER_FIELDS = ("tools", "documents", "chat_template", "continue_final_message")
"""Request fields that each engine checks and completes in its own way before it renders the prompt."""
_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class NotExactError(Exception):
    """The engine may render the request to another prompt. The message gives the reason, without any text of the
    request."""


class ChatTemplate:
    """A chat template in Jinja, rendered in a sandbox."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: texts by name, such as `bos_token`. Raises HeadwayError if the source is not a valid
        template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise HeadwayError(f"the chat template is not valid: {error}") from None
        self._special_tokens = dict(special_tokens)

    def render(self, body: Mapping[str, Any]) -> str:
        """The prompt of a chat. NotExactError if the chat has more than plain messages, or the template refuses it."""
        messages, options = body.get("messages"), body.get("chat_template_kwargs") or {}
        for name in _OTHER_FIELDS:
            if body.get(name):
                raise NotExactError(f"a chat with `{name}`")
        if not isinstance(messages, list) or not isinstance(options, dict):
            raise NotExactError("a malformed chat")
        for message in messages:
            if not isinstance(message, dict) or not message.keys() <= _MESSAGE_FIELDS:
                raise NotExactError("a message with more than role, content and name, such as calls of tools")
            if not isinstance(message.get("content"), str):
                raise NotExactError("a message whose content is not a text")
        values = {
            **self._special_tokens,
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": body.get("add_generation_prompt", True),
            **options,
        }
        try:
            return self._template.render(values)
        except _ERRORS as error:
            raise NotExactError(f"a chat that the template does not take ({type(error).__name__})") from None


class _Generation(Extension):
    """The `{% generation %}` tag, which marks answers for training."""

    tags = {"generation"}  # noqa: RUF012  # as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)
