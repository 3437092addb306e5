"""Sessions made up: conversations of one shape each, for questions that a recording does not ask.

The defaults are medians of recorded coding agents (43 turns; 444 tokens out a turn; sub-agents in 44 % of sessions)
with 3,000 new tokens a turn, which comes to the 142,000 tokens of their median prompt after 38.
"""

import random
from dataclasses import dataclass

from openinfer_bench.sessions.session import Grow, Session, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of generated sessions.

    Attributes:
        sessions: how many.
        turns: of each; a sub-agent has a quarter of them.
        first_tokens: of the first prompt: system prompt and tools.
        new_tokens: that each later turn adds: a tool's output.
        output_tokens: of each turn.
        wait_s: between turns.
        agents_share: of the sessions; each has one sub-agent, in the middle, which forks the conversation.
    """

    sessions: int = 8
    turns: int = 43
    first_tokens: int = 12_000
    new_tokens: int = 3_000
    output_tokens: int = 444
    wait_s: float = 2.0
    agents_share: float = 0.44


def generate(shape: Shape, *, seed: int) -> list[Session]:
    """The sessions of a shape; which of them have a sub-agent is the seed's choice."""
    chosen = random.Random(seed)  # noqa: S311 — a workload, no secret
    with_agent = set(chosen.sample(range(shape.sessions), round(shape.sessions * shape.agents_share)))
    return [_session(f"session-{index}", shape, has_agent=index in with_agent) for index in range(shape.sessions)]


def _session(name: str, shape: Shape, *, has_agent: bool) -> Session:
    turns: list[Turn] = []
    keep = 0
    for index in range(shape.turns):
        new = shape.first_tokens if index == 0 else shape.new_tokens
        prompt = Grow(keep_tokens=keep, new_tokens=new)
        agents = (_agent(name, shape, keep + new),) if has_agent and index == shape.turns // 2 else ()
        wait_s = shape.wait_s if index else 0.0
        turns.append(Turn(prompt=prompt, output_tokens=shape.output_tokens, wait_s=wait_s, agents=agents))
        keep += new + shape.output_tokens
    return Session(name=name, turns=tuple(turns))


def _agent(parent: str, shape: Shape, held_tokens: int) -> Session:
    turns: list[Turn] = []
    keep = held_tokens
    for _ in range(max(1, shape.turns // 4)):
        prompt = Grow(keep_tokens=keep, new_tokens=shape.new_tokens)
        turns.append(Turn(prompt=prompt, output_tokens=shape.output_tokens, wait_s=shape.wait_s))
        keep += shape.new_tokens + shape.output_tokens
    return Session(name=f"{parent}/agent", turns=tuple(turns))
