"""Encoding in and off the loop, bounds known before encoding."""

import asyncio
import threading

import pytest
from tokenizers import AddedToken, normalizers

from openinfer_server import Tokenizer, UnusableTokenizer
from openinfer_server.testing import wait_until
from openinfer_server.text.tokenizer import INLINE_CHARACTERS


@pytest.fixture
def ours(tokenizer) -> Tokenizer:
    return Tokenizer(tokenizer, num_token_ids=tokenizer.get_vocab_size())


def test_short_and_long_texts_are_encoded_alike(ours, tokenizer):
    async def encode(text: str) -> list[int]:
        return await ours.encode(text, add_special_tokens=True)

    for text in ("", "stone", "stone 🙂 " * INLINE_CHARACTERS):
        assert asyncio.run(encode(text)) == tokenizer.encode(text).ids


def test_long_text_leaves_the_loop_running(ours):
    """The interpreter lock is free while a long text is encoded: another thread counts on."""
    text, before = "The capital of France is Paris. 東京 " * 15_000, set(threading.enumerate())

    async def encode() -> int:
        ticks = 0
        encoding = asyncio.ensure_future(ours.encode(text, add_special_tokens=False))
        while not encoding.done():
            await asyncio.sleep(0)
            ticks += 1
        await encoding
        return ticks

    assert asyncio.run(encode()) > 50
    ours.close()
    wait_until(lambda: before.issuperset(threading.enumerate()), "an end of the threads")


def test_least_tokens_never_exceeds_the_true_number(ours, tokenizer):
    for text in ("", "stone" * 50, "東京🙂" * 50, "<a token>" * 50, "e\u0301" * 50, " " * 500):
        assert ours.least_tokens(text) <= len(tokenizer.encode(text).ids)
    assert ours.least_tokens("x" * 100_000) > 0


def test_least_tokens_is_unknown_where_text_may_shrink(fallback_tokenizer, tokenizer):
    import tokenizers

    assert Tokenizer(fallback_tokenizer, num_token_ids=300).least_tokens("x" * 10**6) == 0
    shrinking = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    shrinking.normalizer = normalizers.Replace("x", "")
    assert Tokenizer(shrinking, num_token_ids=300).least_tokens("x" * 10**6) == 0
    swallowing = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    swallowing.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert Tokenizer(swallowing, num_token_ids=300).least_tokens(" " * 10**6) == 0


def test_id_that_the_tokenizer_lacks_has_no_bytes(ours, tokenizer, fallback_tokenizer):
    """A model with more ids than its tokenizer gives them probabilities, too, and may rank them highest."""
    for each in (ours, Tokenizer(fallback_tokenizer, num_token_ids=300)):
        for token_id in (tokenizer.get_vocab_size(), 10**6):
            assert each.token_bytes(token_id) == b""


def test_token_bytes_name_special_tokens(ours, tokenizer, fallback_tokenizer):
    assert ours.token_bytes(tokenizer.token_to_id("<|im_end|>")) == b"<|im_end|>"
    assert b"".join(ours.token_bytes(i) for i in tokenizer.encode("東京").ids) == "東京".encode()
    other = Tokenizer(fallback_tokenizer, num_token_ids=300)
    assert other.token_bytes(fallback_tokenizer.token_to_id("</s>")) == b"</s>"
    assert other.token_bytes(fallback_tokenizer.token_to_id("Paris")) == b"Paris"


def test_truncation_and_padding_of_the_file_are_turned_off(tokenizer):
    import tokenizers

    copy = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    copy.enable_truncation(3)
    copy.enable_padding(length=50)
    ours = Tokenizer(copy, num_token_ids=300)
    assert (
        asyncio.run(ours.encode("The capital of France", add_special_tokens=True))
        == tokenizer.encode("The capital of France").ids
    )


def test_missing_or_broken_tokenizer_says_so(tmp_path):
    with pytest.raises(UnusableTokenizer, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path, num_token_ids=1)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnusableTokenizer, match="cannot be read"):
        Tokenizer.load(tmp_path, num_token_ids=1)


@pytest.mark.parametrize(
    ("name", "shown", "hidden"), [("tokenizer", "<|im_start|>", "<|im_end|>"), ("fallback_tokenizer", "<s>", "</s>")]
)
def test_special_tokens_show_to_those_who_know_them(request, name, shown, hidden):
    given = request.getfixturevalue(name)
    ours = Tokenizer(given, num_token_ids=given.get_vocab_size())
    (letter,) = ours.encode_short("a")
    for visible, text in ((frozenset(), "aa"), (frozenset({shown, "<never>"}), f"a{shown}a")):
        detokenizer = ours.detokenizer([letter], visible=visible)
        said = (letter, given.token_to_id(shown), given.token_to_id(hidden), letter)
        pieces = [detokenizer.feed(token_id) for token_id in said]
        assert "".join([*pieces, detokenizer.finish()]) == text
