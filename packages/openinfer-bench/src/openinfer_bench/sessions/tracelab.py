"""Sessions in TraceLab's JSON lines: one round of a session a line, with token counts and times, and no text.

`input_tokens_total` is `prefix_tokens`, which the provider had in its cache, and `newly_append_tokens`. What a prefix
consists of is not recorded; it is taken for the beginning of what the session held, so that a compaction shows as a
shorter prefix. `timing_events` tell when a round's input was there and when its answer ended. Sub-agents are sessions
of their own in the corpus and are played as such. Fields: github.com/uw-syfi/TraceLab, data of v0.0.2 (CC BY 4.0), as
AIPerf's documentation describes them, read on 2026-11-24.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import groupby
from typing import Annotated

import msgspec

from openinfer_bench.sessions.session import Grow, Session, Turn, named_apart
from openinfer_core import InvalidRequest

Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**24)]

_INPUTS = frozenset({"user_message", "tool_result"})


class _Event(msgspec.Struct):
    event_type: str = ""
    timestamp: str | None = None


class _Round(msgspec.Struct, kw_only=True):
    session_id: str
    round_index: int
    input_tokens_total: Tokens
    prefix_tokens: Tokens
    output_tokens: Tokens
    timing_events: list[_Event] = []


def read_tracelab(lines: Iterable[bytes], taken: set[str]) -> list[Session]:
    """The sessions of a file, in order of their first lines; their names are added to those taken.

    Raises:
        InvalidRequest: a line does not have the format.
    """
    rounds: list[_Round] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rounds.append(msgspec.json.decode(line, type=_Round))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"line {number} is no round of TraceLab: {error}", field="trace") from None
    order = {each.session_id: index for index, each in reversed(list(enumerate(rounds)))}
    rounds.sort(key=lambda each: (order[each.session_id], each.round_index))
    return [
        Session(name=named_apart(name, taken), turns=_turns(list(members)))
        for name, members in groupby(rounds, key=lambda each: each.session_id)
    ]


def _turns(rounds: list[_Round]) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    ended: datetime | None = None
    for each in rounds:
        total = max(1, each.input_tokens_total)
        keep = min(each.prefix_tokens, total - 1) if turns else 0
        began, end = _span(each.timing_events)
        wait_s = max(0.0, (began - ended).total_seconds()) if began is not None and ended is not None else 0.0
        prompt = Grow(keep_tokens=keep, new_tokens=total - keep)
        turns.append(Turn(prompt=prompt, output_tokens=max(1, each.output_tokens), wait_s=wait_s))
        ended = end or ended
    return tuple(turns)


def _span(events: list[_Event]) -> tuple[datetime | None, datetime | None]:
    """When the last input of a round was there, and when the model's last event was."""
    inputs = [when for event in events if event.event_type in _INPUTS and (when := _time(event.timestamp)) is not None]
    outputs = [
        when for event in events if event.event_type not in _INPUTS and (when := _time(event.timestamp)) is not None
    ]
    return (max(inputs) if inputs else None), (max(outputs) if outputs else None)


def _time(text: str | None) -> datetime | None:
    try:
        when = None if text is None else datetime.fromisoformat(text)
    except ValueError:
        return None
    return when if when is None or when.tzinfo is not None else when.replace(tzinfo=UTC)
