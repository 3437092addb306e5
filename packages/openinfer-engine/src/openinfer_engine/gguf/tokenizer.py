"""The tokenizer of a GGUF file as a `tokenizer.json`: byte-level BPE, or SentencePiece's with scores.

A vocabulary does not say how text is split before it: `tokenizer.ggml.pre` names one of llama.cpp's ways, and one that
is not in the table here is refused, as any other would give other tokens in silence.
https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from openinfer_core import InvalidCheckpoint, Refused

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type
_SPACE = "\u2581"
_MAX_TOKENS = 1 << 21

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pre:
    """How text is split before byte-level BPE."""

    pattern: str | None = None
    """What a piece is; None: GPT-2's, which is the ByteLevel pre-tokenizer's own."""
    each_digit: bool = False
    normalizer: str | None = None
    whole_pieces: bool = False
    """A piece that is a token is that token, whatever the merges say."""
    begins_with_bos: bool = False
    """Unless the file says it."""


_PRES = {
    "gpt-2": _Pre(),
    "smollm": _Pre(each_digit=True),
    "llama-bpe": _Pre(pattern=_LETTERS + r"\p{N}{1,3}" + _REST, whole_pieces=True, begins_with_bos=True),
    "qwen2": _Pre(pattern=_LETTERS + r"\p{N}" + _REST, normalizer="NFC"),
    "tekken": _Pre(pattern=_TEKKEN, whole_pieces=True, begins_with_bos=True),
}


def tokenizer_of(metadata: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The content of a `tokenizer.json`.

    Raises:
        InvalidCheckpoint: the entries are missing, or contradict each other.
        Refused: it is of another kind, or splits text in a way that is not known here.
    """
    tokens = _texts(metadata, "tokens", path)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens) or not tokens or len(tokens) > _MAX_TOKENS:
        raise InvalidCheckpoint(f"{path} has {len(tokens)} tokens of which {len(vocabulary)} differ")
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        parts = _byte_level(metadata, vocabulary, path)
    elif kind == "llama":
        parts = _sentencepiece(metadata, tokens, vocabulary, path)
    else:
        raise Refused(
            f"{path} has a tokenizer of the kind {kind!r}; read are gpt2 (byte-level BPE) and llama (SentencePiece)"
        )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(metadata, tokens, path),
        **parts,
    }


def tokenizer_config_of(metadata: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The content of a `tokenizer_config.json`: the chat template and the special tokens that it may name."""
    tokens = _texts(metadata, "tokens", path)
    config: dict[str, Any] = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        token = _special(metadata, key, tokens, path)
        if token is not None:
            config[name] = token
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return config


def _byte_level(metadata: Mapping[str, Any], vocabulary: Mapping[str, int], path: Path) -> dict[str, Any]:
    name = metadata.get("tokenizer.ggml.pre")
    pre = _PRES.get(name) if isinstance(name, str) else None
    if pre is None:
        raise Refused(
            f"{path} splits text as {name!r} (tokenizer.ggml.pre), which is not known; known are {', '.join(_PRES)}"
        )
    splits: list[dict[str, Any]] = []
    if pre.each_digit:
        splits.append({"type": "Digits", "individual_digits": True})
    if pre.pattern is not None:
        splits.append({"type": "Split", "pattern": {"Regex": pre.pattern}, "behavior": "Isolated", "invert": False})
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pre.pattern is None}
    return {
        "normalizer": None if pre.normalizer is None else {"type": pre.normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, level]},
        "post_processor": _post_processor(metadata, path, default=pre.begins_with_bos),
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": list(_merges(_texts(metadata, "merges", path), vocabulary, path)),
            "ignore_merges": pre.whole_pieces,
        },
    }


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], vocabulary: Mapping[str, int], path: Path
) -> dict[str, Any]:
    """As transformers converts Llama 2's: BPE with merges that follow from the scores; bytes where it lacks a token."""
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    begin = [{"type": "Prepend", "prepend": _SPACE}] if prefixed else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*begin, {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}],
        },
        "pre_tokenizer": None,
        "post_processor": _post_processor(metadata, path, default=True),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": _merges_by_score(tokens, _numbers(metadata, "scores", len(tokens), path), vocabulary),
            "unk_token": _special(metadata, "unknown", tokens, path),
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _merges(lines: Sequence[str], vocabulary: Mapping[str, int], path: Path) -> Iterator[tuple[str, str]]:
    for line in lines:
        left, space, right = line.partition(" ")
        if not space or not {left, right, left + right} <= vocabulary.keys():
            raise InvalidCheckpoint(f"{path} has the merge {line[:80]!r}, which is not two tokens that give a third")
        yield left, right


