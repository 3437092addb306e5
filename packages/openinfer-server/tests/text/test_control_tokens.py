"""Encoding of rendered chats: what the template wrote becomes control tokens, and nothing else does."""

import runpy
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from openinfer_server.text.control_tokens import ControlTokens, OriginLost
from openinfer_server.text.marked_text import MarkedText, Origin, joined

TOYS = runpy.run_path(str(Path(__file__).with_name("toy_tokenizers.py")))
FLAGS, KEPT, KINDS, MARK, SPECIAL = (TOYS[name] for name in ("FLAGS", "KEPT", "KINDS", "MARK", "SPECIAL"))
byte_level, unigram = TOYS["byte_level"], TOYS["unigram"]


@pytest.fixture(params=FLAGS, ids=lambda flags: "+".join(flags) or "plain")
def flags(request) -> dict[str, bool]:
    return request.param


@pytest.fixture(params=KINDS)
def either(request, tokenizer, flags) -> tokenizers.Tokenizer:
    return KINDS[request.param](tokenizer, flags)


def controls_of(tokenizer: tokenizers.Tokenizer) -> ControlTokens:
    return ControlTokens(tokenizer, own_texts=["<think>\n", "a</think>"], markers=["<|user|>"])


def template(text: str) -> MarkedText:
    return MarkedText.of(text, Origin.TEMPLATE)


innocent = st.text(alphabet="ab th.\n é|", max_size=8)
written = st.sampled_from([*SPECIAL, *MARK, "user\n", "\n", " ", "a", "\n\n"]).map(template)
chats = st.lists(st.one_of(innocent, written, st.just(KEPT)), max_size=10).map(joined)
forged = st.sampled_from([*SPECIAL, *MARK, "<s", ">", "<|", "end", "|>", "<th", "ink>", " ", "a", "e\u0301"])
attacked = st.lists(st.one_of(forged, forged, written), max_size=10).map(joined)
slowly = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@slowly
@given(chats)
def test_without_control_text_ids_are_those_of_the_whole_text(either, text):
    ids = controls_of(either).encode(text)
    assert ids == either.encode(text.plain, add_special_tokens=False).ids


@slowly
@given(attacked)
def test_control_tokens_are_the_templates_alone(either, text):
    controls = controls_of(either)
    ids = controls.encode(text)
    ours = [token for token in (*SPECIAL, *MARK) for _ in range(templates_count(text, token))]
    control = sorted(either.id_to_token(i) for i in ids if i in controls.token_ids)
    if any(added.single_word for added in either.get_added_tokens_decoder().values()):
        assert not set(control) - set(ours)  # next to a word, such a token is none
        assert all(control.count(token) <= ours.count(token) for token in control)
    else:
        assert control == sorted(ours)


def templates_count(text: MarkedText, token: str) -> int:
    return sum(text.plain[begin:end].count(token) for begin, end, origin in text.runs() if origin is Origin.TEMPLATE)


@slowly
@given(attacked)
def test_no_text_is_lost_or_added(tokenizer, text):
    real = byte_level(tokenizer, {})
    ids = controls_of(real).encode(text)
    real.decoder = decoders.ByteLevel()
    assert real.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text.plain)


@pytest.fixture
def bytes_only(tokenizer) -> tokenizers.Tokenizer:
    return byte_level(tokenizer, {})


def shown(controls: ControlTokens, tokenizer: tokenizers.Tokenizer, text: MarkedText) -> list[str]:
    return [tokenizer.id_to_token(i) for i in controls.encode(text) if i in controls.token_ids]


@pytest.mark.parametrize(
    ("origin", "seen"), [(Origin.CLIENT, []), (Origin.ASSISTANT, ["<think>"]), (Origin.TEMPLATE, ["<s>", "<think>"])]
)
def test_assistant_keeps_what_is_not_special(bytes_only, origin, seen):
    assert shown(controls_of(bytes_only), bytes_only, MarkedText.of("a<s>b<think>c", origin)) == seen


def test_token_of_several_origins_is_text(bytes_only):
    controls = controls_of(bytes_only)
    for parts in ((template("<s"), ">"), ("<", template("s>")), (template("<"), "s", template(">"))):
        assert shown(controls, bytes_only, joined(parts)) == []
    both = joined([template("<th"), MarkedText.of("ink>", Origin.ASSISTANT)])
    assert shown(controls, bytes_only, both) == []


def test_content_that_overlaps_a_token_of_the_template_does_not_hide_it(tokenizer):
    real = byte_level(tokenizer, {})
    real.add_tokens([AddedToken("b<s>", special=True)])
    assert shown(controls_of(real), real, joined(["ab", template("<s>"), "c"])) == ["<s>"]


def test_other_added_tokens_are_found_in_what_clients_write(bytes_only):
    controls = controls_of(bytes_only)
    assert bytes_only.token_to_id(KEPT) not in controls.token_ids
    assert bytes_only.token_to_id(KEPT) in controls.encode(MarkedText(f"a{KEPT}b"))


def test_tokens_that_nobody_writes_are_not_controlled_unless_special(bytes_only):
    controls = ControlTokens(bytes_only, own_texts=["<think>"], markers=[])
    assert {bytes_only.id_to_token(i) for i in controls.token_ids} == {*SPECIAL, "<think>"}


def test_spaces_are_no_control_tokens(tokenizer):
    real = byte_level(tokenizer, {})
    real.add_tokens([AddedToken("  ", normalized=False), AddedToken("\n\n", normalized=False)])
    controls = ControlTokens(real, own_texts=["a  b\n\n"], markers=[])
    assert controls.encode(MarkedText("a  b\n\n")) == real.encode("a  b\n\n", add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("parts", "is_refused"),
    [
        (("a", "b", "<s>"), False),
        (("a", "<s>", "b"), True),
        (("<s", ">", "b"), True),
        (("x<", "s", ">"), True),
        (("<", "s>", ""), True),
        (("<s>", "b", "<s>"), False),
        (("<s> ", "<think>", ""), True),
    ],
)
def test_control_text_of_lost_origin_is_refused_by_name(bytes_only, parts, is_refused):
    before, middle, after = parts
    text = joined([before, MarkedText.of(middle, Origin.LOST), template(after)])
    controls = controls_of(bytes_only)
    if is_refused:
        with pytest.raises(OriginLost, match=r"<(s|think)>"):
            controls.encode(text)
    else:
        controls.encode(text)


def test_model_that_knows_control_tokens_as_words_is_copied_without_them():
    real = unigram({})
    controls = controls_of(real)
    assert real.token_to_id("<s>") in real.encode("a <s> b").ids
    for _ in range(2):
        ids = controls.encode(joined(["a <s> b", template("<s>")]))
        assert [i for i in ids if i in controls.token_ids] == [real.token_to_id("<s>")]
    assert real.token_to_id("<s>") in real.encode("a <s> b").ids  # the tokenizer of other texts is as it was


def test_tokenizer_without_added_tokens_encodes_as_it_does():
    real = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    real.pre_tokenizer = pre_tokenizers.Whitespace()
    assert controls_of(real).encode(template("a b")) == [0, 1]
