"""`FlagParser`: help with the flags that people look for first, one line each, and refusals that know vLLM's names."""

import argparse
import difflib
import itertools
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn, cast

from openinfer.commands.vllm_flags import OF_VLLM
from openinfer.flags import TRUE_OR_FALSE

# in this order; every other flag is advanced
COMMON = (
    *("--model", "--revision", "--offline", "--device", "--max-model-tokens", "--max-num-seqs"),
    *("--gpu-memory-fraction", "--kv-cache-bytes", "--tensor-parallel-size", "--kv-tier", "--host", "--port"),
    *(
        "--model-name",
        "--api-keys-file",
        "--tool-parser",
        "--reasoning-parser",
        "--log-level",
        "--log-format",
        "--help",
    ),
)
_FLAG_WIDTH = 38
_LEAST_ROOM = 40  # of a text: on a narrow terminal lines go beyond its edge
_WIDTH_OF_A_FILE = (120, 24)


class FlagParser(argparse.ArgumentParser):
    """A parser whose `--help` has one line per flag, common ones first; `--help-all` has their whole texts."""

    def __init__(self, **further: Any) -> None:
        self._whole_texts = False
        super().__init__(allow_abbrev=False, add_help=False, **further)

    def add_helps(self) -> None:
        """Adds `--help` and `--help-all`."""
        self.add_argument("-h", "--help", action="help", help="this page")
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help="this page with the whole text of every flag")

    @property
    def flags(self) -> dict[str, argparse.Action]:
        """What each flag does, by its long name."""
        return {name: action for action in self._actions for name in action.option_strings if name.startswith("--")}

    def format_help(self, *, whole_texts: bool = False) -> str:
        flags = self.flags
        positionals = [action for action in self._actions if not action.option_strings]
        common = [name for name in COMMON if name in flags]
        advanced = sorted(flags.keys() - set(common))
        parts = [" ".join(["usage:", self.prog, *map(_shown, positionals), "[flags]"]), self.description or ""]
        lines = _wrapped if whole_texts else _one_line
        if positionals:
            parts.append("\n".join(lines(_shown(action), action) for action in positionals))
        parts.append("\n".join(["common flags:", *(lines(_named(name, flags[name]), flags[name]) for name in common)]))
        parts.append("\n".join(["advanced:", *(lines(_named(name, flags[name]), flags[name]) for name in advanced)]))
        parts.append(self.epilog or "")
        return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"

    def parse_strictly(self, argv: Sequence[str]) -> argparse.Namespace:
        """An unknown flag is refused, with the name that it has here if it is one of vLLM's.

        A flag of true or false without a value is true, where the line ends or another flag follows.
        """
        found, unknown = self.parse_known_args([*self._with_true(argv)])
        if unknown:
            self.error(said_of_unknown(unknown, self.flags))
        return found

    def _with_true(self, argv: Sequence[str]) -> Iterator[str]:
        flags = self.flags
        for word, after in itertools.zip_longest(argv, argv[1:], fillvalue="--"):
            yield word
            if word in flags and flags[word].metavar == TRUE_OR_FALSE and after.startswith("-"):
                yield "true"

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *further: object) -> None:
        del further
        print(cast("FlagParser", parser).format_help(whole_texts=True), end="")
        parser.exit()


def said_of_unknown(unknown: Sequence[str], known: Iterable[str]) -> str:
    """One sentence for each argument that no flag takes; the values that follow an unknown flag are not named."""
    flags = [text.partition("=")[0] for text in unknown if text.startswith("-")]
    if not flags:
        return f"unrecognized arguments: {' '.join(unknown)}"
    return "unrecognized arguments: " + "; ".join(_said_of(flag, sorted(known)) for flag in flags)


def _said_of(flag: str, known: list[str]) -> str:
    if flag in OF_VLLM:
        return f"{flag}: {OF_VLLM[flag]}"
    close = difflib.get_close_matches(flag, known, n=1, cutoff=0.7)
    return f"{flag}: did you mean {close[0]}?" if close else f"{flag}: --help lists all flags"


def _shown(action: argparse.Action) -> str:
    metavar = action.metavar or action.dest
    name = metavar if isinstance(metavar, str) else " ".join(metavar)
    return f"[{name}]" if action.nargs == "?" else name


def _named(name: str, action: argparse.Action) -> str:
    if action.nargs == 0:
        return name
    return f"{name} {'|'.join(map(str, action.choices)) if action.choices else action.metavar or action.dest.upper()}"


def _one_line(name: str, action: argparse.Action) -> str:
    width = shutil.get_terminal_size(_WIDTH_OF_A_FILE).columns
    text = first_sentence(_text_of(action))
    column = max(_FLAG_WIDTH, len(name) + 2)
    room = max(_LEAST_ROOM, width - column - 2)
    return f"  {name:{column}}{text if len(text) <= room else text[: room - 1].rstrip() + '…'}".rstrip()


def _wrapped(name: str, action: argparse.Action) -> str:
    text = textwrap.fill(_text_of(action), width=100, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"  {name}\n{text}"


def first_sentence(text: str) -> str:
    """The text up to its first full stop or semicolon, with the default that stands at its end."""
    default = text[text.rindex(" (default: ") :] if " (default: " in text else ""
    for end in (". ", "; "):
        text = text.partition(end)[0]
    return text.removesuffix(default).rstrip(".") + default


def _text_of(action: argparse.Action) -> str:
    return (action.help or "").replace("%%", "%")
