"""The tokenizer of a model folder: `tokenizer.json`, or what an installed package makes of a file in another format.

A package that serves models with a format of their own offers a `TokenizerConverter` in the entry-point group
`openinfer.tokenizers`. Frontend and engine read the same bytes through `read_tokenizer`, each in its own process.
"""

from functools import lru_cache
from pathlib import Path
from typing import Protocol

from openinfer_core.errors import InvalidCheckpoint
from openinfer_core.family import check_model_file
from openinfer_core.plugins import TOKENIZERS, Lister, installed, list_plugins

TOKENIZER_FILE = "tokenizer.json"


class TokenizerConverter(Protocol):
    """Reads one format; a function. It never runs code of a model folder."""

    def __call__(self, model_dir: Path) -> bytes | None:
        """The content of a `tokenizer.json` that gives every text the ids of the folder's own tokenizer.

        Returns:
            None if the folder has no tokenizer of this format.

        Raises:
            InvalidCheckpoint: it has one that cannot be read.
        """
        ...


def read_tokenizer(model_dir: Path, *, lister: Lister = installed) -> bytes | None:
    """The content of the folder's `tokenizer.json`; None if it has none, and no installed package makes one.

    Raises:
        InvalidCheckpoint: a file cannot be read, or several packages claim it.
        BrokenPlugin: a package cannot be imported.
    """
    path = model_dir / TOKENIZER_FILE
    try:
        check_model_file(path)
        return path.read_bytes()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise InvalidCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    return _converted(model_dir, lister)


@lru_cache(maxsize=1)
def _converted(model_dir: Path, lister: Lister) -> bytes | None:
    # Kept, as a process asks more than once and a conversion takes seconds.
    found: dict[str, bytes] = {}
    for plugin in list_plugins(TOKENIZERS, lister=lister):
        converter: TokenizerConverter = plugin.load()
        content = converter(model_dir)
        if content is not None:
            found[plugin.origin] = content
    if len(found) > 1:
        raise InvalidCheckpoint(f"the tokenizer of {model_dir} is claimed by {', '.join(found)}; uninstall all but one")
    return next(iter(found.values()), None)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: character -> byte. Printable Latin-1 stands for itself, the rest follows from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}
