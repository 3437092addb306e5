"""What the chat template is told: its variables, levels of thinking, documents; all else is refused by name."""

from types import SimpleNamespace

import pytest

from openinfer_server.anthropic.thinking import thinking_variables
from openinfer_server.anthropic.types import (
    CountTokensRequest,
    OutputConfig,
    ThinkingAdaptive,
    ThinkingDisabled,
    ThinkingEnabled,
)
from openinfer_server.chat.template import ChatTemplate
from openinfer_server.chat.variables import chat_variables
from openinfer_server.http.api_errors import ApiError
from openinfer_server.openai.types import Effort

NOTHING = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
SWITCH = NOTHING + "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}"
DEEPSEEK = NOTHING + "{% if thinking %}<think>{% endif %}"
LEVELS = (
    NOTHING
    + "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'x' %}{% endif %}{{ reasoning_effort }}"
)
BOTH = LEVELS + "{% if enable_thinking %}<think>{% endif %}"


def service(source: str, *, reasons: bool = True) -> SimpleNamespace:
    """As much of a `Service` as is asked."""
    template = ChatTemplate(source, {"bos_token": "<s>"}, timeout_s=5, max_characters=1000)
    return SimpleNamespace(template=template, parsers=SimpleNamespace(reasoning=object() if reasons else None))


def refused(say, *arguments: object, **fields: object) -> tuple[str, str]:
    with pytest.raises(ApiError) as caught:
        say(*arguments, **fields)
    assert caught.value.status == 400
    return str(caught.value.body.param), caught.value.body.message


@pytest.mark.parametrize(
    ("source", "read"),
    [
        (NOTHING, set()),
        (SWITCH, {"enable_thinking"}),
        (BOTH, {"reasoning_effort", "enable_thinking"}),
        ("{% set x = 1 %}{% if y %}{% set z = 2 %}{{ x ~ z }}{% endif %}", {"y"}),
        ("{% if y %}{% set z = 2 %}{% else %}{% set z = 3 %}{% endif %}{{ z }}", {"y"}),
        ("{% if y %}{% set z = 2 %}{% elif w %}{% set z = 3 %}{% endif %}{{ z }}", {"w", "y", "z"}),
        ("{% for a in messages %}{% set b = a %}{{ b }}{{ loop.last }}{% endfor %}{{ b }}", {"b"}),
        ("{% macro f(a, b=c) %}{{ a ~ b ~ d }}{% endmacro %}{{ f(1) }}{{ namespace() }}", {"c", "d"}),
        ("{% set t %}{{ u }}{% endset %}{{ t }}{% with v = w %}{{ v }}{% endwith %}", {"u", "w"}),
        ("{{ messages | selectattr('role') | map(attribute=a) }}{{ strftime_now(b) }}{{ eos_token }}", {"a", "b"}),
        ("{{ [x for_ in messages] if tools and documents else add_generation_prompt }}", None),
    ],
)
def test_variables_that_can_be_set_are_those_that_are_read(source, read):
    if read is not None:
        assert service(source).template.settable == read


def test_variables_are_passed_on_and_others_refused_by_name():
    told = service(BOTH + "{{ style }}")
    given = {"style": {"a": [None]}, "enable_thinking": False, "reasoning_effort": None}
    assert chat_variables(told, kwargs=given) == {"style": {"a": [None]}, "enable_thinking": False}
    for name in ("tools", "messages", "documents", "bos_token", "add_generation_prompt", "range", "other"):
        param, message = refused(chat_variables, told, kwargs={name: 1})
        assert param == f"chat_template_kwargs.{name}"
        assert "enable_thinking, reasoning_effort, style, thinking" in message
    assert "none" in refused(chat_variables, service(NOTHING), kwargs={"enable_thinking": False})[1]