def _merges_by_score(
    tokens: Sequence[str], scores: np.ndarray[Any, np.dtype[Any]], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Every way to put a token together from two, the best token first: `generate_merges` of transformers."""
    merges: list[tuple[str, str]] = []
    for index in np.argsort(-scores, kind="stable"):
        token = tokens[int(index)]
        cuts = ((token[:at], token[at:]) for at in range(1, min(len(token), _LONGEST_TOKEN)))
        pairs = [(left, right) for left, right in cuts if left in vocabulary and right in vocabulary]
        merges += sorted(pairs, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return merges


_LONGEST_TOKEN = 256  # characters; more would take time that grows with their square


def _post_processor(metadata: Mapping[str, Any], path: Path, *, default: bool) -> dict[str, Any] | None:
    tokens = _texts(metadata, "tokens", path)
    begin = [_special(metadata, "bos", tokens, path)] if metadata.get("tokenizer.ggml.add_bos_token", default) else []
    end = [_special(metadata, "eos", tokens, path)] if metadata.get("tokenizer.ggml.add_eos_token", False) else []
    named = [token for token in (*begin, *end) if token is not None]
    if not named:
        return None

    def template(sequence: str, type_id: int) -> list[dict[str, Any]]:
        special = [
            [{"SpecialToken": {"id": each, "type_id": type_id}} for each in part if each] for part in (begin, end)
        ]
        return [*special[0], {"Sequence": {"id": sequence, "type_id": type_id}}, *special[1]]

    return {
        "type": "TemplateProcessing",
        "single": template("A", 0),
        "pair": [*template("A", 0), *template("B", 1)],
        "special_tokens": {
            token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]} for token in dict.fromkeys(named)
        },
    }


def _added(metadata: Mapping[str, Any], tokens: Sequence[str], path: Path) -> list[dict[str, Any]]:
    """Tokens that text is searched for before it is split: those of control, and those that a user defined."""
    kinds = _numbers(metadata, "token_type", len(tokens), path)
    return [
        {
            "id": int(index),
            "content": tokens[int(index)],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": bool(kinds[index] != _USER_DEFINED),
        }
        for index in np.flatnonzero(np.isin(kinds, (_UNKNOWN, _CONTROL, _USER_DEFINED)))
    ]


def _special(metadata: Mapping[str, Any], kind: str, tokens: Sequence[str], path: Path) -> str | None:
    token_id = metadata.get(f"tokenizer.ggml.{kind}_token_id")
    if token_id is None:
        return None
    if type(token_id) is not int or not 0 <= token_id < len(tokens):
        raise InvalidCheckpoint(f"{path} says tokenizer.ggml.{kind}_token_id {token_id}, and has {len(tokens)} tokens")
    return tokens[token_id]


def _texts(metadata: Mapping[str, Any], key: str, path: Path) -> Sequence[str]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list):
        raise InvalidCheckpoint(f"{path} has no list of texts tokenizer.ggml.{key}")
    return cast("list[str]", value)


def _numbers(metadata: Mapping[str, Any], key: str, count: int, path: Path) -> np.ndarray[Any, np.dtype[Any]]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, np.ndarray) or len(cast("Sequence[Any]", value)) != count:
        raise InvalidCheckpoint(f"{path} has no tokenizer.ggml.{key} for each of its {count} tokens")
    return cast("np.ndarray[Any, np.dtype[Any]]", value)
