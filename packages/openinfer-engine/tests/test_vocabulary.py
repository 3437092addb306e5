"""Token ids in use and ids that end a text, from the files of a model folder."""

import json
from pathlib import Path

import pytest

from openinfer_core import InvalidCheckpoint
from openinfer_engine.vocabulary import read_eos_token_ids, read_num_token_ids


def write(folder: Path, name: str, content: object) -> Path:
    (folder / name).write_text(json.dumps(content))
    return folder


def tokenizer(vocab: object, *added: int) -> dict[str, object]:
    return {
        "version": "1.0",
        "added_tokens": [{"id": token_id, "content": str(token_id), "special": True} for token_id in added],
        "model": {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]]},
    }


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (tokenizer({"a": 0, "b": 5}), 6),
        (tokenizer({"a": 0, "b": 5}, 9, 7), 10),
        (tokenizer({}, 3), 4),
        (tokenizer([["a", -1.5], ["b", -2]]), 2),
        (tokenizer([["a", -1.5], ["b", -2]], 2), 3),
        ({"model": {"type": "WordLevel", "vocab": {"a": 11}}}, 12),
    ],
)
def test_num_token_ids_is_one_more_than_the_largest_id(tmp_path: Path, content: object, expected: int) -> None:
    assert read_num_token_ids(write(tmp_path, "tokenizer.json", content), vocab_size=12) == expected


def test_num_token_ids_without_a_tokenizer_is_the_vocabulary(tmp_path: Path) -> None:
    assert read_num_token_ids(tmp_path, vocab_size=77) == 77


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (tokenizer({"a": 12}), "has token id 12, but config.json says vocab_size 12"),
        (tokenizer({}), "has no token ids"),
        (tokenizer({"a": -1}), "negative"),
        (tokenizer({"a": "b"}), "is invalid"),
        (tokenizer(3), "is invalid"),
        ({"added_tokens": []}, "is invalid"),
    ],
)
def test_tokenizer_that_does_not_fit_is_refused(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        read_num_token_ids(write(tmp_path, "tokenizer.json", content), vocab_size=12)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 3, 5]}, {"eos_token_id": 1}, (5, 3)),
        ({"eos_token_id": 0}, {"eos_token_id": 1}, (0,)),
        ({"temperature": 0.6}, {"eos_token_id": 1}, (1,)),
        ({"eos_token_id": None}, {"eos_token_id": [1, 2]}, (1, 2)),
        (None, {"eos_token_id": [1, 2]}, (1, 2)),
        (None, {"eos_token_id": None}, ()),
        (None, {"text_config": {"eos_token_id": 7}}, (7,)),
        (None, {"eos_token_id": 3, "text_config": {"eos_token_id": 7}}, (3,)),
        (None, {"text_config": None}, ()),
        (None, {}, ()),
    ],
)
def test_eos_token_ids_come_from_the_generation_config_first(
    tmp_path: Path, generation: object, config: dict[str, object], expected: tuple[int, ...]
) -> None:
    if generation is not None:
        write(tmp_path, "generation_config.json", generation)
    assert read_eos_token_ids(tmp_path, config) == expected


@pytest.mark.parametrize("eos", ["<end>", [1, "2"], -1, True, 1.5])
def test_eos_token_ids_that_are_none_are_refused(tmp_path: Path, eos: object) -> None:
    with pytest.raises(InvalidCheckpoint):
        read_eos_token_ids(tmp_path, {"eos_token_id": eos})
    with pytest.raises(InvalidCheckpoint):
        read_eos_token_ids(write(tmp_path, "generation_config.json", {"eos_token_id": eos}), {})
