"""`ChatSession`: reads turns, shows answers as they come, and keeps what was said."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TextIO

from openinfer_core import OpenInferError

PROMPT = "> "
_CONTINUED = "… "
_QUOTES = '"""'
_HELP = '''\
  """            begins a turn of several lines, and ends it; so does \\ at a line's end, for one more line
  ctrl-c         stops the answer; what came of it stays in the conversation
  /save FILE     writes the conversation to FILE, as JSON messages
  /system TEXT   begins anew, with this system prompt
  /clear         begins anew
  /help          this list
  /exit, ctrl-d  ends
'''

Message = dict[str, str]


class Speaker(Protocol):
    """Who answers."""

    def answer(self, messages: Sequence[Message]) -> Iterator[str]:
        """The pieces of the next assistant turn as they come; closing the iterator stops it."""
        ...


class ChatSession:
    """One conversation.

    Args:
        speaker: answers it.
        system: a system prompt.
        read: asks for a line, as `input`.
        out: where answers are shown.
    """

    def __init__(
        self,
        speaker: Speaker,
        *,
        system: str | None = None,
        read: Callable[[str], str] = input,
        out: TextIO | None = None,
    ) -> None:
        self._speaker = speaker
        self._system = system
        self._read = read
        self._out = sys.stdout if out is None else out
        self.messages: list[Message] = []
        self._clear()

    def run(self) -> None:
        """Takes turns until the input or the user ends it."""
        while True:
            try:
                turn, is_text = self._turn()
            except EOFError:
                self._show("\n")
                return
            except KeyboardInterrupt:
                self._show("\n(ctrl-d or /exit ends the chat)\n")
                continue
            if not is_text and turn in {"/exit", "/quit"}:
                return
            if not is_text and turn.startswith("/"):
                self._command(turn)
            elif turn.strip():
                self._answer(turn)

    def _turn(self) -> tuple[str, bool]:
        """The next turn, and whether it is text whatever it begins with."""
        line = self._read(PROMPT)
        lines: list[str] = []
        if line.lstrip().startswith(_QUOTES):
            line = line.lstrip().removeprefix(_QUOTES)
            while not line.rstrip().endswith(_QUOTES):
                lines.append(line)
                line = self._read(_CONTINUED)
            return "\n".join([*lines, line.rstrip().removesuffix(_QUOTES)]).strip("\n"), True
        while line.endswith("\\"):
            lines.append(line.removesuffix("\\"))
            line = self._read(_CONTINUED)
        return "\n".join([*lines, line]), bool(lines)

    def _command(self, turn: str) -> None:
        name, _, argument = turn.partition(" ")
        match name:
            case "/help":
                self._show(_HELP)
            case "/clear":
                self._clear()
            case "/system" if argument.strip():
                self._system = argument.strip()
                self._clear()
            case "/save" if argument.strip():
                self._save(Path(argument.strip()).expanduser())
            case "/save" | "/system":
                self._show(f"{name} needs {'a file' if name == '/save' else 'a text'}; /help lists what there is\n")
            case _:
                self._show(f"{name} is no command; /help lists them (a turn that begins with / goes in {_QUOTES})\n")

    def _clear(self) -> None:
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def _save(self, path: Path) -> None:
        try:
            path.write_text(json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            self._show(f"{path} cannot be written: {error.strerror}\n")
            return
        self._show(f"saved {len(self.messages)} messages to {path}\n")

    def _answer(self, turn: str) -> None:
        self.messages.append({"role": "user", "content": turn})
        parts: list[str] = []
        try:
            for piece in self._speaker.answer(self.messages):
                parts.append(piece)
                self._show(piece)
            self._show("\n")
        except KeyboardInterrupt:
            self._show("\n(stopped)\n")
        except OpenInferError as error:
            self._show(f"\n{error}\n")
        if "".join(parts).strip():
            self.messages.append({"role": "assistant", "content": "".join(parts)})
        else:
            self.messages.pop()  # a turn without an answer would stand before the next one

    def _show(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
