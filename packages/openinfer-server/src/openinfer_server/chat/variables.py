"""What a request may say to the chat template: its variables, how much to think, documents.

A template is told only what it reads. Whatever else a request says to it is refused by name: it would change nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from openinfer_server.chat.template import ChatTemplate
from openinfer_server.http.api_errors import invalid, refused
from openinfer_server.limits.conversation import check_depth
from openinfer_server.openai.types import Effort
from openinfer_server.service import Service

Variables = Mapping[str, object]

_SWITCHES = ("enable_thinking", "thinking")  # what the templates of Qwen3 and of DeepSeek call one switch
LEVEL = "reasoning_effort"
_KWARGS = "chat_template_kwargs"


def chat_variables(
    service: Service,
    *,
    kwargs: Mapping[str, Any] | None = None,
    effort: Effort | None = None,
    effort_field: str = LEVEL,
    documents: Sequence[Mapping[str, Any]] | None = None,
) -> Variables:
    """Variables of the template for what a chat's request says.

    Raises:
        ApiError: 400; the template does not read it, or two fields contradict each other.
    """
    template = service.template
    if template is None:
        return {}  # such a chat is refused for that
    given = _given_variables(template, kwargs or {})
    chosen = effort_variables(service, effort, effort_field)
    if any(given.get(name, value) != value for name, value in chosen.items()):
        raise invalid(effort_field, f"{effort_field} and {_KWARGS} contradict each other")
    return {**given, **chosen, **_documents(template, documents)}


def effort_variables(service: Service, effort: Effort | None, field: str) -> Variables:
    """How much to think, as the template takes it.

    A template that reads `reasoning_effort` gets the level. One that can only be told to think or not does not think at
    `none` and `minimal`. Where no reasoning is told apart, `none` is what is always so.

    Raises:
        ApiError: 400; the template can be told neither.
    """
    template = service.template
    if effort is None or template is None:
        return {}
    switches = _switches(template)
    if LEVEL in template.settable and not (effort == "none" and switches):
        return {LEVEL: effort, **dict.fromkeys(switches, True)}
    if switches:
        return dict.fromkeys(switches, effort not in ("none", "minimal"))
    if effort == "none" and service.parsers.reasoning is None:
        return {}
    raise refused(field, "the chat template reads neither reasoning_effort nor enable_thinking")


def switch_variables(service: Service, *, thinks: bool) -> Variables | None:
    """The switch of the template; None where it has none."""
    switches = () if service.template is None else _switches(service.template)
    return dict.fromkeys(switches, thinks) if switches else None


def reads_levels(service: Service) -> bool:
    """Whether the template is told how much to think, and not only whether."""
    return service.template is not None and LEVEL in service.template.settable


def _switches(template: ChatTemplate) -> Sequence[str]:
    return [name for name in _SWITCHES if name in template.settable]


def _given_variables(template: ChatTemplate, kwargs: Mapping[str, Any]) -> dict[str, object]:
    switches = _switches(template)
    known = template.settable.union(_SWITCHES if switches else ())
    variables: dict[str, object] = {}
    for name, value in kwargs.items():
        field = f"{_KWARGS}.{name[:64]}"
        if name not in known:
            read = ", ".join(sorted(known)) or "none that a request may set"
            raise refused(field, f"the variables that the chat template reads are: {read}")
        if value is None:
            continue
        check_depth(value, field)
        if name not in _SWITCHES:
            variables[name] = value
        elif not isinstance(value, bool):
            raise invalid(field, f"{field} is true or false")
        elif any(variables.get(switch, value) is not value for switch in switches):
            raise invalid(field, f"{' and '.join(_SWITCHES)} are one switch, and contradict each other")
        else:
            variables.update(dict.fromkeys(switches, value))
    return variables


def _documents(template: ChatTemplate, documents: Sequence[Mapping[str, Any]] | None) -> Variables:
    if documents is None:
        return {}
    if "documents" not in template.reads:
        raise refused("documents", "the chat template does not read documents")
    for index, document in enumerate(documents):
        check_depth(document, f"documents[{index}]")
    return {"documents": documents}
