"""Prompts that end inside the assistant's turn, so that the model goes on with it.

The template writes the turn with a mark in place of its text. The prompt is what stands before the mark, and the text
as it is: nothing that the template would strip, or put at the end of a turn, can touch it. Where the mark does not
show, the turn is refused. Reasoning that the text opens itself follows the generation prompt, as the model would
write it.
"""

import secrets
from collections.abc import Mapping, Sequence

from openinfer_server.chat.template import ChatTemplate
from openinfer_server.chat.turns import REASONING_NAMES, TemplateTurn
from openinfer_server.text.marked_text import MarkedText, Origin

_LEAVES_REASONING_OUT = "the chat template leaves the reasoning of the last message out"


class PrefillRefused(Exception):
    """The last turn cannot be continued; the message says why."""


def continued(
    template: ChatTemplate,
    turns: Sequence[TemplateTurn],
    variables: Mapping[str, object],
    tags: tuple[str, str] | None,
) -> tuple[MarkedText, str]:
    """The rendered chat, which ends with the text of its last turn, the assistant's; and that text.

    Args:
        template: of the model.
        turns: the last one has text, or reasoning alone, which is continued then.
        variables: of the template.
        tags: what opens and what closes reasoning; None if the model has none, or none that are known.

    Raises:
        PrefillRefused: the template does not write it, or there is none.
        RenderingRefused: see there.
    """
    last = turns[-1]
    if last.get("tool_calls"):
        raise PrefillRefused("the last message calls a tool; a call cannot be continued")
    content, reasoning = (
        MarkedText.of(str(last.get(name, "")), Origin.ASSISTANT) for name in ("content", "reasoning_content")
    )
    if not content and not reasoning:
        raise PrefillRefused("the last message has no text that could be continued")
    if tags and not reasoning and content.lstrip().startswith(tags[0]):
        return _opened(template, turns, variables, tags) + content, content.plain
    if not content:
        return _before_reasoning(template, turns, variables, tags) + reasoning, reasoning.plain
    prompt = _before(template, turns, variables, ("content",))
    if prompt is None:
        raise PrefillRefused("the chat template does not write the text of the last message, or not once")
    if reasoning and _before(template, turns, variables, REASONING_NAMES) is None:
        raise PrefillRefused(_LEAVES_REASONING_OUT)
    return prompt + content, content.plain


def _before(
    template: ChatTemplate, turns: Sequence[TemplateTurn], variables: Mapping[str, object], names: Sequence[str]
) -> MarkedText | None:
    """What the template writes before a field of the last turn; None if the field does not show, or not once.

    Args:
        template: of the model.
        turns: see `continued`.
        variables: of the template.
        names: of the field; templates know it by one of them.
    """
    mark = f"a{secrets.token_hex(16)}"  # a letter first: a template that capitalises texts must not pass by chance
    last = {**turns[-1], **dict.fromkeys(names, mark)}
    text = template.render([*turns[:-1], last], variables, add_generation_prompt=False)
    before, found, after = text.partition(mark)
    return before if found and mark not in after else None


def _before_reasoning(
    template: ChatTemplate,
    turns: Sequence[TemplateTurn],
    variables: Mapping[str, object],
    tags: tuple[str, str] | None,
) -> MarkedText:
    prompt = _before(template, turns, variables, REASONING_NAMES)
    if prompt is None:  # templates of models that always think write no reasoning, and open it for the answer
        prompt = _generation_prompt(template, turns, variables)
        if tags is None or not prompt.rstrip().endswith(tags[0]):
            raise PrefillRefused(_LEAVES_REASONING_OUT)
    return prompt


def _generation_prompt(
    template: ChatTemplate, turns: Sequence[TemplateTurn], variables: Mapping[str, object]
) -> MarkedText:
    return template.render(turns[:-1], variables)


def _opened(
    template: ChatTemplate,
    turns: Sequence[TemplateTurn],
    variables: Mapping[str, object],
    tags: tuple[str, str],
) -> MarkedText:
    """What stands before an answer that opens its reasoning itself."""
    opening, closing = tags
    prompt = _generation_prompt(template, turns, variables)
    shown = prompt.rstrip()
    if shown.endswith(closing):
        raise PrefillRefused(f"the last message begins with {opening}, and reasoning is switched off")
    return shown.removesuffix(opening) if shown.endswith(opening) else prompt
