"""What clients ask for: conversations of several tenants, which grow turn by turn, over three of the server's APIs."""

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
_FLOOD_BODIES, _BODY_TOKEN_IDS = 2, [1_000_000] * 110_000  # a megabyte


class Api(StrEnum):
    """A route, and the shape of its answers."""

    TOKENS = "/inference/v1/generate"
    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


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
        is_refused = False
        if api is not Api.CHAT and draw.random() < 0.15:
            is_refused = draw.random() < 0.1
            sampling["structured_outputs"] = {"regex": self._grammar(is_refused=is_refused)}
        body |= self._prompt(api, conversation, sampling)
        if is_stream and api is not Api.TOKENS:
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
