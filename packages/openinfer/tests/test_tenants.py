"""Two tenants of one server, over HTTP, with default policies: a flood of one leaves the other slots and prefixes."""

import json
import re
import subprocess
import sys
import urllib.request
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

KEYS = {"a": "key-of-tenant-a-0123456789", "b": "key-of-tenant-b-0123456789"}
FLAGS = ("--workers=2", "--max-num-seqs=4", "--num-blocks=128", "--max-model-tokens=1024", "--log-level=warning")


def ask(url: str, tenant: str, prompt: list[int], *, max_tokens: int, n: int = 1) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "n": n, "ignore_eos": True}
    headers = {"authorization": f"Bearer {KEYS[tenant]}", "content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)["usage"]


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        return float(re.findall(rf"^{name}{{.*}} (\S+)$", answer.read().decode(), re.MULTILINE)[0])


@pytest.mark.skipif(sys.platform != "linux", reason="several workers are possible on Linux alone")
def test_flood_of_one_tenant_leaves_another_its_slots_and_its_prefix(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f'[[keys]]\ntenant = "{tenant}"\nkey = "{key}"\n' for tenant, key in KEYS.items()))
    keys.chmod(0o600)
    command = [sys.executable, "-m", "openinfer.commands.main", "serve", "--model", "tiny", "--port", "0", *FLAGS]
    with (
        subprocess.Popen([*command, f"--api-keys-file={keys}"], stdout=subprocess.PIPE, text=True) as process,
        ThreadPoolExecutor(8) as threads,
    ):
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found
            url = found.group()
            chat = [7 + index % 200 for index in range(400)]  # 25 of 128 blocks
            ask(url, "b", chat, max_tokens=1)
            cached_tokens = ask(url, "b", [*chat, 8], max_tokens=1)["prompt_tokens_details"]["cached_tokens"]
            assert cached_tokens >= 384
            flood = [
                threads.submit(
                    ask, url, "a", [9 + (index * 31 + place) % 200 for place in range(300)], max_tokens=300, n=2
                )
                for index in range(8)
            ]
            wait(flood, return_when=FIRST_COMPLETED)
            usage = ask(url, "b", [*chat, 8], max_tokens=4)
            assert not all(each.done() for each in flood)
            assert usage["prompt_tokens_details"]["cached_tokens"] == cached_tokens
            assert [each.result()["completion_tokens"] for each in flood] == [600] * 8
            assert metric(url, "openinfer_share_preemptions_total") > 0
        finally:
            process.kill()
