"""Templates: transformers' conventions, the sandbox, the bounds."""

import json
import time

import pytest

import openinfer_tiny_model
from openinfer_server import ChatTemplate, RenderingRefused, UnusableTemplate
from openinfer_server.chat.turns import template_turns
from openinfer_server.openai.types import AssistantTurn, FunctionCall, ToolCall

HELLO = [{"role": "user", "content": "hello"}]


def template(source: str, timeout_s: float = 5.0, max_characters: int = 100_000, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens, timeout_s=timeout_s, max_characters=max_characters)


def render(source: str, **options: object) -> str:
    return template(source).render(HELLO, options)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}", "hello\n"),
        ("{{ messages[0]['content'] }}|{{ add_generation_prompt }}", "hello|True"),
        ("{{ {'a': 'é<b>', 'c': [1]} | tojson }}", '{"a": "é<b>", "c": [1]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=2) }}", '{\n  "b": 1,\n  "a": 2\n}'),
        ("{{ {'b': 'é'} | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}", '{"b":"\\u00e9"}'),
        ("{% for i in range(4) %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "013"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a{% generation %}b{{ 1 + 1 }}{% endgeneration %}c", "ab2c"),
        ("{% set ns = namespace(x=1) %}{% for i in [1, 2] %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}", "4"),
        ("{% macro f(xs) %}{% for x in xs %}{{ x }}{% endfor %}{% endmacro %}{{ f([1, 2]) }}{{ f([3]) }}", "123"),
        ("{% for a in [1, 2] recursive %}{{ a }}{% endfor %}", "12"),
        ("{% for x in [] %}x{% else %}none{% endfor %}", "none"),
        ("{{ undefined_thing }}|{{ '-' * 3 }}|{{ [0] * 2 }}", "|---|[0, 0]"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_template_follows_the_conventions(source, expected):
    assert render(source) == expected


def test_options_and_special_tokens_are_variables():
    source = "{{ bos_token }}{{ enable_thinking }}"
    assert template(source, bos_token="<s>").render(HELLO, {"enable_thinking": False}) == "<s>False"


def test_template_that_refuses_says_why():
    with pytest.raises(RenderingRefused, match="only user turns"):
        render("{{ raise_exception('only user turns') }}")


def test_template_that_fails_does_not_quote_python():
    with pytest.raises(RenderingRefused, match=r"^the chat template failed on these messages$"):
        render("{{ messages[0].content + 1 }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set _ = messages[0].update({'a': 1}) %}",
        "{{ range(1000000) | list }}",
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * 'x' }}",
        "{{ [messages] * 10**7 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 10 ** 1000000000 }}",
        "{{ lipsum(10**9) }}",
        *("{{ 'x' | center(10**12) }}", "{{ 'x\n' | indent(10**12) }}", "{{ messages | tojson(indent=10**12) }}"),
        *("{{ 'x'.ljust(10**12) }}", "{{ 'x'.rjust(10**12) }}", "{{ 'x'.center(10**12) }}", "{{ '1'.zfill(10**12) }}"),
        *(
            "{{ '\t'.expandtabs(tabsize=10**9) }}",
            "{{ (1).to_bytes(10**12, 'big') }}",
            "{{ 'x'.encode().ljust(10**12) }}",
        ),
        *(
            "{{ '{:>999999999999}'.format('x') }}",
            "{{ '{:{}}'.format('x', 10**12) }}",
            "{{ '%999999999d' | format(1) }}",
        ),
        *(
            "{{ messages | batch(10**12, 'x') | list }}",
            "{{ messages | slice(10**12) | list }}",
            "{{ 1.5 | round(10**12) }}",
        ),
        "{{ ['x'] | map('center', 10**12) | list }}",
    ],
)
def test_sandbox_refuses(source):
    with pytest.raises(RenderingRefused):
        render(source)


def test_large_numbers_that_pad_nothing_are_taken():
    source = (
        "{{ 1700000000 | round | int }} {{ none_such | default(1700000000) }} {{ 'a' | replace('a', 'b', 1700000000) }}"
    )
    assert render(source + " {{ 2 ** 10 }} {{ '{:>4}'.format('x') }}") == "1700000000 1700000000 b 1024    x"


@pytest.mark.parametrize("source", ["{{ raise_exception.__globals__ }}", "{{ messages.__class__ }}"])
def test_sandbox_hides_private_attributes(source):
    assert render(source) == ""


def test_sandbox_formats_without_private_attributes():
    assert "class" not in render("{{ '{0.__class__}'.format(1) }}")


LONG_LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("source", [LONG_LOOPS, "{% macro f() %}" + LONG_LOOPS + "{% endmacro %}{{ f() }}"])
def test_nested_loops_end_at_the_deadline(source):
    begin = time.thread_time()  # what the limit is of: waiting for a processor is not the template's
    with pytest.raises(RenderingRefused, match=r"more than 0\.1 s"):
        template(source, timeout_s=0.1).render(HELLO, {})
    assert time.thread_time() - begin < 1


def test_output_is_bounded():
    with pytest.raises(RenderingRefused, match="exceeds 1000 characters"):
        template("{% for a in range(99999) %}{{ a }}{% endfor %}", max_characters=1000).render(HELLO, {})


def load(folder) -> ChatTemplate | None:
    return ChatTemplate.load(folder, timeout_s=1, max_characters=1000)


def test_template_is_found_in_its_own_file_or_in_the_config(tmp_path):
    assert load(tmp_path) is None
    config = {"bos_token": "<s>", "chat_template": "config {{ bos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load(tmp_path).render(HELLO, {}) == "config <s>"
    config["chat_template"] = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "named"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load(tmp_path).render(HELLO, {}) == "named"
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}")
    assert load(tmp_path).render(HELLO, {}) == "file <s>"


@pytest.mark.parametrize(
    ("declared", "word"),
    [
        ("{% for %}", "does not compile"),
        ([{"name": "a", "template": "x"}], "one must be named default"),
        (7, "neither a string nor a list"),
    ],
)
def test_unusable_template_says_why(tmp_path, declared, word):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": declared}))
    with pytest.raises(UnusableTemplate, match=word):
        load(tmp_path)


def test_broken_config_says_so(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UnusableTemplate, match="not a JSON object"):
        load(tmp_path)


def test_calls_reach_a_template_that_writes_them_only_beside_no_content():
    source = (  # as DeepSeek-V3's does
        "{% for m in messages %}{% if m['content'] is none %}{% for call in m['tool_calls'] %}"
        "{{ '<call>' + call['function']['name'] + call['function']['arguments'] }}{% endfor %}"
        "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    told = template(source)
    assert (told.wants_no_content_beside_calls, told.wants_text_arguments) == (True, True)
    call = ToolCall(id="c", function=FunctionCall(name="now", arguments='{"a":1}'))
    turns = template_turns(
        [AssistantTurn(tool_calls=[call]), AssistantTurn(content="noon")],
        developer_role="system",
        text_arguments=told.wants_text_arguments,
        no_content_beside_calls=told.wants_no_content_beside_calls,
    )
    assert told.render(turns, {}) == '<call>now{"a":1}noon'


def test_tiny_models_template_renders_a_chat():
    tiny = ChatTemplate.load(openinfer_tiny_model.model_dir(), timeout_s=1, max_characters=10_000)
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = tiny.render(turns, {"enable_thinking": False})
    assert text == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert tiny.knows_developer_role is False
