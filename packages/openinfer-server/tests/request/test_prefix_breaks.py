"""A conversation whose history is written otherwise than before is noticed, with the place; others are not."""

import logging
import random

import pytest

from openinfer_server.request.prefix_breaks import CHUNK_TOKENS, LOG_EVERY_S, PrefixBreaks
from openinfer_server.testing import ParrotLoop

KEY = ("key", None, "m")
PROMPT = [(7 * each) % 1000 for each in range(1000)]


def turns(*prompts: list[int], breaks: PrefixBreaks | None = None) -> list[int | None]:
    """Where each turn leaves the one before."""
    breaks = PrefixBreaks() if breaks is None else breaks
    found = [breaks.note("owner", KEY, prompt) for prompt in prompts]
    return [None if each is None else each.position for each in found]


def test_turn_that_goes_on_is_no_break() -> None:
    assert turns(PROMPT, [*PROMPT, 1, 2, 3], [*PROMPT, 1, 2, 3, *PROMPT]) == [None, None, None]


def test_end_of_a_prompt_may_be_written_otherwise() -> None:
    """The template asks for the answer there; the next turn has the answer in its place."""
    assert turns([*PROMPT[:990], 5, 5, 5], [*PROMPT[:960], *range(300)]) == [None, None]


def test_place_is_the_chunk_that_differs() -> None:
    rng = random.Random(3)
    for _ in range(50):
        place = rng.randrange(CHUNK_TOKENS, 900)
        changed = [*PROMPT[:place], PROMPT[place] + 1, *PROMPT[place + 1 :], 4, 5]
        (_, position) = turns(PROMPT, changed)
        last_compared = (len(PROMPT) - 64) // CHUNK_TOKENS * CHUNK_TOKENS
        expected = None if place >= last_compared else place // CHUNK_TOKENS * CHUNK_TOKENS
        assert position == expected, place


def test_lost_tokens_are_those_of_the_turn_before() -> None:
    breaks = PrefixBreaks()
    assert turns(PROMPT, [*PROMPT[:300], *([1] * 900)], breaks=breaks) == [None, 256]
    assert (breaks.count, breaks.lost_tokens) == (1, 1000 - 256)


def test_another_conversation_under_the_key_is_no_break() -> None:
    assert turns(PROMPT, [9, *PROMPT], PROMPT[:300], PROMPT) == [None, None, None, None]


@pytest.mark.parametrize("other", [("other", None, "m"), ("key", "salt", "m"), ("key", None, "adapter")])
def test_conversations_are_apart(other: tuple[str | None, ...]) -> None:
    breaks = PrefixBreaks()
    changed = [*PROMPT[:300], *([1] * 900)]
    breaks.note("owner", KEY, PROMPT)
    assert breaks.note("owner", other, changed) is None
    assert breaks.note("another owner", KEY, changed) is None
    assert breaks.note("owner", KEY, changed) is not None


def test_memory_is_bounded_and_what_was_used_longest_ago_goes() -> None:
    breaks = PrefixBreaks(max_bytes=1000)
    changed = [*PROMPT[:300], *([1] * 900)]
    for number in range(20):
        breaks.note("owner", (f"{number}", None, "m"), PROMPT)
    assert breaks.note("owner", ("0", None, "m"), changed) is None
    assert breaks.note("owner", ("19", None, "m"), changed) is not None


def test_log_has_one_line_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    breaks = PrefixBreaks(clock=lambda: now_s)
    with caplog.at_level(logging.WARNING, logger="openinfer.server"):
        for number in range(5):
            turns(PROMPT, [*PROMPT[:300], *([number] * 900)], breaks=breaks)
        assert len(caplog.records) == 1
        now_s = LOG_EVERY_S
        turns(PROMPT, [*PROMPT[:300], *([9] * 900)], breaks=breaks)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("prefix_break owner='owner' token=256 lost_tokens=744 prompt_tokens=1200: ")
    assert second.endswith("; 4 more since the last such line")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_every_api_counts_a_history_that_was_changed(start, info, call, path) -> None:  # type: ignore[no-untyped-def]
    server = start(ParrotLoop(info))
    field = "input" if path == "/v1/responses" else "messages"
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    asked = [{"role": "user", "content": f"{number} " + "stone mountain river " * 60} for number in range(3)]
    said = {"role": "assistant", "content": "an answer"}

    def ask(*turns: object, key: str | None = "c") -> None:
        body = {"model": "parrot", field: [*turns], limit: 1, **({} if key is None else {"prompt_cache_key": key})}
        assert call(server, "POST", path, body)[0] == 200

    def counted() -> int:
        page = call(server, "GET", "/metrics")[2].decode()
        values = dict(line.rsplit(" ", 1) for line in page.splitlines() if line and line[0] != "#")
        return int(values["openinfer_prefix_breaks_total"])

    ask(asked[0])
    ask(asked[0], said, asked[1])
    assert counted() == 0
    changed = {**asked[0], "content": asked[0]["content"].replace("river", "lake")}
    ask(asked[0], said, {**asked[1], "content": asked[1]["content"][:400]}, said, asked[2])
    assert counted() == 1
    ask(changed, said, asked[1], said, asked[2], key=None)  # without a key nothing is compared
    assert counted() == 1
