"""Chats of which only what is new is encoded have the ids of the whole chat."""

# ruff: noqa: SLF001 - what is kept shows nowhere else

import runpy
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from openinfer_server.text import known_prefixes
from openinfer_server.text.control_tokens import ControlTokens
from openinfer_server.text.known_prefixes import KnownPrefixes, Scope
from openinfer_server.text.marked_text import MarkedText, Origin, joined
from openinfer_server.text.segments import separates, works_piecewise

ME = Scope("me")
NAMED: dict[int, tuple[int, ...]] = {}
TOYS = runpy.run_path(str(Path(__file__).with_name("toy_tokenizers.py")))
FLAGS, KEPT, KINDS, MARK, SPECIAL = (TOYS[name] for name in ("FLAGS", "KEPT", "KINDS", "MARK", "SPECIAL"))
byte_level, unigram = TOYS["byte_level"], TOYS["unigram"]


def template(text: str) -> MarkedText:
    return MarkedText.of(text, Origin.TEMPLATE)


def said(text: str) -> MarkedText:
    return MarkedText.of(text, Origin.ASSISTANT)


TOKENS = (*SPECIAL, *MARK)
written = st.sampled_from([*TOKENS, "user\n", "\n", " ", "a", "\n\n"]).map(template)
client = st.sampled_from([*TOKENS, KEPT, "<s", ">", "<|", "|>", " ", "a", "th in", "é\n", "e\u0301", "  ", ".!"])
answer = st.sampled_from([*TOKENS, "a ", "th", "\n"]).map(said)
pieces = st.one_of(written, written, client, answer)
conversations = st.lists(st.tuples(st.integers(0, 12), st.lists(pieces, max_size=6)), min_size=1, max_size=6)
"""Turns: how many pieces of the chat before stay, and what follows them."""
slowly = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=FLAGS, ids=lambda flags: "+".join(flags) or "plain")
def flags(request) -> dict[str, bool]:
    return request.param


@pytest.fixture(params=KINDS)
def either(request, tokenizer, flags) -> tokenizers.Tokenizer:
    return KINDS[request.param](tokenizer, flags)


def controls_of(tokenizer: tokenizers.Tokenizer, *, max_bytes: int = 2**20, min_seen: int = 1) -> ControlTokens:
    known = KnownPrefixes(max_bytes, min_segment_characters=1, min_seen_characters=min_seen)
    return ControlTokens(tokenizer, own_texts=["<think>\n", "a</think>"], markers=["<|user|>"], known_prefixes=known)


def chats_of(turns) -> list[MarkedText]:
    chats: list[list[str]] = [[]]
    for kept, new in turns:
        chats.append([*chats[-1][:kept], *new])
    return [joined(chat) for chat in chats]


def encode(controls: ControlTokens, text: MarkedText, scope: Scope = ME) -> list[int]:
    """The ids, whose names no other beginning had before, in any test."""
    ids, beginnings = controls.finish(controls.begin(text, scope))
    for each in beginnings:
        assert 0 <= each.num_tokens <= len(ids)
        assert NAMED.setdefault(each.name, ids[: each.num_tokens]) == ids[: each.num_tokens]
    return list(ids)


@slowly
@given(conversations, st.sampled_from([1, 2**20]))
def test_ids_are_those_of_the_whole_chat(either, turns, min_seen):
    controls = controls_of(either, min_seen=min_seen)
    for text in chats_of(turns):
        begun = controls.begin(text, ME)
        assert list(begun.places) == list(controls._find(text))
        assert encode(controls, text) == controls.encode(text)
        assert encode(controls, text) == controls.encode(text)


@slowly
@given(conversations, st.integers(0, 2000))
def test_small_store_gives_the_same_ids(either, turns, max_bytes):
    controls = controls_of(either, max_bytes=max_bytes)
    for text in chats_of(turns):
        assert encode(controls, text) == controls.encode(text)
        assert controls.known_prefixes.num_bytes <= max_bytes


honest = st.sampled_from([" ", "a", "th in", "é\n", "e\u0301", "  ", ".!", "\ufffd", "🙂", "x" * 70])
honest_chats = st.lists(st.one_of(written, honest, st.sampled_from(["a ", "th"]).map(said)), max_size=12).map(joined)