def test_the_two_names_of_the_switch_are_one():
    for source, name in ((SWITCH, "enable_thinking"), (DEEPSEEK, "thinking")):
        for given in ("enable_thinking", "thinking"):
            assert chat_variables(service(source), kwargs={given: True}) == {name: True}
    contradiction = {"enable_thinking": True, "thinking": False}
    assert refused(chat_variables, service(SWITCH), kwargs=contradiction)[0] == "chat_template_kwargs.thinking"
    assert refused(chat_variables, service(SWITCH), kwargs={"thinking": "no"})[0] == "chat_template_kwargs.thinking"


@pytest.mark.parametrize(
    ("source", "effort", "variables"),
    [
        (LEVELS, "low", {"reasoning_effort": "low"}),
        (LEVELS, "max", {"reasoning_effort": "max"}),
        (LEVELS, "none", {"reasoning_effort": "none"}),
        (BOTH, "minimal", {"reasoning_effort": "minimal", "enable_thinking": True}),
        (BOTH, "none", {"enable_thinking": False}),
        (SWITCH, "none", {"enable_thinking": False}),
        (SWITCH, "minimal", {"enable_thinking": False}),
        (SWITCH, "low", {"enable_thinking": True}),
        (DEEPSEEK, "xhigh", {"thinking": True}),
        (SWITCH, None, {}),
    ],
)
def test_effort_reaches_the_template(source: str, effort: Effort, variables):
    assert chat_variables(service(source), effort=effort) == variables


def test_effort_that_the_template_cannot_be_told_is_refused_by_name():
    for effort in ("none", "high"):
        param, _ = refused(chat_variables, service(NOTHING), effort=effort, effort_field="reasoning.effort")
        assert param == "reasoning.effort"
    assert chat_variables(service(NOTHING, reasons=False), effort="none") == {}
    told = {"kwargs": {"reasoning_effort": "low"}, "effort": "high"}
    assert refused(chat_variables, service(LEVELS), **told)[0] == "reasoning_effort"


def test_documents_are_for_templates_that_read_them():
    documents = [{"text": "a"}]
    told = service("{% for d in documents %}{{ d.text }}{% endfor %}")
    assert chat_variables(told, documents=documents) == {"documents": documents}
    assert refused(chat_variables, service(NOTHING), documents=documents)[0] == "documents"


@pytest.mark.parametrize(
    ("source", "thinking", "effort", "variables"),
    [
        (SWITCH, None, None, {"enable_thinking": False}),
        (SWITCH, ThinkingDisabled(), "high", {"enable_thinking": False}),
        (SWITCH, ThinkingEnabled(budget_tokens=9), None, {"enable_thinking": True}),
        (SWITCH, ThinkingAdaptive(), None, {}),
        (SWITCH, ThinkingAdaptive(), "low", {"enable_thinking": True}),
        (BOTH, ThinkingEnabled(budget_tokens=9), "max", {"enable_thinking": True, "reasoning_effort": "max"}),
        (LEVELS, None, "medium", {"reasoning_effort": "medium"}),
        (NOTHING, None, "high", {}),
        (NOTHING, ThinkingEnabled(budget_tokens=9), None, {}),
    ],
)
def test_thinking_and_effort_of_messages_reach_the_template(source, thinking, effort, variables):
    config = None if effort is None else OutputConfig(effort=effort)
    request = CountTokensRequest(messages=[], thinking=thinking, output_config=config)
    assert thinking_variables(service(source), request) == variables


def test_thinking_that_cannot_be_switched_off_is_refused_by_name():
    request = CountTokensRequest(messages=[], thinking=ThinkingDisabled())
    assert refused(thinking_variables, service(NOTHING), request)[0] == "thinking"
    assert thinking_variables(service(NOTHING, reasons=False), request) == {}
    request = CountTokensRequest(messages=[], output_config=OutputConfig(effort="low"))
    for source in (NOTHING, SWITCH):
        assert refused(thinking_variables, service(source), request)[0] == "output_config.effort"
