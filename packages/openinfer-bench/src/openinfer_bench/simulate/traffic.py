"""What clients ask for: conversations of several tenants, which grow turn by turn, over three of the server's APIs."""

import json
import random
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from openinfer_bench.simulate.clients import Manners
from openinfer_core.testing import fake_model

_TENANT_NAMES = ("a", "b", "c")


class Api(StrEnum):
    """A route, and the shape of its answers."""

    TOKENS = "/inference/v1/generate"
    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


@dataclass(slots=True)
class Conversation:
    """Turns so far."""

    salt: str | None
    token_ids: list[int] = field(default_factory=list[int])
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request, and what is known of it in advance."""

    number: int
    api: Api
    body: dict[str, Any]
    manners: Manners
    is_stream: bool
    deadline_s: float | None

    @property
    def encoded(self) -> bytes:
        return json.dumps(self.body).encode()


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
        api = draw.choice((Api.TOKENS, Api.TOKENS, Api.COMPLETIONS, Api.CHAT))
        conversation = self._conversations[index] = self._grown(self._conversations[index], max_tokens)
        deadline_s = draw.choice((None, None, None, None, 2.0))
        is_stream = draw.random() < 0.7
        body: dict[str, Any] = {
            "stream": is_stream,
            "hints": {"number": str(self._number)},
            "priority": draw.choice((0, 0, 0, 1)),
        }
        if conversation.salt is not None:
            body["cache_salt"] = conversation.salt
        if deadline_s is not None:
            body["deadline_s"] = deadline_s
        sampling: dict[str, Any] = {"max_tokens": max_tokens}
        if draw.random() < 0.2:
            sampling["stop_token_ids"] = [draw.randrange(fake_model.NUM_TOKEN_IDS) for _ in range(2)]
        if draw.random() < 0.1:
            sampling["n"] = draw.choice((2, 4))
        body |= self._prompt(api, conversation, sampling)
        if is_stream and api is not Api.TOKENS:
            body["stream_options"] = {"include_usage": True}
        return Ask(
            number=self._number,
            api=api,
            body=body,
            manners=self._manners(),
            is_stream=is_stream,
            deadline_s=deadline_s,
        )

    def _prompt(self, api: Api, conversation: Conversation, sampling: dict[str, Any]) -> dict[str, Any]:
        if api is Api.TOKENS:
            return {"token_ids": conversation.token_ids, "sampling_params": sampling}
        if api is Api.COMPLETIONS:
            return {"prompt": conversation.token_ids, **sampling}
        return {"messages": conversation.messages, **sampling}

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
        return Conversation(conversation.salt, [*conversation.token_ids, *new_ids], messages)

    def _new(self) -> Conversation:
        salt = self._draw.choice((None, None, *_TENANT_NAMES))
        return Conversation(salt, [*self._draw.choice(self._beginnings)])

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
