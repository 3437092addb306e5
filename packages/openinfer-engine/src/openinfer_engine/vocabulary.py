"""Which token ids a model may emit, and which of them end a text: facts of its folder that the engine needs.

The engine never tokenises; the frontend does. Both read the same files.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from openinfer_core import InvalidCheckpoint, Refused
from openinfer_core.family import check_model_file
from openinfer_core.tokenizer_files import TOKENIZER_FILE, read_tokenizer

Decoded = TypeVar("Decoded")


class _Model(msgspec.Struct):
    """The part of a tokenizer that gives most ids; BPE, WordPiece and WordLevel have a map, Unigram a list."""

    vocab: dict[str, int] | list[tuple[str, float]]


class _AddedToken(msgspec.Struct):
    id: int
    content: str = ""


class _Tokenizer(msgspec.Struct):
    """`tokenizer.json`, of which only the ids are read."""

    model: _Model
    added_tokens: list[_AddedToken] = []


class _EndOfText(msgspec.Struct):
    """What `generation_config.json` and `config.json` say of the end of a text."""

    eos_token_id: int | list[int] | None = None


def read_num_token_ids(model_dir: Path, *, vocab_size: int) -> int:
    """Token ids in use: those below this number may be sampled; further rows of the embedding are padding.

    Without a tokenizer all rows are in use.

    Raises:
        InvalidCheckpoint: the tokenizer cannot be read, or has an id that the embedding has no row for.
    """
    content = read_tokenizer(model_dir)
    if content is None:
        return vocab_size
    path = model_dir / TOKENIZER_FILE
    tokenizer = _decoded(content, path, _Tokenizer)
    vocab = tokenizer.model.vocab
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
    ids += [token.id for token in tokenizer.added_tokens]
    if not ids or min(ids) < 0:
        raise InvalidCheckpoint(f"{path} has no token ids, or negative ones")
    if max(ids) >= vocab_size:
        raise InvalidCheckpoint(
            f"{path} has token id {max(ids)}, but config.json says vocab_size {vocab_size}: "
            "tokenizer and weights are not of the same model"
        )
    return max(ids) + 1


def check_same_vocabulary(model_dir: Path, other_dir: Path) -> bool:
    """Whether two folders have tokenizers, whose ids then stand for the same texts; False if neither has one.

    How they cut a text into tokens is not compared: one of them alone is asked.

    Raises:
        Refused: one has a tokenizer and the other has none, or an id stands for another text.
        InvalidCheckpoint: a tokenizer cannot be read.
    """
    contents = [read_tokenizer(each) for each in (model_dir, other_dir)]
    if contents[0] == contents[1]:
        return contents[0] is not None
    texts: list[dict[int, str]] = []
    for content, folder in zip(contents, (model_dir, other_dir), strict=True):
        if content is None:
            raise Refused(f"{folder} has no tokenizer to compare with the other model's")
        texts.append(_texts_of_ids(_decoded(content, folder / TOKENIZER_FILE, _Tokenizer)))
    ours, theirs = texts
    differing = sorted(
        token_id for token_id in ours.keys() | theirs.keys() if ours.get(token_id) != theirs.get(token_id)
    )
    if differing:
        first = differing[0]
        raise Refused(
            f"{other_dir} has another vocabulary than {model_dir}: {len(differing)} token ids stand for something "
            f"else, the first is {first}: {theirs.get(first, 'nothing')!r}, and {ours.get(first, 'nothing')!r} for the "
            "model"
        )
    return True


def _texts_of_ids(tokenizer: _Tokenizer) -> dict[int, str]:
    vocab = tokenizer.model.vocab
    pairs = vocab.items() if isinstance(vocab, dict) else ((text, index) for index, (text, _) in enumerate(vocab))
    return {token_id: text for text, token_id in pairs} | {each.id: each.content for each in tokenizer.added_tokens}


def read_eos_token_ids(model_dir: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Token ids that end a text: those of `generation_config.json`, else those of the config, else none.

    The config of a model of several modalities may have them in its `text_config`.

    Raises:
        InvalidCheckpoint: a file cannot be read, or an id is negative.
    """
    path = model_dir / "generation_config.json"
    ids = _listed(_decode(path, _EndOfText)) if path.exists() else ()
    if not ids:
        try:
            ids = _listed(msgspec.convert(config, _EndOfText))
            if not ids:
                ids = _listed(msgspec.convert(config.get("text_config") or {}, _EndOfText))
        except msgspec.ValidationError as error:
            raise InvalidCheckpoint(f"config.json of {model_dir} is invalid: {error}") from error
    if any(token_id < 0 for token_id in ids):
        raise InvalidCheckpoint(f"{model_dir} has a negative eos_token_id: {list(ids)}")
    return ids


def _listed(end: _EndOfText) -> tuple[int, ...]:
    ids: Iterable[int] = end.eos_token_id if isinstance(end.eos_token_id, list) else [end.eos_token_id or 0]
    return () if end.eos_token_id is None else tuple(dict.fromkeys(ids))


def _decode(path: Path, decoded_type: type[Decoded]) -> Decoded:
    try:
        check_model_file(path)
        content = path.read_bytes()
    except OSError as error:
        raise InvalidCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    return _decoded(content, path, decoded_type)


def _decoded(content: bytes, path: Path, decoded_type: type[Decoded]) -> Decoded:
    try:
        return msgspec.json.decode(content, type=decoded_type)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidCheckpoint(f"{path} is invalid: {error}") from error