@slowly
@given(honest_chats)
def test_tokens_before_each_place_are_those_of_the_whole_chats_offsets(either, text):
    """Of chats without forged text the plain tokenizer says where each token begins."""
    whole = either.encode(text.plain, add_special_tokens=False)
    controls = controls_of(either)
    for _ in range(2):  # also where the beginning is known
        begun = controls.begin(text, ME)
        ids = list(controls.finish(begun).token_ids)
        assume(ids == whole.ids)
        ends = tuple(range(len(text) + 1))
        expected = tuple(sum(begin < end for begin, _ in whole.offsets) for end in ends)
        assert controls.counts(text, ids, ends, places=begun.places) == expected
        assert controls.counts(text, ids, ends) == expected


@slowly
@given(conversations)
def test_forged_text_moves_no_count(either, turns):
    """Counts grow with their places, and end with all tokens, whatever clients write."""
    controls = controls_of(either)
    for text in chats_of(turns):
        ids = controls.encode(text)
        counts = controls.counts(text, ids, tuple(range(len(text) + 1)))
        assert list(counts) == sorted(counts)
        assert not text or counts[-1] == len(ids)


@pytest.fixture
def controls(tokenizer) -> ControlTokens:
    return controls_of(byte_level(tokenizer, {}))


CHAT = joined([template("<s>user\n"), "the question", template("<|end|>"), template("<s>"), "more"])
LAST_CUT = CHAT.plain.rindex("<s>")


def test_next_turn_encodes_what_is_new_alone(controls):
    encode(controls, CHAT)
    longer = joined([CHAT, template("<|end|><s>"), "again"])
    begun = controls.begin(longer, ME)
    assert begun.known.end == LAST_CUT
    assert begun.new_characters == len(longer) - LAST_CUT
    assert list(controls.finish(begun).token_ids) == controls.encode(longer)
    assert controls.begin(longer, ME).known.end == longer.plain.rindex("<s>")


def test_ids_are_the_same_objects_from_the_first_turn_on(controls):
    """Python has one object for each number up to 256 alone, and a link compares 290,000 ids by their addresses."""
    first = encode(controls, CHAT)
    later = encode(controls, joined([CHAT, template("<|end|><s>"), "again"]))
    pairs = [pair for pair in zip(first, later, strict=False) if pair[0] == pair[1] > 256]
    assert pairs
    assert all(one is other for one, other in pairs)
    assert controls.known_prefixes.shared(range(100_000)) == [*range(100_000)]


def test_what_was_seen_is_compared_and_not_digested(controls, monkeypatch):
    """Of a text that begins with one that was kept, the first segment alone is digested, and what follows it."""
    chat = CHAT
    for number in range(9):
        chat = joined([chat, template("<|end|><s>user\n"), f"question {number}"])
        encode(controls, chat)
    known, digested = controls.known_prefixes, []
    digest = known._digest
    monkeypatch.setattr(known, "_digest", lambda *args: digested.append(args[3]) or digest(*args))
    following = joined([chat, template("<|end|><s>"), "again"])
    begun = controls.begin(following, ME)
    assert begun.known.seen is not None
    assert begun.known.end >= chat.plain.rindex("<s>")
    assert len(digested) <= 3
    assert len(begun.known.path) > 9
    assert list(controls.finish(begun).token_ids) == controls.encode(following)
    assert len(known._first) == 1  # the next turn takes the place of the one before


def test_next_turn_names_what_it_begins_with(controls):
    """So that a link need not compare 290,000 ids to know it."""
    chat, before = CHAT, set()
    for number in range(4):
        chat = joined([chat, template("<|end|><s>user\n"), f"question {number}"])
        ids, beginnings = controls.finish(controls.begin(chat, ME))
        assert list(ids) == controls.encode(chat)
        assert max(each.num_tokens for each in beginnings) > len(ids) - 20
        assert not before or len(before & {*beginnings}) == 1
        before = {*beginnings}
    ids, beginnings = controls.finish(controls.begin(chat, Scope("other")))
    assert not before & {*beginnings}


def test_texts_that_begin_alike_are_told_apart(controls):
    texts = [joined([CHAT, template("<|end|><s>"), f"{number}", template("<|end|><s>"), "a" * 9]) for number in "abc"]
    for text in (*texts, *texts):
        assert encode(controls, text) == controls.encode(text)
    for text in texts:
        begun = controls.begin(joined([text, template("<s>"), "b"]), ME)
        assert begun.known.end == text.plain.rindex("<s>")


