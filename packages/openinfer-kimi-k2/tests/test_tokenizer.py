"""Texts have the ids that tiktoken gives them, from the files that Kimi publishes and without their code."""

import base64
import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from openinfer_core import InvalidCheckpoint
from openinfer_core.tokenizer_files import read_tokenizer
from openinfer_kimi_k2.tokenizer import PATTERN, converted, special_tokens

SPECIAL = {"[BOS]": 0, "<|im_end|>": 2, "<|im_user|>": 3}
TEXT = """The quick brown fox didn't jump; it's 12345 years old. NASA's HTTPServer returned 404!!!
    for i in range(100):\n        if i % 15 == 0:\r\n            print("FizzBuzz")  # ======== \n\n\n
汉字 and 日本語のテキスト, über Straße, naïve café — Ελληνικά, русский текст, 한국어 문장, ǅ ǈ
\t\t mixed中文English 3.14159
aaaaaaaa aaaa bbbbbbb abababababab ((((((((( ------- 　　 🙂🙃👍🏽 e\u0301 ªº ²³ ٣٤٥ I'LL We'Ve O'RE
"""


def trained(text: str, size: int) -> dict[bytes, int]:
    """Ranks of a byte-pair encoding learnt from a text, the plain way."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    pieces = [[bytes([byte]) for byte in piece.encode()] for piece in text.split(" ")]
    while len(ranks) < size:
        pairs = Counter(pair for piece in pieces for pair in pairwise(piece))
        if not pairs:
            break
        (left, right), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        ranks[left + right] = len(ranks)
        for piece in pieces:
            i = 0
            while i < len(piece) - 1:
                if (piece[i], piece[i + 1]) == (left, right):
                    piece[i : i + 2] = [left + right]
                i += 1
    return ranks


def scattered(seed: int) -> dict[bytes, int]:
    """Ranks of random tokens over few letters, with no history of joins: the hardest case."""
    rng = random.Random(seed)
    ranks = {bytes([byte]): byte for byte in range(256)}
    while len(ranks) < 400:
        token = bytes(rng.choice(b"ab ") for _ in range(rng.randint(2, 6)))
        if any(token[:i] in ranks and token[i:] in ranks for i in range(1, len(token))):
            ranks.setdefault(token, len(ranks))
    return ranks


def folder(path: Path, ranks: dict[bytes, int], **config: Any) -> Path:
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (path / "tiktoken.model").write_text("".join(lines))
    added = {str(len(ranks) + i): {"content": name, "special": True} for name, i in SPECIAL.items()}
    given = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added} | config
    (path / "tokenizer_config.json").write_text(json.dumps(given))
    return path


def pair(ranks: dict[bytes, int]) -> tuple[tokenizers.Tokenizer, tiktoken.Encoding]:
    special = special_tokens({len(ranks) + i: name for name, i in SPECIAL.items()}, len(ranks))
    own = tokenizers.Tokenizer.from_str(json.dumps(converted(ranks, special)))
    names = {name: i for i, name in special.items()}
    return own, tiktoken.Encoding("test", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=names)


LEARNT = pair(trained(TEXT, 600))
PERIODIC = pair(trained("aaaaaaaaaaaaaaaa abababab aabaabaab   \n", 280))
SCATTERED = [pair(scattered(seed)) for seed in range(4)]

words = st.text(st.sampled_from("ab \n'sTé汉漢字1234.=ǅªÀ🙂\r\t-_\u0301"), max_size=40)


@settings(max_examples=400, deadline=None)
@given(text=st.one_of(words, st.text(max_size=30)))
@example(text=TEXT)
@example(text="<|im_user|>user<|im_middle|>hi<|im_end|> [BOS]<|reserved_token_900|>")
def test_any_text_has_tiktokens_ids_and_comes_back(text: str) -> None:
    for own, reference in (LEARNT, PERIODIC):
        expected = reference.encode(text, allowed_special="all")
        assert own.encode(text, add_special_tokens=False).ids == expected
        assert own.decode(expected, skip_special_tokens=False) == text


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from("ab "), max_size=60))
def test_runs_of_few_letters_have_tiktokens_ids(text: str) -> None:
    for own, reference in (PERIODIC, *SCATTERED):
        assert own.encode(text).ids == reference.encode(text)


def test_folder_is_found_by_its_files_and_keeps_its_ids(tmp_path: Path) -> None:
    ranks = trained(TEXT, 400)
    content = read_tokenizer(folder(tmp_path, ranks))
    assert content is not None
    own = tokenizers.Tokenizer.from_buffer(content)
    assert own.get_vocab_size(with_added_tokens=True) == len(ranks) + 256
    assert own.token_to_id("<|im_end|>") == len(ranks) + 2
    assert own.token_to_id(f"<|reserved_token_{len(ranks) + 1}|>") == len(ranks) + 1
    assert own.decode([len(ranks) + 2]) == ""
    assert own.get_added_tokens_decoder()[len(ranks) + 255].special


def test_tokenizer_json_beside_it_goes_first(tmp_path: Path) -> None:
    (folder(tmp_path, trained("", 256)) / "tokenizer.json").write_bytes(b"{}")
    assert read_tokenizer(tmp_path) == b"{}"


def test_folder_of_another_tokenizer_is_left_alone(tmp_path: Path) -> None:
    assert read_tokenizer(tmp_path) is None
    assert read_tokenizer(folder(tmp_path, trained("", 256), tokenizer_class="QWenTokenizer")) is None


@pytest.mark.parametrize(
    ("ranks", "config", "message"),
    [
        ({b"a": 0}, {}, "bytes .* are no tokens"),
        ({bytes([byte]): byte for byte in range(256)} | {b"ab": 300}, {}, "do not have the ranks from 0 on"),
        ({bytes([byte]): byte for byte in range(256)}, {"added_tokens_decoder": {"9": {"content": "x"}}}, "256 to 511"),
        (
            {bytes([byte]): byte for byte in range(256)},
            {"added_tokens_decoder": {"256": {"content": "x"}, "257": {"content": "x"}}},
            "one name to several",
        ),
        (
            {bytes([byte]): byte for byte in range(256)},
            {"added_tokens_decoder": []},
            "tokenizer_config.json is invalid",
        ),
    ],
)
def test_files_that_contradict_themselves_are_refused(
    tmp_path: Path, ranks: dict[bytes, int], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        read_tokenizer(folder(tmp_path, ranks, **config))


@pytest.mark.parametrize("line", [b"!!!! 3", b"YQ==", b"YQ== x", b"YQ== 1 2"])
def test_line_that_is_no_token_is_refused(tmp_path: Path, line: bytes) -> None:
    (folder(tmp_path, {}) / "tiktoken.model").write_bytes(line)
    with pytest.raises(InvalidCheckpoint, match="no base64 token and its rank"):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer_config.json"])
def test_file_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model_dir = folder(tmp_path, {bytes([byte]): byte for byte in range(256)})
    read = Path.read_bytes

    def failing(path: Path) -> bytes:
        if path.name == name:
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", failing)
    with pytest.raises(InvalidCheckpoint, match=f"{name} cannot be read: Permission denied"):
        read_tokenizer(model_dir)
