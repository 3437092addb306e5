"""Prompts that end inside the assistant's turn."""

import pytest

from openinfer_server.chat.prefill import PrefillRefused, continued
from openinfer_server.chat.template import ChatTemplate

THINK = ("<think>", "</think>")
# In the manner of Qwen3's: the last turn is written with its reasoning, and text loses new lines at its beginning.
THINKING = """
{%- for m in messages %}
    {%- if m.role == 'assistant' and loop.last %}
        {{- '<a>\n<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' + m.content.lstrip('\n') + '<end>\n' }}
    {%- else %}
        {{- '<' + m.role[0] + '>\n' + m.content + '<end>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<a>\n' }}
    {%- if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""
# Llama 3's: text is trimmed, reasoning is not known, and the generation prompt is always there.
TRIMMING = "{% for m in messages %}{{ '<' + m.role[0] + '>' + m.content | trim + '<end>' }}{% endfor %}{{ '<a>' }}"
# R1's: reasoning of earlier turns is left out, and the generation prompt opens it.
OPENING = (
    "{% for m in messages %}{{ '<' + m.role[0] + '>' + m.content.split('</think>')[-1] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a><think>\n' }}{% endif %}"
)
TWICE = "{% for m in messages %}{{ m.content + m.content }}{% endfor %}"


def end(source: str, content: str, tags=THINK, options=None, **fields: object) -> tuple[str, str]:
    template = ChatTemplate(source, {}, timeout_s=5, max_characters=100_000)
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": content, **fields}]
    return continued(template, turns, options or {}, tags)


@pytest.mark.parametrize(
    ("source", "content", "fields", "prompt"),
    [
        (THINKING, "Sure, ", {}, "<u>\nQ<end>\n<a>\n<think>\n\n</think>\n\nSure, "),
        (THINKING, "Hi\n", {"reasoning_content": "why"}, "<u>\nQ<end>\n<a>\n<think>\nwhy\n</think>\n\nHi\n"),
        (THINKING, "", {"reasoning_content": "Let me "}, "<u>\nQ<end>\n<a>\n<think>\nLet me "),
        (THINKING, "<think>\nLet me", {}, "<u>\nQ<end>\n<a>\n<think>\nLet me"),
        (THINKING, "<think>a</think>b", {}, "<u>\nQ<end>\n<a>\n<think>a</think>b"),
        (THINKING, "\nSure", {}, "<u>\nQ<end>\n<a>\n<think>\n\n</think>\n\n\nSure"),
        (TRIMMING, " Sure, ", {}, "<u>Q<end><a> Sure, "),
        (OPENING, "Sure", {}, "<u>Q<end><a>Sure"),
        (OPENING, "<think>\nLet", {}, "<u>Q<end><a><think>\nLet"),
        (OPENING, "<think>a</think>b", {}, "<u>Q<end><a><think>a</think>b"),
        (OPENING, "", {"reasoning_content": "Let"}, "<u>Q<end><a><think>\nLet"),
    ],
)
def test_prompt_ends_with_the_text_that_is_continued(source, content, fields, prompt):
    text, begun = end(source, content, **fields)
    assert text == prompt
    assert begun == (content or fields["reasoning_content"])


@pytest.mark.parametrize(
    ("source", "content", "fields", "word"),
    [
        (TWICE, "Sure", {}, "not once"),
        ("{{ messages[0].content }}", "Sure", {}, "does not write"),
        *[("{% for m in messages %}{{ m.content | capitalize }}{% endfor %}", "Sure", {}, "does not write")] * 8,
        (OPENING, "b", {"reasoning_content": "a"}, "leaves the reasoning"),
        (TRIMMING, "", {"reasoning_content": "a"}, "leaves the reasoning"),
        (THINKING, "", {}, "no text"),
        (THINKING, "Sure", {"tool_calls": [{"id": "c"}]}, "calls a tool"),
        (THINKING, "<think>\nLet", {"options": {"enable_thinking": False}}, "switched off"),
    ],
)
def test_text_that_the_template_would_lose_is_refused(source, content, fields, word):
    with pytest.raises(PrefillRefused, match=word):
        end(source, content, **fields)


def test_tags_mean_nothing_to_a_model_without_reasoning():
    assert end(THINKING, "<think>", tags=None)[0] == "<u>\nQ<end>\n<a>\n<think>\n\n</think>\n\n<think>"
