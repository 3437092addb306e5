"""What the benchmark asks for: the plain stream, and streams on which the server has more to do per token."""

import json
from dataclasses import dataclass
from typing import Any

from openinfer_bench.frontend.stamps import OPEN_CALL, OPEN_REASONING_TEXT

PROMPT_TOKENS = 8
CHAT_TEMPLATE = "{#- tools: <tool_call>, reasoning: </think> -#}{{ messages[-1].content }}"
"""Takes tools, and lets the server choose its parsers of Qwen3's formats."""
_TOOL = {"type": "function", "function": {"name": "stamp", "parameters": {"type": "object"}}}


@dataclass(frozen=True, slots=True)
class Answer:
    """A kind of answer."""

    name: str
    about: str
    path: str
    fields: dict[str, Any]
    opening_token_id: int | None = None
    """What the engine says before the stamps."""

    def request(self, steps: int, headers: str = "") -> bytes:
        """A whole HTTP request for a stream of so many tokens, with further lines of its head."""
        common = {"model": "simulated", "max_tokens": steps, "stream": True, "ignore_eos": True}
        body = json.dumps(common | self.fields).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"{headers}content-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def _completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": list(range(PROMPT_TOKENS)), **fields}


def _chat(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], **fields}


_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
ANSWERS = {
    answer.name: answer
    for answer in (
        Answer("text", "a completion, nothing else", _COMPLETIONS, _completion()),
        Answer("stops", "with two stop strings", _COMPLETIONS, _completion(stop=["never", "\n\nnor this"])),
        Answer("logprobs", "with the log-probability of each token", _COMPLETIONS, _completion(logprobs=0)),
        Answer("content", "a chat's answer, read by both parsers", _CHAT, _chat(" 0001", tools=[_TOOL])),
        Answer("reasoning", "reasoning", _CHAT, _chat(" 0001" + OPEN_REASONING_TEXT, tools=[_TOOL])),
        Answer("arguments", "arguments of a call", _CHAT, _chat(" 0001", tools=[_TOOL]), OPEN_CALL),
    )
}
