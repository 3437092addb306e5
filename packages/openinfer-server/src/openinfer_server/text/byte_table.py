"""Bytes of every token of a byte-level BPE tokenizer, and their JSON-escaped form.

A byte-level token is a string over GPT-2's alphabet, in which each of the 256 bytes is one printable character.
`tokenizers`' ByteLevel decoder maps each character back; a token with any character outside the alphabet (an added
token with a space in it) stands for its own UTF-8. The table follows exactly that rule, so that joining entries and
decoding them with replacement gives the same text as `Tokenizer.decode`.
"""

from dataclasses import dataclass

import msgspec
import tokenizers

from openinfer_core.tokenizer_files import byte_alphabet


@dataclass(frozen=True, slots=True)
class ByteTable:
    """What each token id contributes to the output."""

    raw: list[bytes]  # per token id its bytes; empty for special tokens, which never show, and for ids without a token
    # Per token id its text as the inside of a JSON string; None where the bytes are not whole UTF-8.
    escaped: list[bytes | None]

    def cover(self, num_token_ids: int) -> None:
        """Adds entries for ids without a token, so that every id below `num_token_ids` has one."""
        missing = num_token_ids - len(self.raw)
        self.raw.extend([b""] * missing)
        self.escaped.extend([b""] * missing)


def token_bytes(token: str, alphabet: dict[str, int]) -> bytes:
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode()


def build_byte_table(tokenizer: tokenizers.Tokenizer, num_token_ids: int) -> ByteTable:
    """The table of a tokenizer whose decoder is ByteLevel."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    alphabet = byte_alphabet()
    raw = [b""] * max(num_token_ids, *(token_id + 1 for token_id in vocabulary.values()), 1)
    for token, token_id in vocabulary.items():
        raw[token_id] = token_bytes(token, alphabet)
    for token_id, added in tokenizer.get_added_tokens_decoder().items():
        if added.special:
            raw[token_id] = b""
    return ByteTable(raw=raw, escaped=[_escape(data) for data in raw])


def _escape(data: bytes) -> bytes | None:
    try:
        return escape_json(data.decode())
    except UnicodeDecodeError:
        return None


def escape_json(text: str) -> bytes:
    return msgspec.json.encode(text)[1:-1]
