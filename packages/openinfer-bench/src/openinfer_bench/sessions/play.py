"""Playing sessions against a server: each waits for its own answers, as an agent does, and goes on from them."""

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from openinfer_bench.serve.client import Client
from openinfer_bench.serve.messages import Job, Outcome, Target
from openinfer_bench.sessions.filler import Filler
from openinfer_bench.sessions.reuse import PrefixesSeen
from openinfer_bench.sessions.session import Grow, Session, Turn

TOP_LOGPROBS = 5
"""Alternatives that are asked for; OpenAI's limit for completions."""


class Played(msgspec.Struct, kw_only=True):
    """One turn, and what came of it."""

    session: str
    turn: int
    """From 1, as every agent counts its own."""
    prompt: bytes
    """Token ids, int32."""
    prompt_tokens: int
    output_tokens: int
    allowed_tokens: int
    """Of the prompt, that a server which forgets nothing could have had in whole blocks."""
    begin_s: float
    end_s: float
    outcome: Outcome


class Player:
    """Plays sessions, at most so many at a time.

    Args:
        target: the server.
        filler: stands for text.
        places: conversations at once, sub-agents not counted.
        salt: of all requests; another salt finds nothing that this one left.
        top_logprobs: that each request asks for, with the token ids; None asks for neither, and answers are filler in
            the prompts after them.
        on_played: is called after each turn, before the next one of its session; its time is none of the session's.
    """

    def __init__(
        self,
        target: Target,
        filler: Filler,
        *,
        places: int,
        salt: str,
        top_logprobs: int | None = TOP_LOGPROBS,
        on_played: Callable[[Played], None] = lambda _: None,
    ) -> None:
        self._client = Client(target)
        self._filler = filler
        self._places = asyncio.Semaphore(places)
        self._salt = salt
        self._top_logprobs = top_logprobs
        self._on_played = on_played
        self._seen = PrefixesSeen()
        self.played: list[Played] = []
        self.spans_s: dict[str, tuple[float, float]] = {}
        """When each session (no sub-agent) began and ended."""

    async def play(self, sessions: Sequence[Session]) -> None:
        """Until all have ended. A session ends at the first turn that fails: what would follow was never said."""
        try:
            await asyncio.gather(*map(self._session, sessions))
        finally:
            self._client.close()

    async def _session(self, session: Session) -> None:
        async with self._places:
            begin_s = time.perf_counter()
            await self._converse(session, np.empty(0, np.int32))
            self.spans_s[session.name] = (begin_s, time.perf_counter())

    async def _converse(self, session: Session, held: NDArray[np.int32]) -> None:
        background: list[asyncio.Task[None]] = []
        for number, turn in enumerate(session.turns, 1):
            await asyncio.sleep(turn.wait_s)
            prompt = self._prompt(session, number, turn, held)
            played = await self._ask(session.name, number, prompt, turn.output_tokens)
            if played.outcome.error:
                break
            self._on_played(played)
            held = np.concatenate([prompt, self._output(session, number, turn, played.outcome)])
            agents = [asyncio.create_task(self._converse(agent, held)) for agent in turn.agents]
            waited = [task for task, agent in zip(agents, turn.agents, strict=True) if not agent.is_background]
            background += [task for task in agents if task not in waited]
            await asyncio.gather(*waited)
        await asyncio.gather(*background)

    async def _ask(self, name: str, number: int, prompt: NDArray[np.int32], output_tokens: int) -> Played:
        data = prompt.tobytes()
        allowed = self._seen.reusable_tokens(prompt)
        job = Job(prompt=data, output_tokens=output_tokens, cache_salt=self._salt, top_logprobs=self._top_logprobs)
        outcome = await self._client.run(job)
        played = Played(
            session=name,
            turn=number,
            prompt=data,
            prompt_tokens=len(prompt),
            output_tokens=output_tokens,
            allowed_tokens=allowed,
            begin_s=outcome.begin_s,
            end_s=time.perf_counter(),
            outcome=outcome,
        )
        self.played.append(played)
        if not outcome.error:
            self._seen.add(np.concatenate([prompt, np.asarray(outcome.token_ids[:-1], np.int32)]))
        return played

    def _prompt(self, session: Session, number: int, turn: Turn, held: NDArray[np.int32]) -> NDArray[np.int32]:
        """What the turn says, int32 `[prompt tokens]`."""
        fresh = (session.name, number)
        if isinstance(turn.prompt, Grow):
            kept = held[: turn.prompt.keep_tokens]
            new_tokens = turn.prompt.keep_tokens + turn.prompt.new_tokens - len(kept)
            return np.concatenate([kept, self._filler.tokens("new", *fresh, num_tokens=new_tokens)])
        blocks: list[NDArray[np.int32]] = []
        left = turn.prompt.num_tokens
        for name in turn.prompt.names[: -(-left // turn.prompt.block_tokens)]:  # a recording may name more
            num_tokens = min(left, turn.prompt.block_tokens)
            blocks.append(self._filler.tokens("block", session.scope, name, num_tokens=num_tokens))
            left -= num_tokens
        return np.concatenate([*blocks, self._filler.tokens("rest", *fresh, num_tokens=left)])

    def _output(self, session: Session, number: int, turn: Turn, outcome: Outcome) -> NDArray[np.int32]:
        """What the server said; of one that tells no ids, filler as long."""
        if outcome.token_ids:
            return np.asarray(outcome.token_ids, np.int32)
        return self._filler.tokens("output", session.name, number, num_tokens=turn.output_tokens)
