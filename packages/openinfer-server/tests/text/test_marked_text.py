"""Texts that carry the origin of each character through what templates do with texts."""

import itertools
import operator
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from openinfer_server.text import marked_text
from openinfer_server.text.marked_text import (
    CARRIED,
    FLAGS,
    LostMarkup,
    MarkedText,
    Origin,
    formatted,
    holds_marks,
    joined,
    lost,
    origins_of,
    percent_formatted,
    text_of,
)

ALPHABETS = {  # which letter is whose: origins can be read off any result
    Origin.CLIENT: "abß1 \n",
    Origin.TEMPLATE: "xy.ﬀ-\t",
    Origin.ASSISTANT: "mn,\r|",
}
CLASSES = {letter: origin for origin, letters in ALPHABETS.items() for letter in letters}
OTHER_CASES = {"s": Origin.CLIENT, "f": Origin.TEMPLATE}  # what `ß` and `ﬀ` become


def origin_of(letter: str) -> Origin:
    return (CLASSES | OTHER_CASES)[letter if letter in CLASSES else letter.lower()]


letters = st.sampled_from(sorted(CLASSES))
texts = st.lists(letters, max_size=12).map("".join)
seps = st.one_of(st.none(), st.lists(letters, min_size=1, max_size=2).map("".join))
counts = st.integers(-1, 3)


def marked(text: str) -> MarkedText:
    return MarkedText(text, bytes(map(origin_of, text)))


def check(result: object, expected: object) -> None:
    """Both are the same, and each character has its letter's origin or, of all, a lost one."""
    if isinstance(expected, list | tuple):
        assert len(result) == len(expected)
        for each, other in zip(result, expected, strict=True):
            check(each, other)
        return
    assert isinstance(result, MarkedText)
    assert (result.plain, len(result.origins)) == (expected, len(expected))
    if Origin.LOST not in result.origins:
        assert list(result.origins) == [origin_of(letter) for letter in expected]


@given(texts, seps, counts)
def test_cutting_carries_origins(text, sep, count):
    for name in ("strip", "lstrip", "rstrip"):
        check(getattr(marked(text), name)(sep), getattr(text, name)(sep))
    for name in ("split", "rsplit"):
        check(getattr(marked(text), name)(sep, count), getattr(text, name)(sep, count))
    check(marked(text).splitlines(), text.splitlines())
    check(marked(text).splitlines(keepends=True), text.splitlines(keepends=True))
    if sep is not None:
        for name in ("partition", "rpartition", "removeprefix", "removesuffix"):
            check(getattr(marked(text), name)(sep), getattr(text, name)(sep))


@given(texts, st.slices(12), st.integers(0, 3))
def test_slices_and_products_carry_origins(text, cut, times):
    check(marked(text)[cut], text[cut])
    check(marked(text) * times, text * times)
    check(times * marked(text), times * text)
    check([*marked(text)], [*text])
    check(list(reversed(marked(text))), list(reversed(text)))
    if text:
        check(marked(text)[-1], text[-1])


@given(texts, texts, st.lists(texts, max_size=4), seps, counts)
def test_putting_together_carries_origins(text, other, several, sep, count):
    client = "".join(each for each in other if origin_of(each) is Origin.CLIENT)
    check(marked(text) + marked(other), text + other)
    check(marked(text) + client, text + client)
    check(client + marked(text), client + text)
    check(joined([marked(text), client]), text + client)
    check(marked(text).join(map(marked, several)), text.join(several))
    if sep is not None:
        check(marked(text).replace(sep, marked(other), count), text.replace(sep, other, count))


@given(texts)
def test_other_cases_carry_origins(text):
    for name in ("upper", "lower", "casefold", "swapcase", "title", "capitalize"):
        result = getattr(marked(text), name)()
        check(result, getattr(text, name)())
        if len(result) == len(text) or len(set(map(origin_of, text))) == 1:
            assert Origin.LOST not in result.origins


@given(texts, texts, texts)
def test_formats_carry_origins(text, first, second):
    values = (marked(first), marked(second))
    result = percent_formatted(joined([marked(text), "%s", marked(text), "%s"]), values)
    check(result, f"{text}{first}{text}{second}")
    assert Origin.LOST not in result.origins
    named = percent_formatted(joined([marked(text), "%(a)s"]), {"a": values[0]})
    check(named, f"{text}{first}")
    numbers = MarkedText.of("x%%y%d", Origin.TEMPLATE) % 1
    assert (numbers.plain, numbers.origins) == ("x%y1", bytes((1, 1, 1, 0)))
    braces = MarkedText.of("x{}y{0}", Origin.TEMPLATE)
    fields = list(string.Formatter().parse("x{}y{}"))
    result = formatted(braces, f"x{first}y{second}", fields, lambda name: values[int(name)])
    check(result, f"x{first}y{second}")
    assert Origin.LOST not in result.origins


