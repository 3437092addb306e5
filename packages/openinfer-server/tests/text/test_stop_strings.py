"""The stop scanner: whatever the cuts, the same text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from openinfer_server.text.stop_strings import StopScanner

LETTERS = st.text("ab", max_size=14)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def scan(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    scanner = StopScanner(stops)
    text = ""
    for piece in pieces:
        text += scanner.feed(piece)
        if scanner.found:
            return text, True
    return text + scanner.finish(), False


def expected(stops: list[str], text: str) -> tuple[str, bool]:
    """By definition: the first position at which a text ends with a stop string; of several there the longest."""
    for end in range(len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - max(map(len, matches))], True
    return text, False


@settings(max_examples=1000, deadline=None)
@given(STOPS, st.lists(LETTERS, max_size=8))
def test_any_cut_gives_the_text_before_the_first_stop(stops, pieces):
    assert scan(stops, pieces) == expected(stops, "".join(pieces))


@settings(max_examples=500, deadline=None)
@given(STOPS, st.lists(LETTERS, max_size=8))
def test_any_cut_gives_the_text_up_to_the_end_of_the_first_stop_if_it_is_shown(stops, pieces):
    scanner, whole = StopScanner(stops, shows_stop=True), "".join(pieces)
    text = "".join(scanner.feed(piece) for piece in pieces if not scanner.found)
    if not scanner.found:
        text += scanner.finish()
    before, found = expected(stops, whole)
    assert text == before + (scanner.matched or "")
    assert scanner.found is found
    assert whole.startswith(text)


@settings(max_examples=500, deadline=None)
@given(STOPS, st.lists(LETTERS, max_size=8))
def test_no_more_is_held_than_may_begin_a_stop(stops, pieces):
    scanner = StopScanner(stops)
    fed = shown = ""
    for piece in pieces:
        fed += piece
        shown += scanner.feed(piece)
        if scanner.found:
            return
        held = fed[len(shown) :]
        assert fed.startswith(shown)
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_single_characters_hold_nothing():
    scanner = StopScanner(["x"])
    assert [scanner.feed("ab"), scanner.feed("cxd"), scanner.found] == ["ab", "c", True]
