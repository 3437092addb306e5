"""The byte table against `tokenizers`' own decoder."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import openinfer_tiny_model
from openinfer_core.tokenizer_files import byte_alphabet
from openinfer_server.text.byte_table import build_byte_table, escape_json, token_bytes
from openinfer_server.text.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=["own", "tiny"])
def any_tokenizer(request, tokenizer) -> tokenizers.Tokenizer:
    if request.param == "own":
        return tokenizer
    return tokenizers.Tokenizer.from_file(str(openinfer_tiny_model.model_dir() / "tokenizer.json"))


def test_alphabet_has_each_byte_once():
    assert sorted(byte_alphabet().values()) == list(range(256))
    assert set(byte_alphabet()) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def test_each_token_alone_decodes_as_tokenizers_does(any_tokenizer):
    size = any_tokenizer.get_vocab_size()
    table = build_byte_table(any_tokenizer, size)
    assert len(table.raw) == size
    for token_id in range(size):
        assert table.raw[token_id].decode(errors="replace") == any_tokenizer.decode([token_id]), token_id


def test_any_tokens_decode_as_tokenizers_does(any_tokenizer):
    table = build_byte_table(any_tokenizer, 0)

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.integers(0, any_tokenizer.get_vocab_size() - 1), max_size=30))
    def check(ids: list[int]) -> None:
        joined = b"".join(table.raw[token_id] for token_id in ids)
        assert joined.decode(errors="replace") == any_tokenizer.decode(ids)

    check()


def test_escaped_tokens_are_their_text_inside_json(any_tokenizer):
    table = build_byte_table(any_tokenizer, 0)
    for raw, escaped in zip(table.raw, table.escaped, strict=True):
        if escaped is None:
            with pytest.raises(UnicodeDecodeError):
                raw.decode()
        else:
            assert json.loads(b'"' + escaped + b'"') == raw.decode()
            assert b"\n" not in escaped  # an event's data is one line


def test_ids_without_a_token_are_empty(tokenizer):
    table = build_byte_table(tokenizer, 1000)
    assert (len(table.raw), table.raw[999], table.escaped[999]) == (1000, b"", b"")


def test_special_tokens_are_hidden_and_added_ones_shown(tokenizer):
    table = build_byte_table(tokenizer, 0)
    assert table.raw[tokenizer.token_to_id("<|im_end|>")] == b""
    assert table.raw[tokenizer.token_to_id("<think>")] == b"<think>"
    assert table.raw[tokenizer.token_to_id("<a token>")] == b"<a token>"


def test_token_outside_the_alphabet_is_its_own_text():
    assert token_bytes("Ġé", byte_alphabet()) == b" \xe9"
    assert token_bytes("東", byte_alphabet()) == "東".encode()


@given(st.text())
def test_escape_json_is_undone_by_json(text):
    assert json.loads(b'"' + escape_json(text) + b'"') == text


def test_other_decoders_have_no_table(fallback_tokenizer):
    assert Tokenizer(fallback_tokenizer, num_token_ids=300).byte_table is None


def test_tiny_model_has_a_table():
    folder: Path = openinfer_tiny_model.model_dir()
    assert Tokenizer.load(folder, num_token_ids=2040).byte_table is not None
