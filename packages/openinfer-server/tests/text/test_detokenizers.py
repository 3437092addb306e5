"""Token by token and at once give the same text, for every vocabulary and every cut."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

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


SPACE = "▁"
WORDS = [
    "<s>",
    "<0xF0>",
    "<0x9F>",
    "<0x99>",
    "<0x82>",
    "<0xC3>",
    "<0xA9>",
    f"{SPACE}the",
    f"{SPACE}",
    "a",
    f"{SPACE}{SPACE}x",
]
REPLACE = decoders.Replace(SPACE, " ")
DECODERS = {
    "Llama 2": decoders.Sequence([REPLACE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    "Gemma": decoders.Sequence([REPLACE, decoders.ByteFallback(), decoders.Fuse()]),
    "Metaspace": decoders.Metaspace(SPACE, "always"),
    "Metaspace, no prefix": decoders.Metaspace(SPACE, "never"),
}


def with_decoder(decoder: object) -> Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, [], byte_fallback=True))
    inner.add_special_tokens(["<s>"])
    inner.decoder = decoder
    return Tokenizer(inner, num_token_ids=len(WORDS))


@pytest.mark.parametrize("name", DECODERS)
def test_sentencepiece_tokens_after_hidden_ones_keep_their_space(name: str) -> None:
    tokenizer = with_decoder(DECODERS[name])
    ids = [WORDS.index(word) for word in ("a", "<s>", f"{SPACE}the", "<s>", f"{SPACE}", f"{SPACE}{SPACE}x", "<s>", "a")]
    assert "".join(shown(tokenizer.detokenizer([WORDS.index("a")]), ids)[0]) == "a the   xa"
    assert tokenizer.token_bytes(WORDS.index(f"{SPACE}the")) == b" the"


@pytest.mark.parametrize("name", ["Llama 2", "Gemma"])
def test_sentencepiece_characters_in_bytes_are_never_cut(name: str) -> None:
    tokenizer = with_decoder(DECODERS[name])
    ids = [
        WORDS.index(word) for word in ("<0xF0>", "<0x9F>", "<s>", "<0x99>", "<0x82>", "<0xC3>", "a", "<0xC3>", "<0xA9>")
    ]
    pieces, rest = shown(tokenizer.detokenizer([WORDS.index("a")]), ids)
    assert (pieces, rest) == (["", "", "", "", "🙂", "", f"{REPLACEMENT}a", "", "é"], "")


@pytest.mark.parametrize(("name", "text"), [("Llama 2", "the"), ("Gemma", " the"), ("Metaspace", "the")])
def test_sentencepiece_first_space_is_stripped_where_the_prompt_shows_nothing(name: str, text: str) -> None:
    tokenizer = with_decoder(DECODERS[name])
    assert "".join(shown(tokenizer.detokenizer([0]), [0, WORDS.index(f"{SPACE}the")])[0]) == text


@pytest.mark.parametrize("name", DECODERS)
def test_sentencepiece_any_tokens_equal_the_whole_decoded(name: str) -> None:
    tokenizer = with_decoder(DECODERS[name])
    characters = [[WORDS.index(word)] for word in ("<s>", f"{SPACE}the", SPACE, "a")]
    if not name.startswith("Metaspace"):  # which has no bytes, and strips all spaces of a first token
        characters += [[WORDS.index(f"<0x{byte:02X}>") for byte in "🙂".encode()], [len(WORDS) - 1]]

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.sampled_from(characters), max_size=20))
    def check(parts: list[list[int]]) -> None:
        ids = [token_id for part in parts for token_id in part]
        pieces, rest = shown(tokenizer.detokenizer([]), ids)
        assert "".join(pieces) + rest == tokenizer.decode_prompt([token_id for token_id in ids if token_id])

    check()


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Fuse(),
        decoders.Sequence([REPLACE, decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
        decoders.Sequence([decoders.Replace("x", "y"), decoders.Fuse()]),
        decoders.Sequence([REPLACE, REPLACE, decoders.Fuse()]),
    ],
)
def test_other_decoders_are_asked_for_windows_of_tokens(decoder: object) -> None:
    tokenizer = with_decoder(decoder)
    assert tokenizer.table is None
    ids = [WORDS.index(word) for word in ("a", f"{SPACE}the", "a")]
    pieces, rest = shown(tokenizer.detokenizer([]), ids)
    assert "".join(pieces) + rest == tokenizer.decode_prompt(ids)
