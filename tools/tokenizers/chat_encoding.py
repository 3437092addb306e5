"""What origins of characters cost chats: rendering and encoding, against plain Jinja and the text encoded as a whole.

    python tools/tokenizers/chat_encoding.py [NAME ...] [--json FILE]

Names are those of `real.py`, with its published templates and tokenizers. `plain` is the same template in jinja2's own
sandbox, without this server's clock and bounds, and its text encoded at once: ids must be equal. CPU time of this
process, the least of several rounds in turns.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from real import fetch

from openinfer_core.provenance import provenance
from openinfer_server.chat.template import ChatTemplate
from openinfer_server.text.tokenizer import Tokenizer

NAMES = ("deepseek_v3", "llama3", "qwen3")
SHAPES = {"39 turns of 10 kB": (39, 10_256, 3), "999 turns of 100 B": (999, 100, 3), "3 turns of 50 B": (3, 50, 100)}
ROUNDS = 5
WORDS = "the stone is a mountain, naïve 東京 return x + 1\n    if not found: 3.14 “quotes” Привет".split(" ")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = {name: measure(fetch(name)) for name in arguments.names}
    print(json.dumps(figures, indent=2))
    if arguments.json is not None:
        content = {**msgspec.to_builtins(provenance()), "rounds": ROUNDS, "models": figures}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def measure(folder: Path) -> dict[str, object]:
    template = ChatTemplate.load(folder, timeout_s=60, max_characters=2**24)
    assert template is not None
    begin_s = time.process_time()
    controls = Tokenizer.load(folder).control_tokens(own_texts=template.own_texts)
    loaded_s = time.process_time() - begin_s
    whole = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    config: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    named = {name: each.get("content", each) if isinstance(each, dict) else each for name, each in config.items()}
    plain = environment.from_string(template.source)
    figures: dict[str, object] = {"tokenizer_and_control_tokens_s": round(loaded_s, 3)}
    for shape, (turns, size, repeats) in SHAPES.items():
        chat = make_chat(turns, size)
        text = template.render(chat, {})
        assert controls.encode(text) == whole.encode(text.plain, add_special_tokens=False).ids
        variables = {**named, "messages": chat, "add_generation_prompt": True}
        assert plain.render(variables) == text.plain
        ways: dict[str, Callable[[], object]] = {
            "render_ms": lambda: template.render(chat, {}),  # noqa: B023 - called in this turn of the loop
            "encode_ms": lambda: controls.encode(text),  # noqa: B023
            "plain_render_ms": lambda: plain.render(variables),  # noqa: B023
            "plain_encode_ms": lambda: whole.encode_batch_fast([text.plain], add_special_tokens=False)[0].ids,  # noqa: B023
        }
        rounds = [{name: spent_ms(way, repeats) for name, way in ways.items()} for _ in range(ROUNDS)]
        least = {name: min(each[name] for each in rounds) for name in ways}
        ratio = (least["render_ms"] + least["encode_ms"]) / (least["plain_render_ms"] + least["plain_encode_ms"])
        rounded = {name: round(value, 3) for name, value in least.items()}
        figures[shape] = {"characters": len(text), **rounded, "ratio": round(ratio, 3)}
    return figures


def make_chat(turns: int, size: int) -> list[dict[str, str]]:
    rng = random.Random(turns)
    return [
        {"role": "assistant" if turn % 2 else "user", "content": " ".join(rng.choices(WORDS, k=size // 6))[:size]}
        for turn in range(turns)
    ]


def spent_ms(way: Callable[[], object], repeats: int) -> float:
    begin_s = time.process_time()
    for _ in range(repeats):
        way()
    return (time.process_time() - begin_s) / repeats * 1e3


if __name__ == "__main__":
    main()
