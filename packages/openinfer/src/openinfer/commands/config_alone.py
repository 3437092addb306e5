"""`--config FILE` of `openinfer plan`: a `config.json` alone stands for a model folder."""

import argparse
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from openinfer_core import InvalidRequest

_MOST_BYTES = 16 << 20  # of a config; the largest published ones have some hundred KB


@contextmanager
def config_as_model(argv: Sequence[str]) -> Generator[list[str]]:
    """The command line with `--model FOLDER` for `--config FILE`; the folder lives as long as the context.

    Raises:
        InvalidRequest: there is a `--model`, too, no `--gpu`, or the file cannot be read.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    parser.add_argument("--model")
    parser.add_argument("--gpu")
    chosen, _ = parser.parse_known_args(argv)
    if chosen.config is None:
        yield list(argv)
        return
    if chosen.model is not None:
        raise InvalidRequest("--config stands in place of --model: give one of them", field="config")
    if chosen.gpu is None:
        raise InvalidRequest(
            "--config needs --gpu NAME: without weights only a GPU that is named is planned for", field="config"
        )
    path = Path(chosen.config).expanduser()
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"--config {path} cannot be read: {error.strerror}", field="config") from error
    if len(content) > _MOST_BYTES:
        raise InvalidRequest(
            f"--config {path} has more than {_MOST_BYTES} bytes: this is no config.json", field="config"
        )
    # A folder of its own: what lies next to the file (a tokenizer, weights of another model) has no part in the plan.
    with tempfile.TemporaryDirectory(prefix="openinfer-config-") as parent:
        folder = Path(parent) / (path.resolve().parent.name if path.name == "config.json" else path.stem)
        folder.mkdir()
        (folder / "config.json").write_bytes(content)
        yield [*argv, "--model", str(folder)]