@pytest.mark.parametrize(
    ("pattern", "values"), [("%5s", ("x",)), ("%r", ("x",)), ("%x", 17), ("-%c", 120), ("%.1s", ("xy",))]
)
def test_other_conversions_lose_origins_for_all_to_see(pattern, values):
    template = MarkedText.of(pattern, Origin.TEMPLATE)
    result = template % values
    assert result.plain == pattern % values
    assert set(result.origins) == {Origin.LOST}
    assert not holds_marks(percent_formatted(pattern, values))


def test_replacing_nothing_loses_origins():
    assert set(MarkedText.of("xy", Origin.TEMPLATE).replace("", "a").origins) == {Origin.LOST}


def test_every_method_that_gives_texts_is_carried_or_known_to_be_lost():
    given_back = {"expandtabs": (), "zfill": (9,), "center": (9,), "ljust": (9,), "rjust": (9,), "translate": ({},)}
    arguments = {
        **dict.fromkeys(("removeprefix", "removesuffix", "partition", "rpartition"), ("x",)),
        "replace": ("x", "y"),
        "join": (["x"],),
    }
    texts_only = {
        name
        for name in dir(str)
        if not name.startswith("_") and name not in ("format", "format_map", "maketrans", "encode")
        if isinstance(_first(getattr("x y", name), given_back.get(name, arguments.get(name, ()))), str)
    }
    assert texts_only - set(given_back) == CARRIED


def _first(method, arguments) -> object:
    try:
        result = method(*arguments)
    except TypeError:
        return None
    return result[0] if isinstance(result, list | tuple) and result else result


def test_lost_is_said_only_where_there_was_something_to_lose():
    template = MarkedText.of("x", Origin.TEMPLATE)
    assert lost("a", "b", MarkedText("c")) == "a"
    assert type(lost("a", "b", MarkedText("c"))) is str
    assert lost(["a"], template) == ["a"]
    for source in (template, [template], {"a": (template,)}, {template: 1}, LostMarkup("x")):
        assert set(origins_of(lost("a", source))) == {Origin.LOST}
    assert isinstance(lost(Markup("a"), template), LostMarkup)
    assert set(origins_of(LostMarkup("a") + "b")) == {Origin.LOST}


def test_values_become_texts_as_python_writes_them():
    template = MarkedText.of("x", Origin.TEMPLATE)
    assert text_of(template) is template
    for value in (1, 2.5, None, True, [1, "a"], {"a": (1,)}):
        assert (type(text_of(value)), text_of(value)) == (str, str(value))
    assert set(origins_of(text_of(["a", template]))) == {Origin.LOST}
    assert set(origins_of(text_of(object()))) == {Origin.LOST}
    assert set(origins_of(text_of(LostMarkup("a")))) == {Origin.LOST}
    assert text_of([LostMarkup("a")]) == str([Markup("a")])


def test_runs_tell_stretches_of_one_origin():
    text = MarkedText("abxymm", bytes((0, 0, 1, 1, 2, 2)))
    assert list(text.runs()) == [(0, 2, Origin.CLIENT), (2, 4, Origin.TEMPLATE), (4, 6, Origin.ASSISTANT)]
    assert (hash(text), text, {text: 1}["abxymm"]) == (hash("abxymm"), "abxymm", 1)


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 8), st.integers(0, 30), st.data())
def test_runs_are_the_same_in_pieces_of_any_size(origins, piece, first, data):
    flags = data.draw(st.lists(st.sampled_from((0, *FLAGS)), min_size=len(origins), max_size=len(origins)))
    text = MarkedText("a" * len(origins), bytes(map(operator.or_, origins, flags)))
    expected, begin = [], first
    for origin, run in itertools.groupby(origins[first:]):
        end = begin + len(list(run))
        expected.append((begin, end, Origin(origin)))
        begin = end
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(marked_text, "_PIECE", piece)
        assert list(text.runs(first)) == expected


def test_plain_text_is_one_object():
    for each in ("abc", LostMarkup("abc"), MarkedText("abc")):
        text = MarkedText(each)
        assert (type(text.plain), text.plain) == (str, "abc")
        assert text.plain is text.plain
