"""What clients ask for: conversations of several tenants, which grow turn by turn, over all of the server's APIs."""

import dataclasses
import json
import random
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from openinfer_bench.simulate.clients import Manners
from openinfer_bench.simulate.grammars import COSTLY, REFUSED
from openinfer_core.testing import fake_model
from openinfer_core.testing.fake_grammar import fake_grammar

TENANTS = ("a", "b", "c")
ATTACKER = "mallory"
_SALTS = (None, None, "one", "two")
_FLOOD_GRAMMARS, _FLOOD_CHARACTERS = 15, 200_000
_FLOOD_MASKED, _MASKED_CHOICES = 8, 4
_TOKENIZE_RATE, _TOOL_RATE = 0.05, 0.2
_FLOOD_READERS, _FLOOD_READS_S, _FLOOD_READ_TOKENS = 24, 8.0, 64
_FLOOD_BODIES, _BODY_TOKEN_IDS = 2, [1_000_000] * 110_000  # a megabyte


class Api(StrEnum):
    """A route, and the shape of its answers."""

    TOKENS = "/inference/v1/generate"
    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    MESSAGES = "/v1/messages"
    RESPONSES = "/v1/responses"
    TOKENIZE = "/tokenize"


_APIS = (Api.TOKENS, Api.TOKENS, Api.COMPLETIONS, Api.CHAT, Api.MESSAGES, Api.RESPONSES)
CHATS = frozenset({Api.CHAT, Api.MESSAGES, Api.RESPONSES})
"""Those that take messages."""
_ONE_CHOICE = frozenset({Api.MESSAGES, Api.RESPONSES})

TOOL, ARGUMENTS = "look_up", '{"number": 7, "what": "weather"}'
"""A tool that some requests must call, and what the fake model calls it with."""
TOOL_CALL = f'<tool_call>\n{{"name": "{TOOL}", "arguments": {ARGUMENTS}}}\n</tool_call>'
_PARAMETERS = {"type": "object", "properties": {"number": {"type": "integer"}, "what": {"type": "string"}}}


@dataclass(slots=True)
class Conversation:
    """Turns so far."""

    tenant: str
    salt: str | None
    token_ids: list[int] = field(default_factory=list[int])
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request, and what is known of it in advance."""

    number: int
    tenant: str
    api: Api
    body: dict[str, Any]
    manners: Manners
    is_stream: bool
    deadline_s: float | None
    is_refused: bool = False
    """Whether it is the client's mistake."""
    calls_tool: bool = False

    @property
    def encoded(self) -> bytes:
        body = self.body if self.api is Api.TOKENIZE else {**self.body, "stream": self.is_stream}
        return json.dumps(body).encode()


