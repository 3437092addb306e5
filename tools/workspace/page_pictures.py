"""Take the pictures of the server's page in docs/images: light, dark, and of a phone.

    .run/test/bin/python tools/workspace/page_pictures.py

The last answer is a real one, of the tiny model over HTTP. The chats before it are put into the browser's storage:
they show what a larger model's Markdown looks like.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, expect, sync_playwright

from openinfer_tiny_model import model_dir

FOLDER = Path(__file__).parents[2] / "docs" / "images"
PICTURES = {
    "page-light": {"color_scheme": "light", "viewport": {"width": 1360, "height": 860}},
    "page-dark": {"color_scheme": "dark", "viewport": {"width": 1360, "height": 860}},
    "page-phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 780}, "device_scale_factor": 2},
}
ANSWER = """A **prefix cache** keeps the keys and values of tokens that were seen before, in blocks of `16` tokens:

1. A block's name is a digest of its tokens *and* of the block before it.
2. A new prompt is looked up block by block; what is found is not computed again.

```python
def hits(blocks: list[Block], cache: Cache) -> int:
    return sum(1 for _ in takewhile(cache.has, blocks))
```

| prompt of 520 tokens | found | computed |
|:--|--:|--:|
| new | 0 | 520 |
| seen before | 512 | 8 |
"""
TITLES = ("Plan a week in Lisbon", "Rewrite this paragraph", "SQL: orders without invoices")


def conversations() -> Iterator[dict[str, Any]]:
    for index, title in enumerate(TITLES):
        messages = [message("user", title), message("assistant", "…")]
        yield {"id": f"old{index}", "updated": index, "messages": messages}
    messages = [
        message("user", "How does a prefix cache work?"),
        message("assistant", ANSWER, "The user asks about KV caches. A list, some code and a table will do."),
    ]
    yield {"id": "shown", "updated": len(TITLES), "messages": messages}


def message(role: str, content: str, reasoning: str = "") -> dict[str, str]:
    return {"role": role, "content": content, "reasoning": reasoning, "ended": ""}


@contextmanager
def server() -> Iterator[str]:
    command = [Path(sys.executable).with_name("openinfer"), "serve", "--model", model_dir(), "--port", "0"]
    command += ["--model-name", "tiny"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    )
    assert process.stdout is not None
    try:
        yield next((word for line in process.stdout for word in line.split() if word.startswith("http://")), "")
    finally:
        process.terminate()
        process.wait()


def take(browser: Browser, url: str, name: str, settings: dict[str, Any]) -> None:
    with browser.new_context(**settings) as context:
        page = context.new_page()
        page.goto(url)
        for each in conversations():
            entry = json.dumps({"title": "", "isNamed": False, "system": ""} | each)
            page.evaluate(
                "([id, text]) => localStorage.setItem(`openinfer.conversation.${id}`, text)", [each["id"], entry]
            )
        page.evaluate("sessionStorage.setItem('openinfer.current', 'shown')")
        page.reload()
        page.get_by_label("Message").fill("Who are you?")
        page.get_by_label("Message").press("Enter")
        expect(page.locator("#answer-tokens")).to_contain_text("tokens")
        page.wait_for_timeout(1500)  # the gauges' next look
        page.screenshot(path=FOLDER / f"{name}.png")


def main() -> None:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    FOLDER.mkdir(exist_ok=True)
    with server() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found)
        for name, settings in PICTURES.items():
            take(browser, url, name, settings)
        browser.close()


if __name__ == "__main__":
    main()
