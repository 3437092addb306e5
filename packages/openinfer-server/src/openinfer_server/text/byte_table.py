"""Bytes of every token, and their JSON-escaped form, for the two kinds of decoders that give each token its own.

A byte-level token is a string over GPT-2's alphabet, in which each of the 256 bytes is one printable character.
`tokenizers`' ByteLevel decoder maps each character back; a token with any character outside the alphabet (an added
token with a space in it) stands for its own UTF-8. The table follows exactly that rule, so that joining entries and
decoding them with replacement gives the same text as `Tokenizer.decode`.

A SentencePiece token is text in which U+2581 stands for a space, or one byte: `<0xE9>`. Its decoder also strips a space
at the beginning of a text, which a completion, that goes on after a prompt, does not have.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class SentencePieces:
    """How a decoder of SentencePiece's kind makes text of tokens."""

    space: str
    has_bytes: bool
    strips_first_space: bool

    @classmethod
    def of(cls, decoder: object) -> "SentencePieces | None":
        """None for decoders of another kind."""
        described = _described(decoder)
        if described.get("type") == "Metaspace":
            return cls(
                described["replacement"], has_bytes=False, strips_first_space=described["prepend_scheme"] != "never"
            )
        if described.get("type") != "Sequence":
            return None
        parts = {part["type"]: part for part in described["decoders"]}
        replace, strip = parts.get("Replace", {}), parts.get("Strip")
        space = replace.get("pattern", {}).get("String")
        known = parts.keys() <= {"Replace", "ByteFallback", "Fuse", "Strip"} and len(parts) == len(
            described["decoders"]
        )
        strips = strip is not None and (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0)
        if not known or not space or replace["content"] != " " or "Fuse" not in parts or strips != (strip is not None):
            return None
        return cls(space, has_bytes="ByteFallback" in parts, strips_first_space=strips)

    def bytes_of(self, token: str) -> bytes:
        if self.has_bytes and _BYTE.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace(self.space, " ").encode()


_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


def _described(decoder: object) -> dict[str, Any]:
    if decoder is None:
        return {}
    return json.loads(decoder.__getstate__())  # pyright: ignore[reportArgumentType] - tokenizers' objects give JSON


def build_byte_table(
    tokenizer: tokenizers.Tokenizer, num_token_ids: int, pieces: SentencePieces | None = None
) -> ByteTable:
    """The table of a tokenizer whose decoder is ByteLevel, or of SentencePiece's kind."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    alphabet = byte_alphabet()
    raw = [b""] * max(num_token_ids, *(token_id + 1 for token_id in vocabulary.values()), 1)
    for token, token_id in vocabulary.items():
        raw[token_id] = token_bytes(token, alphabet) if pieces is None else pieces.bytes_of(token)
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