class Traffic:
    """Draws requests.

    Args:
        draw: what all choices are drawn from.
        max_model_tokens: a conversation begins anew before it is longer.
    """

    def __init__(self, draw: random.Random, *, max_model_tokens: int) -> None:
        self._draw = draw
        self._max_model_tokens = max_model_tokens
        # What several tenants begin with: equal tokens that must not be shared across their salts.
        self._beginnings = [[draw.randrange(fake_model.NUM_TOKEN_IDS) for _ in range(50)] for _ in range(3)]
        self._conversations = [self._new() for _ in range(24)]
        self._number = 0

    def next(self) -> Ask:
        draw = self._draw
        self._number += 1
        index = draw.randrange(len(self._conversations))
        max_tokens = draw.choice((1, 4, 16, 32, 48, 72))
        api = draw.choice(_APIS)
        conversation = self._conversations[index] = self._grown(self._conversations[index], max_tokens)
        if draw.random() < _TOKENIZE_RATE:
            return self._tokenize(conversation)
        deadline_s = draw.choice((None, None, None, None, 2.0))
        is_stream = draw.random() < 0.7
        body: dict[str, Any] = {
            "hints": {"number": str(self._number)},
            "priority": draw.choice((0, 0, 0, 1)),
        }
        if conversation.salt is not None:
            body["cache_salt"] = conversation.salt
        if deadline_s is not None:
            body["deadline_s"] = deadline_s
        sampling: dict[str, Any] = {"max_output_tokens" if api is Api.RESPONSES else "max_tokens": max_tokens}
        calls_tool = api in CHATS and draw.random() < _TOOL_RATE
        if draw.random() < 0.2 and not calls_tool:
            sampling["stop_token_ids"] = [draw.randrange(fake_model.NUM_TOKEN_IDS) for _ in range(2)]
        if draw.random() < 0.1 and api not in _ONE_CHOICE and not calls_tool:
            sampling["n"] = draw.choice((2, 4))
        is_refused = False
        if api not in CHATS and draw.random() < 0.15:
            is_refused = draw.random() < 0.1
            sampling["structured_outputs"] = {"regex": self._grammar(is_refused=is_refused)}
        body |= self._prompt(api, conversation, sampling, calls_tool=calls_tool)
        if is_stream and api in (Api.COMPLETIONS, Api.CHAT):
            body["stream_options"] = {"include_usage": True}
        return Ask(
            number=self._number,
            tenant=conversation.tenant,
            api=api,
            body=body,
            manners=self._manners(),
            is_stream=is_stream,
            deadline_s=deadline_s,
            is_refused=is_refused,
            calls_tool=calls_tool,
        )

    def _tokenize(self, conversation: Conversation) -> Ask:
        return Ask(
            number=self._number,
            tenant=conversation.tenant,
            api=Api.TOKENIZE,
            body={"prompt": conversation.messages[-1]["content"]},
            manners=Manners(),
            is_stream=False,
            deadline_s=None,
        )

    # --- attacks ------------------------------------------------------------------------------------------

    def grammar_flood(self) -> list[Ask]:
        """Grammars that take long to compile, of one tenant."""
        padding = " " * _FLOOD_CHARACTERS
        return [self._attack(regex=fake_grammar(f"{index:<64}{padding}")) for index in range(_FLOOD_GRAMMARS)]

    def mask_flood(self) -> list[Ask]:
        """Grammars whose masks take as long as the engine bears."""
        return [
            self._attack(regex=f"{COSTLY} {index}", max_tokens=16, n=_MASKED_CHOICES) for index in range(_FLOOD_MASKED)
        ]

    def body_flood(self) -> list[Ask]:
        """Large bodies that ask for what cannot be."""
        return [self._attack(token_ids=_BODY_TOKEN_IDS, is_refused=True) for _ in range(_FLOOD_BODIES)]

    def slow_readers(self) -> list[Ask]:
        """Streams that are long and not read for a while."""
        manners = Manners(reads_slowly_s=_FLOOD_READS_S)
        return [
            dataclasses.replace(self._attack(max_tokens=_FLOOD_READ_TOKENS), manners=manners, is_stream=True)
            for _ in range(_FLOOD_READERS)
        ]

    def _attack(
        self, *, token_ids: list[int] | None = None, regex: str | None = None, is_refused: bool = False, **sampling: Any
    ) -> Ask:
        self._number += 1
        if regex is not None:
            sampling["structured_outputs"] = {"regex": regex}
        body: dict[str, Any] = {
            "token_ids": token_ids or [1, 2, 3],
            "sampling_params": {"max_tokens": 4, **sampling},
            "hints": {"number": str(self._number)},
        }
        return Ask(
            number=self._number,
            tenant=ATTACKER,
            api=Api.TOKENS,
            body=body,
            manners=Manners(),
            is_stream=False,
            deadline_s=None,
            is_refused=is_refused,
        )

    # --- requests -----------------------------------------------------------------------------------------

    def _grammar(self, *, is_refused: bool) -> str:
        name = self._draw.randrange(100)
        return f"{REFUSED} {name}" if is_refused else fake_grammar(f"{name}" + " " * self._draw.choice((10, 3000)))

    def _prompt(
        self, api: Api, conversation: Conversation, sampling: dict[str, Any], *, calls_tool: bool
    ) -> dict[str, Any]:
        if api is Api.TOKENS:
            return {"token_ids": conversation.token_ids, "sampling_params": sampling}
        if api is Api.COMPLETIONS:
            return {"prompt": conversation.token_ids, **sampling}
        # The tool's description has room beside a last message, not beside any conversation.
        messages = conversation.messages[-1:] if calls_tool else conversation.messages
        if api is Api.RESPONSES:
            body = {"input": messages, "store": False, **sampling}
        elif api is Api.MESSAGES:
            body = {"model": "simulated", "messages": messages, **sampling}
        else:
            body = {"messages": messages, **sampling}
        return body | (_tools(api) if calls_tool else {})

    def _grown(self, conversation: Conversation, max_tokens: int) -> Conversation:
        draw = self._draw
        new_ids = [draw.randrange(fake_model.NUM_TOKEN_IDS) for _ in range(draw.choice((3, 16, 17, 60, 150)))]
        text = "".join(draw.choice("abcdefghij klm") for _ in range(draw.choice((5, 40, 700))))
        longest = self._max_model_tokens - max_tokens - 64
        grown_tokens = len(conversation.token_ids) + len(new_ids)
        # A character is a token at most, and a template adds a few per message.
        grown_text = sum(len(message["content"]) + 16 for message in conversation.messages) + len(text)
        if grown_tokens > longest or grown_text > longest:
            conversation, text = self._new(), text[: longest // 2]
            new_ids = new_ids[:longest]
        messages = [*conversation.messages]
        if messages:
            messages.append({"role": "assistant", "content": "yes"})
        messages.append({"role": "user", "content": text})
        return Conversation(conversation.tenant, conversation.salt, [*conversation.token_ids, *new_ids], messages)

    def _new(self) -> Conversation:
        tenant, salt = self._draw.choice(TENANTS), self._draw.choice(_SALTS)
        return Conversation(tenant, salt, [*self._draw.choice(self._beginnings)])

    def _manners(self) -> Manners:
        draw = self._draw
        if draw.random() < 0.8:
            return Manners()
        return draw.choice(
            (
                Manners(leaves_after_events=draw.randint(1, 12)),
                Manners(reads_slowly_s=draw.choice((0.5, 5.0))),
                Manners(sends_body_for_s=draw.choice((0.01, 2.0))),
            )
        )


def _tools(api: Api) -> dict[str, Any]:
    """The tool, and that it must be called, as an API has it."""
    if api is Api.MESSAGES:
        tool: dict[str, Any] = {"name": TOOL, "input_schema": _PARAMETERS}
        return {"tools": [tool], "tool_choice": {"type": "any"}}
    function = {"name": TOOL, "parameters": _PARAMETERS}
    tool = {"type": "function", **function} if api is Api.RESPONSES else {"type": "function", "function": function}
    return {"tools": [tool], "tool_choice": "required"}
