"""Two models that take turns on one GPU, by `serve --models`: seconds of each answer, tokens, and memory of the GPU.

    python3 tools/device/turns.py MODEL OTHER [--rounds 3] [--max-tokens 16] [--commit NAME] [--json FILE]
        [-- FLAGS of serve]

MODEL and OTHER are folders with a `config.json` and a tokenizer. A model's later answers are
compared with its first ones: after a wake, and from the prefix cache.
"""

import argparse
import contextlib
import http.client
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from sleep import used_bytes

from openinfer_core.provenance import provenance

GIB = 1 << 30
START_S = 120


class Router:
    """`openinfer serve --models`, as a process."""

    def __init__(self, models: dict[str, Path], flags: list[str], file: Path) -> None:
        lines: list[str] = ["turn_s = 0.0"]
        for name, folder in models.items():
            lines += ["[[models]]", f"name = {json.dumps(name)}"]
            lines.append(f"arguments = {json.dumps(['--model', str(folder), '--device', 'cuda', *flags])}")
        file.write_text("\n".join(lines))
        command = [sys.executable, "-P", "-m", "openinfer.commands.main", "serve", "--models", str(file), "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        said = self.process.stdout.readline()
        if "http://" not in said:
            raise SystemExit(f"the router did not start: {said}")
        self.address = said.split("http://")[1].split(",")[0].strip()

    def complete(self, model: str, *, max_tokens: int) -> tuple[float, list[int]]:
        """Seconds and token ids of a greedy answer."""
        body = {
            "model": model,
            "prompt": list(range(100, 400)),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        begin_s = time.perf_counter()
        with contextlib.closing(http.client.HTTPConnection(self.address, timeout=60)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
        if response.status != 200:
            raise SystemExit(f"{model} answered {response.status}: {answer}")
        return time.perf_counter() - begin_s, answer["choices"][0]["token_ids"]

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--commit")
    parser.add_argument("--json", type=Path)
    own, flags = sys.argv[1:], list[str]()
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    arguments = parser.parse_args(own)
    idle_bytes, begin_s = used_bytes(), time.perf_counter()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        models = {"first": arguments.models[0].resolve(), "second": arguments.models[1].resolve()}
        router = Router(models, flags, Path(folder) / "models.toml")
        try:
            start = {"what": "start", "seconds": round(time.perf_counter() - begin_s, 2)}
            rows.append(start | {"gib": round((used_bytes() - idle_bytes) / GIB, 2)})
            print(rows[-1], flush=True)
            rows += take_turns(router, list(models), arguments, idle_bytes)
        finally:
            router.end()
    if arguments.json is not None:
        set_up = {"models": [each.name for each in arguments.models], "flags": flags}
        report = {**msgspec.to_builtins(provenance(commit=arguments.commit)), "set_up": set_up, "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(row.get("equal", True) for row in rows) else 1


def take_turns(
    router: Router, names: list[str], arguments: argparse.Namespace, idle_bytes: int
) -> list[dict[str, object]]:
    first: dict[str, list[int]] = {}
    rows: list[dict[str, object]] = []
    for _ in range(arguments.rounds):
        for name in names:
            for what in ("woken", "awake"):
                seconds, token_ids = router.complete(name, max_tokens=arguments.max_tokens)
                equal = token_ids == first.setdefault(f"{name} {what}", token_ids)
                gib = round((used_bytes() - idle_bytes) / GIB, 2)
                rows.append({"what": f"{name}, {what}", "seconds": round(seconds, 3), "gib": gib, "equal": equal})
                print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
