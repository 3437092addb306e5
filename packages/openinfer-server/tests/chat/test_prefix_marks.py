"""A mark's place in the rendered chat: the end of the marked text, or no less of the prompt than is asked."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openinfer_server import ChatTemplate
from openinfer_server.chat.prefix_marks import PrefixMark, TurnText, flagged_turns, prefix_ends
from openinfer_server.text.marked_text import MarkedText

FRAMES = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}<e>{% endfor %}"
TRIMMED = "{% for m in messages %}<s>{{ m.role }} {{ m.content | trim }}<e>{% endfor %}"
LATE_TOOLS = (
    "<s>{{ messages[0].content }} {{ tools | tojson }}<e>{% for m in messages[1:] %}{{ m.content }}<e>{% endfor %}"
)
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}<s>{{ m.role }} {{ m.content }}<e>{% endfor %}"
OUT_OF_ORDER = "{% for m in messages | reverse %}{{ m.content }}<e>{% endfor %}"


def rendered(source: str, turns, marks) -> tuple[MarkedText, tuple[int, ...]]:
    template = ChatTemplate(source, {}, timeout_s=5, max_characters=100_000)
    text = template.render(flagged_turns(turns, marks), {"tools": [{"name": "find"}]})
    plain = template.render(turns, {"tools": [{"name": "find"}]})
    ends = prefix_ends(text, marks)
    text = text.without_flags()
    assert (text.plain, text.origins) == (plain.plain, plain.origins)
    return text, ends


def turns_of(*contents: str):
    roles = ("system", "user", "assistant", "user", "assistant", "user")
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


CHAT = turns_of("brief", "question one", "answer", "last words ")


@pytest.mark.parametrize(
    ("source", "mark", "before"),
    [
        (FRAMES, PrefixMark(TurnText(3, 0, 11), None), "<e><s>user last words "),
        (TRIMMED, PrefixMark(TurnText(3, 0, 11), None), "<e><s>user last words"),
        (FRAMES, PrefixMark(TurnText(1, 0, 8), TurnText(2, 0, 6)), "<s>system brief<e><s>user question"),
        (FRAMES, PrefixMark(TurnText(2, 0, 6), TurnText(3, 0, 11)), "<s>assistant answer"),
        (FRAMES, PrefixMark(None, TurnText(1, 0, 12)), "<s>system brief<e><s>user "),
        (LATE_TOOLS, PrefixMark(None, TurnText(1, 0, 12)), '[{"name": "find"}]<e>'),
        (NO_SYSTEM, PrefixMark(TurnText(0, 0, 5), TurnText(1, 0, 12)), "<s>user "),
    ],
)
def test_prefix_ends_with_what_is_marked(source, mark, before):
    text, (end,) = rendered(source, CHAT, [mark])
    assert end == text.plain.index(before) + len(before)


@pytest.mark.parametrize(
    ("source", "mark"),
    [
        (FRAMES, PrefixMark(None, None)),
        (NO_SYSTEM, PrefixMark(TurnText(0, 0, 5), None)),
        (OUT_OF_ORDER, PrefixMark(None, TurnText(3, 0, 11))),  # nothing is before what follows
        ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", PrefixMark(TurnText(1, 0, 8), None)),
    ],
)
def test_where_it_does_not_show_the_whole_prompt_is_kept(source, mark):
    text, (end,) = rendered(source, CHAT, [mark])
    assert end == len(text)


def test_marks_are_told_apart():
    marks = [PrefixMark(TurnText(1, 0, 8), TurnText(2, 0, 6)), PrefixMark(None, TurnText(3, 0, 11))]
    text, ends = rendered(FRAMES, CHAT, marks)
    assert [text.plain[:end].rsplit(">", 1)[1] for end in ends] == ["user question", "user "]


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_any_text_that_shows_is_found_to_the_character(data):
    """Each character of the contents is its own, so that its place can be looked up."""
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=6))
    letters = iter(range(0x4E00, 0x9FFF))
    turns = turns_of(*("".join(chr(next(letters)) for _ in range(length)) for length in lengths))
    turn = data.draw(st.integers(0, len(lengths) - 1))
    begin = data.draw(st.integers(0, lengths[turn] - 1))
    end = data.draw(st.integers(begin + 1, lengths[turn]))
    following = TurnText(turn + 1, 0, lengths[turn + 1]) if turn + 1 < len(lengths) else None
    text, (found,) = rendered(FRAMES, turns, [PrefixMark(TurnText(turn, begin, end), following)])
    assert text.plain[found - 1] == turns[turn]["content"][end - 1]
