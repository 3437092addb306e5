"""Token by token and at once give the same text, for every vocabulary and every cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openinfer_server.text.detokenizers import REPLACEMENT, ByteDetokenizer
from openinfer_server.text.tokenizer import Tokenizer

TEXTS = ["naïve café 鬱 🙂", "👩‍👩‍👧‍👦👩‍👩‍👧‍👦", "Привет — мир", "a\u0301\U0001f1eb\U0001f1f7 x"]


def shown(detokenizer, ids: list[int]) -> tuple[list[str], str]:
    return [detokenizer.feed(token_id) for token_id in ids], detokenizer.finish()


@pytest.fixture(scope="module")
def byte_level(tokenizer) -> Tokenizer:
    return Tokenizer(tokenizer, num_token_ids=tokenizer.get_vocab_size())


@pytest.fixture(scope="module")
def fallback(fallback_tokenizer) -> Tokenizer:
    return Tokenizer(fallback_tokenizer, num_token_ids=fallback_tokenizer.get_vocab_size())


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_text_comes_back_and_no_piece_has_half_characters(byte_level, tokenizer, text):
    pieces, rest = shown(byte_level.detokenizer([]), tokenizer.encode(text).ids)
    assert ("".join(pieces), rest) == (text, "")
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert "" in pieces  # some character needed several tokens


def test_byte_level_any_tokens_equal_the_whole_decoded(byte_level, tokenizer):
    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=40))
    def check(ids: list[int]) -> None:
        pieces, rest = shown(byte_level.detokenizer([]), ids)
        assert "".join(pieces) + rest == tokenizer.decode(ids)

    check()


def test_byte_level_unfinished_character_is_replaced_at_the_end():
    detokenizer = ByteDetokenizer([b"\xe6", b"\x9d", b"x"])
    assert [detokenizer.feed(0), detokenizer.feed(1), detokenizer.pending] == ["", "", True]
    assert (detokenizer.finish(), detokenizer.pending) == (REPLACEMENT, False)


@pytest.mark.parametrize("text", [*TEXTS, "the stone is Paris.", "é東 é"])
def test_fallback_text_comes_back_after_a_prompt(fallback, fallback_tokenizer, text):
    words = text.replace(" ", "▁")
    ids = fallback_tokenizer.encode(words).ids
    pieces, rest = shown(fallback.detokenizer(fallback_tokenizer.encode("▁the").ids), ids)
    assert "".join(pieces) + rest == text
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_fallback_first_space_is_kept_after_a_prompt_and_stripped_without(fallback, fallback_tokenizer):
    ids = fallback_tokenizer.encode("▁the▁stone").ids
    assert "".join(shown(fallback.detokenizer(ids), ids)[0]) == " the stone"
    assert "".join(shown(fallback.detokenizer([]), ids)[0]) == "the stone"


def test_fallback_whole_characters_equal_the_whole_decoded(fallback, fallback_tokenizer):
    @settings(max_examples=200, deadline=None)
    @given(st.text(st.sampled_from("abc é▁東🙂."), max_size=30))
    def check(text: str) -> None:
        ids = fallback_tokenizer.encode(text).ids
        pieces, rest = shown(fallback.detokenizer([]), ids)
        assert "".join(pieces) + rest == fallback_tokenizer.decode(ids)

    check()


def test_fallback_bytes_that_never_become_a_character_are_not_held_for_ever(fallback, fallback_tokenizer):
    broken = fallback_tokenizer.token_to_id("<0xFF>")
    pieces, rest = shown(fallback.detokenizer([]), [broken] * 100)
    assert "".join(pieces).count(REPLACEMENT) >= 90
    assert "".join(pieces) + rest == REPLACEMENT * 100
