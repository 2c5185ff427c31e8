from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("jinja2")

from headway.core.errors import HeadwayError
from headway.gateway.kv_events.chat_template import ChatTemplate, NotExactError

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
CHATML = """{{ bos_token }}{% for m in messages %}
    {% if m['role'] == 'assistant' %}
        {% generation %}{{ m['content'] }}{% endgeneration %}
    {% else %}
<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% if not thinking | default(true) %}<think></think>{% endif %}
{% endif %}"""


def test_templates_are_rendered_as_by_transformers() -> None:
    """Blocks leave no blank lines; special tokens and the options of a request are variables."""
    template = ChatTemplate(CHATML, {"bos_token": "<s>"})
    start = "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
    assert template.render({"messages": CHAT}) == start + "<|im_start|>assistant\n"
    assert template.render({"messages": CHAT, "add_generation_prompt": False}) == start
    answered = [*CHAT, {"role": "assistant", "content": "Because."}]
    assert template.render({"messages": answered, "add_generation_prompt": False}) == start + "Because."
    no_thoughts = {"messages": CHAT, "chat_template_kwargs": {"thinking": False}}
    assert template.render(no_thoughts) == start + "<|im_start|>assistant\n<think></think>"


def test_filters_functions_and_loop_controls_are_there() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{{ strftime_now('%Y') | length }}"
    )
    body = {"messages": [{"role": "user", "content": "ä <b>"}, *CHAT]}
    assert ChatTemplate(source, {}).render(body) == '{"role": "user", "content": "ä <b>"}4'


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"messages": CHAT, "tools": [{"type": "function"}]}, "a chat with `tools`"),
        ({"messages": CHAT, "continue_final_message": True}, "continue_final_message"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, "content is not a text"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": []}]}, "such as calls of tools"),
        ({"messages": [{"role": "tool", "content": "7"}]}, "the template does not take"),
        ({"messages": "Why?"}, "malformed"),
        ({"messages": CHAT, "chat_template_kwargs": 1}, "malformed"),
    ],
)
def test_what_engines_complete_or_templates_refuse_is_not_rendered(body: dict[str, Any], why: str) -> None:
    source = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    with pytest.raises(NotExactError, match=why):
        ChatTemplate(source, {}).render(body)


def test_templates_run_in_a_sandbox() -> None:
    for source in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"):
        with pytest.raises(NotExactError, match="SecurityError"):
            ChatTemplate(source, {}).render({"messages": list(CHAT)})


def test_a_template_that_is_none() -> None:
    with pytest.raises(HeadwayError, match="the chat template is not valid"):
        ChatTemplate("{% for m in %}", {})
