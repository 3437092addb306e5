"""What the model is trained on: text it is given, and text it must produce."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["facts", "sums", "stories", "chats", "tools"]

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"


@dataclass(frozen=True, slots=True)
class Document:
    """One training example: no loss is taken on `context`; `target` ends with a stop token."""

    kind: Kind
    context: str
    target: str


def reply(answer: str, *, thought: str | None) -> str:
    """Return an assistant turn as the model writes it; `thought=None` is the mode without thinking."""
    reasoning = "" if thought is None else f"<think>\n{thought}\n</think>\n\n"
    return f"{reasoning}{answer}{END_OF_TURN}"