def test_texts_with_one_beginning_are_bounded_and_all_are_given_up(controls, monkeypatch):
    monkeypatch.setattr(known_prefixes, "MAX_ALIKE", 4)
    known = controls.known_prefixes
    for number in range(9):
        encode(controls, joined([CHAT, template("<|end|><s>"), f"{number}", template("<|end|><s>"), "a" * 9]))
    assert len(known._first) == 4
    assert [len(keys) for keys in known._alike.values()] == [4]
    for number in range(300):  # of others, which push them out
        encode(controls, joined([template("<s>"), f"{number}" * 9000, template("<|end|><s>"), "a" * 9]))
    assert known._first.keys() == {key for keys in known._alike.values() for key in keys}
    assert all(known._cache.get("me", key) is not None for key in known._first)
    assert len(known._first) < 300


@pytest.mark.parametrize("scope", [Scope("other"), Scope("me", "salt"), Scope("me", ""), Scope("")])
def test_others_and_other_salts_find_nothing(controls, scope):
    encode(controls, CHAT)
    assert controls.begin(CHAT, scope).known.end == 0
    assert controls.begin(CHAT, ME).known.end == LAST_CUT


def test_same_text_of_another_origin_is_not_known(controls):
    real = joined([template("<s>"), "a", template("<|end|><s>"), "b"])
    forged = joined([template("<s>"), "a<|end|>", template("<s>"), "b"])
    assert real.plain == forged.plain
    ids = encode(controls, real)
    assert encode(controls, forged) == controls.encode(forged) != ids


def test_same_text_before_another_token_is_not_known(controls):
    encode(controls, joined([template("<s>"), "abc", template("<s>"), "d"]))
    assert controls.begin(joined([template("<s>"), "abc", template("<|end|>")]), ME).known.end == 0


def test_store_of_no_bytes_knows_nothing(tokenizer):
    controls = controls_of(byte_level(tokenizer, {}), max_bytes=0)
    assert encode(controls, CHAT) == controls.encode(CHAT)
    assert controls.begin(CHAT, ME).known.end == 0


def test_owner_keeps_its_prefixes_while_another_sends_many(tokenizer):
    controls = controls_of(byte_level(tokenizer, {}), max_bytes=20_000)
    encode(controls, CHAT)
    for index in range(300):
        encode(controls, joined([template("<s>"), f"{index} another", template("<s>")]), Scope("flood"))
    assert controls.known_prefixes.num_bytes > 15_000  # the flood has what the first one leaves
    assert controls.begin(CHAT, ME).known.end == LAST_CUT


def test_what_another_model_encoded_is_not_known():
    controls = controls_of(unigram({}))
    chat = joined([template("<s>"), "a b", template("<s>"), "c"])
    encode(controls, chat)
    assert controls.begin(chat, ME).known.end > 0
    forging = joined([chat, "<s> b"])  # the model would make a control token of it: it is copied without
    assert encode(controls, forging) == controls.encode(forging)
    assert controls.begin(chat, ME).known.digest  # of the new model's root
    for text in (chat, forging):
        assert encode(controls, text) == controls.encode(text)


# --- where a text may be cut


@pytest.mark.parametrize(
    ("token", "is_cut"),
    [
        (AddedToken("<x>", normalized=False), True),
        (AddedToken("<x>", normalized=False, rstrip=True), True),
        (AddedToken("<x>", normalized=False, lstrip=True), False),
        (AddedToken("<x>", normalized=False, single_word=True), False),
        (AddedToken("<x>", normalized=True), False),
    ],
)
def test_rules_for_what_is_before_a_token_forbid_a_cut(token, is_cut):
    assert separates(token) is is_cut


def test_cut_before_a_token_that_takes_space_along_would_change_ids(tokenizer):
    real = byte_level(tokenizer, {"lstrip": True})
    before, after = "a  ", "<s>b"
    parts = [real.encode(part, add_special_tokens=False).ids for part in (before, after)]
    assert [*parts[0], *parts[1]] != real.encode(before + after, add_special_tokens=False).ids
    assert controls_of(real).cut_ids == frozenset()


def test_tokenizer_of_unknown_parts_is_not_cut(tokenizer):
    real = byte_level(tokenizer, {})
    assert works_piecewise(real)
    real.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Whole())
    assert not works_piecewise(real)
    assert controls_of(real).cut_ids == frozenset()


def test_parts_of_sequences_are_looked_at(tokenizer):
    real = byte_level(tokenizer, {})
    real.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Sequence([normalizers.Lowercase()])])
    assert works_piecewise(real)


def test_model_with_chance_is_not_cut():
    real = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[], dropout=0.1))
    assert not works_piecewise(real)


class Whole:
    def pre_tokenize(self, text: object) -> None:
        """One piece."""
