"""What a session is: turns whose prompts grow from what the conversation holds, waits between them, and sub-agents."""

import msgspec


class Grow(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that keeps the beginning of what the conversation holds (its last prompt and answer) and goes on.

    The conversation of a sub-agent begins as a copy of its parent's.
    """

    keep_tokens: int
    """Of the conversation, from its beginning; where it holds fewer, all of it, and filler for the rest."""
    new_tokens: int


class Blocks(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt of blocks that a recording names: equal names are equal tokens."""

    names: tuple[int, ...]
    block_tokens: int
    num_tokens: int
    """Of the prompt. What the blocks do not cover is filler that no other prompt has."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a session, and what happens before and after it."""

    prompt: Grow | Blocks
    output_tokens: int
    wait_s: float = 0.0
    """Between the end of the turn before (and of the sub-agents that it waits for) and this one: a tool, or a human."""
    agents: tuple["Session", ...] = ()
    """Sub-agents that begin when this turn has ended; the next turn waits for those not in the background."""


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One agent's conversation."""

    name: str
    turns: tuple[Turn, ...]
    scope: str = ""
    """Of the names of its blocks: sessions of one scope share them."""
    is_background: bool = False

    @property
    def num_turns(self) -> int:
        """With those of all sub-agents."""
        return sum(1 + sum(agent.num_turns for agent in turn.agents) for turn in self.turns)


def named_apart(name: str, taken: set[str]) -> str:
    """A name that no other session has, which is added to those taken: what no block names is text by session."""
    found, number = name, 1
    while found in taken:
        number += 1
        found = f"{name}#{number}"
    taken.add(found)
    return found


def within(session: Session, *, max_tokens: int, max_wait_s: float, max_turns: int | None = None) -> Session:
    """A session as a server of limited context, and a run of limited time, can play it.

    A conversation ends before its first turn that does not fit; longer waits are cut. Sub-agents of a turn that is left
    out are left out, too.

    Args:
        session: as recorded or generated.
        max_tokens: of a prompt and its output.
        max_wait_s: between two turns.
        max_turns: of each conversation; None keeps all.
    """
    turns: list[Turn] = []
    for turn in session.turns[:max_turns]:
        prompt = turn.prompt
        length = prompt.num_tokens if isinstance(prompt, Blocks) else prompt.keep_tokens + prompt.new_tokens
        if length + turn.output_tokens > max_tokens:
            break
        agents = [within(a, max_tokens=max_tokens, max_wait_s=max_wait_s, max_turns=max_turns) for a in turn.agents]
        kept = tuple(agent for agent in agents if agent.turns)
        turns.append(msgspec.structs.replace(turn, wait_s=min(turn.wait_s, max_wait_s), agents=kept))
    return msgspec.structs.replace(session, turns=tuple(turns))
