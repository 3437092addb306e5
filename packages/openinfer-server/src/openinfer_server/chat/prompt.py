"""From turns to the prompt of a chat: rendered by the model's template, encoded, checked against the context.

Every route that takes turns comes through here, so that one conversation has one prompt whatever API it came by.
"""

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from openinfer_server.chat.template import ChatTemplate, RenderingRefused
from openinfer_server.chat.turns import num_characters, template_turns
from openinfer_server.http.api_errors import ApiError
from openinfer_server.openai.types import Turn
from openinfer_server.request.plan import Prompt, check_prompt_token_ids, too_long
from openinfer_server.service import Service

INLINE_CHARACTERS = 4096  # smaller chats are rendered in the event loop; larger ones in a thread
INLINE_TURNS = 16
# What the templates of Qwen3 and of DeepSeek call one switch; both are set if one is given.
_THINKING = ("enable_thinking", "thinking")


async def chat_prompt(
    service: Service, turns: Sequence[Turn], variables: Mapping[str, object], *, num_kept: int | None = None
) -> Prompt:
    """The prompt of a conversation and its rendered text, up to where the assistant's answer begins.

    Args:
        service: with the template and the tokenizer.
        turns: of the conversation.
        variables: of the template, beside the turns.
        num_kept: how many tokens of the prompt's end are kept; None for all. The text is kept whole.

    Raises:
        ApiError: 400; there is no template, or it refused the turns, or the prompt exceeds the context.
    """
    template, info, tokenizer = service.template, service.info, service.tokenizer
    if template is None:
        message = "the model has no chat template; use /v1/completions"
        raise ApiError(400, message, param="messages", code="no_chat_template")
    text = await _render(template, turns, _with_both_names(variables))
    least = tokenizer.least_tokens(text)
    if num_kept is None and least > info.max_model_tokens:
        raise too_long(f"at least {least}", info, "messages")
    token_ids = await tokenizer.encode(text, add_special_tokens=False)
    check_prompt_token_ids(token_ids, info, "messages")
    return Prompt(tuple(token_ids[-(num_kept or 0) :]), text, "messages")


def _with_both_names(variables: Mapping[str, object]) -> Mapping[str, object]:
    given = [variables[name] for name in _THINKING if name in variables]
    return {**dict.fromkeys(_THINKING, given[0]), **variables} if given else variables


async def _render(template: ChatTemplate, turns: Sequence[Turn], variables: Mapping[str, object]) -> str:
    rendered = template_turns(
        turns,
        developer_role="developer" if template.knows_developer_role else "system",
        text_arguments=template.wants_text_arguments,
    )
    try:
        characters = num_characters(rendered) + len(msgspec.json.encode(variables))
        if len(rendered) <= INLINE_TURNS and characters <= INLINE_CHARACTERS:
            return template.render(rendered, variables)
        return await asyncio.to_thread(template.render, rendered, variables)
    except RenderingRefused as error:
        raise ApiError(400, str(error), param="messages", code="chat_template_refused") from error
