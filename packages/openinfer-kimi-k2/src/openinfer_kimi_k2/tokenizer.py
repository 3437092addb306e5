"""Kimi's tokenizer, `tiktoken.model` and the special tokens of `tokenizer_config.json`, as a `tokenizer.json`.

A line of `tiktoken.model` is a token's bytes in base64 and its rank, which is its id. tiktoken cuts a text by a
pattern, takes a piece that is a token whole, and otherwise joins, again and again, the two neighbours whose union has
the lowest rank, the leftmost among equals. The pattern is code of the model folder there, which is never run; it is
repeated here.

`tokenizers` joins neighbours by a list of pairs instead. Here the list has every pair whose union is a token, in the
order of the unions' ranks, and those of one union by the length of their left part, longest first.
"""

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from openinfer_core import InvalidCheckpoint
from openinfer_core.tokenizer_files import byte_alphabet

OPENINFER_CONTRACT = 1

RANKS_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_CLASS = "TikTokenTokenizer"
NUM_RESERVED = 256
"""Ids after those of the ranks: special tokens, named in the config or `<|reserved_token_ID|>`."""

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = (rf"[\p{{{case}}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for case in (r"Lu}\p{Lt", "Ll"))
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Chinese characters apart, words with what stands before them, up to three digits, signs, spaces."""


class _AddedToken(msgspec.Struct):
    content: str


class _Config(msgspec.Struct):
    """`tokenizer_config.json`, as far as it names tokens."""

    tokenizer_class: str | None = None
    added_tokens_decoder: dict[int, _AddedToken] = {}


def tokenizer_json(model_dir: Path) -> bytes | None:
    """The entry point `kimi-k2`; raises `InvalidCheckpoint` where Kimi's files are not as they should be."""
    ranks_path, config_path = model_dir / RANKS_FILE, model_dir / CONFIG_FILE
    if not ranks_path.is_file() or not config_path.is_file():
        return None
    try:
        config = msgspec.json.decode(config_path.read_bytes(), type=_Config)
    except OSError as error:
        raise InvalidCheckpoint(f"{config_path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidCheckpoint(f"{config_path} is invalid: {error}") from error
    # Other families' folders may have files of these names.
    if config.tokenizer_class != TOKENIZER_CLASS:
        return None
    ranks = read_ranks(ranks_path)
    special = special_tokens({i: token.content for i, token in config.added_tokens_decoder.items()}, len(ranks))
    return json.dumps(converted(ranks, special), ensure_ascii=False).encode()


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token -> rank, from 0 without a gap; raises `InvalidCheckpoint` for anything else."""
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except OSError as error:
        raise InvalidCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, binascii.Error) as error:
        raise InvalidCheckpoint(f"{path} is invalid: a line is no base64 token and its rank") from error
    if not ranks or sorted(ranks.values()) != list(range(len(ranks))):
        raise InvalidCheckpoint(f"{path} is invalid: its {len(ranks)} tokens do not have the ranks from 0 on")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise InvalidCheckpoint(f"{path} is invalid: bytes {missing[:8]} are no tokens, so that some texts have none")
    return ranks


def special_tokens(named: Mapping[int, str], num_ranks: int) -> dict[int, str]:
    """Id -> name of all special tokens: those that the config names, and reserved ones in between."""
    ids = range(num_ranks, num_ranks + NUM_RESERVED)
    outside = sorted(named.keys() - {*ids})
    if outside:
        raise InvalidCheckpoint(
            f"{CONFIG_FILE} names the special tokens {outside[:8]}, but they have the ids {ids.start} to {ids.stop - 1}"
        )
    names = {i: named.get(i, f"<|reserved_token_{i}|>") for i in ids}
    if len({*names.values()}) != len(names):
        raise InvalidCheckpoint(f"{CONFIG_FILE} gives one name to several special tokens")
    return names


def converted(ranks: Mapping[bytes, int], special: Mapping[int, str]) -> dict[str, Any]:
    """A `tokenizer.json` of ranks and special tokens."""
    alphabet = {byte: character for character, byte in byte_alphabet().items()}

    def spelled(token: bytes) -> str:
        return "".join(map(alphabet.__getitem__, token))

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    pattern = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": name, **flags} for i, name in special.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [pattern, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # A piece that is a token is taken whole, as tiktoken does, whether merges lead to it or not.
            "ignore_merges": True,
            "vocab": {spelled(token): rank for token, rank in ranks.items()},
            "merges": [[spelled(left), spelled(right)] for left, right in merges(ranks)],
        },
    }


def merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Pairs of tokens whose union is a token, in the order in which `tokenizers` is to prefer them."""
    for token in sorted(ranks, key=ranks.__getitem__):
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                yield left, right
