"""From turns to the prompt of a chat: rendered by the model's template, encoded, checked against the context.

Every route that takes turns comes through here, so that one conversation has one prompt whatever API it came by.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from openinfer_server.chat.bounds import RenderingRefused
from openinfer_server.chat.prefill import PrefillRefused, continued
from openinfer_server.chat.prefix_marks import PrefixMark, flagged_turns, prefix_ends
from openinfer_server.chat.template import ChatTemplate
from openinfer_server.chat.turns import TemplateTurn, num_characters, template_turns
from openinfer_server.http.api_errors import ApiError, invalid, refused
from openinfer_server.http.request import HttpRequest
from openinfer_server.openai.types import AssistantTurn, Turn
from openinfer_server.request.plan import ID_BYTES, Prompt, check_prompt_token_ids, too_long
from openinfer_server.service import Service
from openinfer_server.text.control_tokens import OriginLost
from openinfer_server.text.marked_text import MarkedText

INLINE_CHARACTERS = 4096  # smaller chats are rendered in the event loop; larger ones in a thread
INLINE_TURNS = 16


class PromptEnd(StrEnum):
    """Where a prompt ends."""

    NEW_TURN = "new turn"
    """Where the assistant's answer begins."""
    IN_LAST_TURN = "in last turn"
    """With the text of the last turn, the assistant's, which is continued."""
    AFTER_LAST_TURN = "after last turn"
    """With the last turn, ended; the model writes what it takes for the next one."""


def prompt_end(
    turns: Sequence[Turn], *, continue_final_message: bool | None, add_generation_prompt: bool | None
) -> PromptEnd:
    """Where the prompt of a chat ends, by what its request says.

    Raises:
        ApiError: 400; the two contradict each other or the turns, or the last turn is the assistant's and neither says
            what becomes of it.
    """
    is_answer = bool(turns) and isinstance(turns[-1], AssistantTurn)
    if continue_final_message:
        if add_generation_prompt:
            message = "continue_final_message goes on with the last turn, and add_generation_prompt begins one"
            raise invalid("continue_final_message", message)
        if not is_answer:
            message = "the last message is not the assistant's, which alone can be continued"
            raise invalid("continue_final_message", message)
        return PromptEnd.IN_LAST_TURN
    if add_generation_prompt is False:
        return PromptEnd.AFTER_LAST_TURN
    if is_answer and continue_final_message is None:
        message = (
            "the last message is the assistant's: continue_final_message has to say whether it is continued (true) "
        )
        raise invalid("continue_final_message", message + "or a new turn follows (false)")
    return PromptEnd.NEW_TURN


async def chat_prompt(
    http_request: HttpRequest,
    service: Service,
    turns: Sequence[Turn],
    variables: Mapping[str, object],
    *,
    end: PromptEnd = PromptEnd.NEW_TURN,
    num_kept: int | None = None,
    cache_salt: str | None = None,
    marks: Sequence[PrefixMark] = (),
) -> Prompt:
    """The prompt of a conversation and its rendered text.

    Args:
        http_request: whose prompt it is: what takes long is done in threads, in its owner's share of them.
        service: with the template and the tokenizer.
        turns: of the conversation.
        variables: of the template, beside the turns.
        end: where the prompt ends.
        num_kept: how many tokens of the prompt's end are kept; None for all. The text is kept whole.
        cache_salt: of the request: what was encoded before is found again under an equal one alone.
        marks: prefixes whose tokens are counted (`Prompt.prefix_tokens`), at most `MAX_MARKS`; not with `num_kept`.

    Raises:
        ApiError: 400; there is no template, or it refused the turns or lost the origin of a control token, or the
            prompt exceeds the context. 429 or 503: see `Tokenizer.encode`.
        ClientDisconnected: the client has left.
    """
    template, info, tokenizer = service.template, service.info, service.tokenizer
    control_tokens = service.control_tokens
    if template is None or control_tokens is None:
        message = "the model has no chat template; use /v1/completions"
        raise ApiError(400, message, param="messages", code="no_chat_template")
    if end is PromptEnd.AFTER_LAST_TURN and "add_generation_prompt" not in template.reads:
        raise refused("add_generation_prompt", "the chat template does not read it")
    marked, begun = await _render(http_request, service, template, turns, variables, end=end, marks=marks)
    ends: tuple[int, ...] = ()
    if marks:
        ends, marked = prefix_ends(marked, marks), marked.without_flags()
    text = marked.plain
    least = tokenizer.least_tokens(text)
    if num_kept is None and least > info.max_model_tokens:
        raise too_long(f"at least {least}", info, "messages")
    try:
        token_ids, counts, beginnings = await tokenizer.encode_chat(
            marked, control_tokens, client=http_request, cache_salt=cache_salt, ends=ends
        )
    except OriginLost as error:
        raise ApiError(400, str(error), param="messages", code="chat_template_loses_origin") from error

    # Looking at 142,000 ids takes 3 ms: only where the tokenizer has any that the model lacks.
    if not token_ids or tokenizer.max_token_id >= info.num_token_ids:
        num_bytes = ID_BYTES * len(token_ids)
        await http_request.aside(lambda: check_prompt_token_ids(token_ids, info, "messages"), num_bytes=num_bytes)
    if num_kept is not None and num_kept < len(token_ids):
        token_ids, beginnings = token_ids[-num_kept:], ()
    return Prompt(token_ids, text, "messages", begun, counts, beginnings)


async def _render(
    http_request: HttpRequest,
    service: Service,
    template: ChatTemplate,
    turns: Sequence[Turn],
    variables: Mapping[str, object],
    *,
    end: PromptEnd,
    marks: Sequence[PrefixMark],
) -> tuple[MarkedText, str]:
    """The rendered chat, and what of its end is the beginning of the answer."""

    def read() -> Sequence[TemplateTurn]:
        read_turns = template_turns(
            turns,
            developer_role="developer" if template.knows_developer_role else "system",
            text_arguments=template.wants_text_arguments,
            no_content_beside_calls=template.wants_no_content_beside_calls,
        )
        return flagged_turns(read_turns, marks) if marks else read_turns

    def render(rendered: Sequence[TemplateTurn]) -> tuple[MarkedText, str]:
        if end is PromptEnd.IN_LAST_TURN:
            return continued(template, rendered, variables, service.parsers.reasoning_tags)
        return template.render(rendered, variables, add_generation_prompt=end is PromptEnd.NEW_TURN), ""

    try:
        if len(turns) > INLINE_TURNS or http_request.is_large:
            return await http_request.in_thread(lambda: render(read()))
        rendered = read()
        if num_characters(rendered) + len(msgspec.json.encode(variables)) <= INLINE_CHARACTERS:
            return render(rendered)
        return await http_request.in_thread(lambda: render(rendered))
    except PrefillRefused as error:
        raise invalid("messages", str(error)) from error
    except RenderingRefused as error:
        raise ApiError(400, str(error), param="messages", code="chat_template_refused") from error
