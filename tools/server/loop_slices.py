"""What holds the event loop of the server, and by which function: `python tools/server/loop_slices.py [--json FILE]`.

    client, this process ──large requests──► server process: every turn of every task is timed

A *slice* is what one task does between two turns of the event loop, in seconds of the loop's own processor time, so
that other processes do not count. The longest is then taken again under a profile (`--functions` prints it). What
else holds the loop, whichever thread it is in, is listed, too: collections of garbage, and calls of C functions that
take long, unless they give the interpreter lock up (those of `tokenizers` that encode do, and so does Python code,
of `any` and `sum` for example). The engine is simulated, and refuses grammars; what is asked stands in `CASES`.
"""

import argparse
import asyncio
import cProfile
import gc
import json
import logging
import pstats
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from http.client import HTTPConnection
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from openinfer_core.process.resident import settle_memory
from openinfer_core.provenance import provenance
from openinfer_core.simulated import SimulatedOptions, spawn_simulated
from openinfer_server import ServerOptions
from openinfer_server.options import EventLoop
from openinfer_server.server import event_loop_factory, serve, yield_interpreter
from openinfer_tiny_model import model_dir

NUM_TOKEN_IDS = 2040
LONG_S = 0.005  # what a slice may take


def many_ids() -> dict[str, Any]:
    """128 prompts of 2,000 ids."""
    return {"prompt": [[(i + j) % NUM_TOKEN_IDS for i in range(2000)] for j in range(128)], "max_tokens": 1}


def one_prompt_of_ids() -> dict[str, Any]:
    """One prompt of 100,000 ids."""
    return {"prompt": [i % NUM_TOKEN_IDS for i in range(100_000)], "max_tokens": 1}


def schema(num_bytes: int) -> dict[str, Any]:
    """A flat schema."""
    properties = {f"property_number_{i}": {"type": "integer", "minimum": i} for i in range(num_bytes // 57)}
    return {"type": "object", "properties": properties, "required": ["property_number_0"]}


def nested_schema(num_bytes: int) -> dict[str, Any]:
    """A schema of many small containers."""
    properties = {
        f"p{i}": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"enum": [1, 2, 3, 4]}}]}
        for i in range(num_bytes // 90)
    }
    return {"type": "object", "properties": properties}


def _user(text: str = "a") -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def _tools(num: int, num_bytes: int) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": f"f{i}", "parameters": nested_schema(num_bytes // num)}}
        for i in range(num)
    ]


def chat_schema() -> dict[str, Any]:
    """A schema of 1 MB as a chat's response_format."""
    answer_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema(1_000_000)}}
    return {"messages": _user(), "max_tokens": 1, "response_format": answer_format}


def completion_schema() -> dict[str, Any]:
    """A schema of 1 MB of many containers, as a completion's structured_outputs."""
    return {"prompt": "a", "max_tokens": 1, "structured_outputs": {"json": nested_schema(1_000_000)}}


def many_choices_of_schema() -> dict[str, Any]:
    """A schema of 240 kB for n = 16."""
    return {"prompt": "a", "n": 16, "max_tokens": 1, "structured_outputs": {"json": nested_schema(240_000)}}


def tools() -> dict[str, Any]:
    """1 MB of 100 tools."""
    return {"messages": _user(), "max_tokens": 1, "tools": _tools(100, 1_000_000)}


def one_tool() -> dict[str, Any]:
    """One tool of 500 kB that must be called."""
    return {"messages": _user(), "max_tokens": 1, "tools": _tools(1, 500_000), "tool_choice": "required"}


def many_turns() -> dict[str, Any]:
    """A chat of 4,000 turns."""
    turns = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"word {i} " * 10} for i in range(3999)]
    return {"messages": turns, "max_tokens": 1}


def long_turn() -> dict[str, Any]:
    """A chat of one turn of 200,000 characters."""
    return {"messages": _user("Once upon a time. " * 11_000), "max_tokens": 1}


def long_text() -> dict[str, Any]:
    """A completion of 200,000 characters."""
    return {"prompt": "Once upon a time. " * 11_000, "max_tokens": 1}


def tokenize() -> dict[str, Any]:
    """A text of 1,000,000 characters to tokenize, whose ids are told."""
    return {"prompt": "Once upon a time. " * 55_000}


def detokenize() -> dict[str, Any]:
    """100,000 ids to detokenize."""
    return {"tokens": [i % NUM_TOKEN_IDS for i in range(100_000)]}


def response_items() -> dict[str, Any]:
    """A response of 4,000 items."""
    items = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"word {i} " * 10} for i in range(3999)]
    return {"input": items, "max_output_tokens": 16}


def response_tools() -> dict[str, Any]:
    """A response with 1 MB of tools."""
    flat = [{"type": "function", "strict": False, **tool["function"]} for tool in _tools(100, 1_000_000)]
    return {"input": "a", "max_output_tokens": 16, "tools": flat}


def message_tools() -> dict[str, Any]:
    """A message with 1 MB of tools."""
    named = [{"name": f"f{i}", "input_schema": nested_schema(10_000)} for i in range(100)]
    return {"model": "simulated", "messages": _user(), "max_tokens": 1, "tools": named}


def message_turns() -> dict[str, Any]:
    """A message of 4,000 turns."""
    return {"model": "simulated", **many_turns()}


def most_elements() -> dict[str, Any]:
    """As many empty objects as a body may have, which is refused."""
    return {"prompt": "a", "max_tokens": 1, "unknown": [{} for _ in range(2**17 - 10)]}


def most_elements_of_schema() -> dict[str, Any]:
    """As many containers in a schema as a body may have."""
    properties = {"enum": [[[i]] for i in range(60_000)]}
    return {"prompt": "a", "max_tokens": 1, "structured_outputs": {"json": properties}}


def echoed_ids() -> dict[str, Any]:
    """128 prompts of 2,000 ids, which the response tells again."""
    return {**many_ids(), "echo": True, "return_token_ids": True}


CASES: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "many-ids": ("/v1/completions", many_ids),
    "one-prompt-of-ids": ("/v1/completions", one_prompt_of_ids),
    "echoed-ids": ("/v1/completions", echoed_ids),
    "chat-schema": ("/v1/chat/completions", chat_schema),
    "completion-schema": ("/v1/completions", completion_schema),
    "most-elements": ("/v1/completions", most_elements),
    "most-elements-of-schema": ("/v1/completions", most_elements_of_schema),
    "schema-n16": ("/v1/completions", many_choices_of_schema),
    "tools": ("/v1/chat/completions", tools),
    "one-tool": ("/v1/chat/completions", one_tool),
    "many-turns": ("/v1/chat/completions", many_turns),
    "long-turn": ("/v1/chat/completions", long_turn),
    "long-text": ("/v1/completions", long_text),
    "tokenize": ("/tokenize", tokenize),
    "detokenize": ("/detokenize", detokenize),
    "response-items": ("/v1/responses", response_items),
    "response-tools": ("/v1/responses", response_tools),
    "message-tools": ("/v1/messages", message_tools),
    "message-turns": ("/v1/messages", message_turns),
}


class Slices:
    """What tasks and threads did, since the last look."""

    def __init__(self) -> None:
        self.profiles = False
        self.longest_s = 0.0
        self.over = 0
        self.lag_s = 0.0
        self.collection_s = 0.0
        self.collection = ""
        self._begun_s: dict[int, float] = {}
        self.profile: cProfile.Profile | None = None
        self.calls: dict[str, float] = {}

    def take(self) -> dict[str, Any]:
        report = {
            "longest_ms": round(self.longest_s * 1e3, 2),
            "over_5_ms": self.over,
            "longest_lag_ms": round(self.lag_s * 1e3, 2),
            "longest_collection_ms": round(self.collection_s * 1e3, 2),
            "collection": self.collection,
            "functions": _hottest(self.profile) if self.profile is not None else [],
            "calls_in_threads_ms": {
                name: round(took_s * 1e3, 2)
                for name, took_s in sorted(self.calls.items(), key=lambda each: -each[1])
                if took_s > LONG_S / 5
            },
        }
        self.longest_s = self.lag_s = self.collection_s = 0.0
        self.over, self.profile, self.calls = 0, None, {}
        return report

    def collected(self, phase: str, about: dict[str, int]) -> None:
        """A callback of the garbage collector, which holds the interpreter in any thread that it runs in."""
        thread = threading.get_ident()
        if phase == "start":
            self._begun_s[thread] = time.thread_time()
            return
        took_s = time.thread_time() - self._begun_s.pop(thread, time.thread_time())
        if took_s > self.collection_s:
            self.collection_s = took_s
            self.collection = f"generation {about['generation']} in {threading.current_thread().name}"

    def note(self, took_s: float, profile: cProfile.Profile | None) -> None:
        self.over += took_s > LONG_S
        if took_s > self.longest_s:
            self.longest_s, self.profile = took_s, profile

    def factory(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> "asyncio.Task[Any]":
        return asyncio.Task(TimedCoroutine(coro, self), loop=loop, **options)

    async def watch(self) -> None:
        while True:
            begin_s = time.perf_counter()
            await asyncio.sleep(0.001)
            self.lag_s = max(self.lag_s, time.perf_counter() - begin_s - 0.001)

    def in_thread(self, frame: Any, event: str, function: Any) -> None:
        """A profile function of other threads: times calls of C functions."""
        stack = _begun.__dict__.setdefault("stack", [])
        if event == "c_call":
            stack.append(time.thread_time())
        elif event in ("c_return", "c_exception") and stack:
            took_s = time.thread_time() - stack.pop()
            name = f"{getattr(function, '__module__', '')}.{function.__qualname__} in {frame.f_code.co_qualname}"
            if took_s > self.calls.get(name, 0.0):
                self.calls[name] = took_s


_begun = threading.local()


class TimedCoroutine(Coroutine[Any, Any, Any]):
    """A coroutine whose slices are timed."""

    def __init__(self, coro: Coroutine[Any, Any, Any], slices: Slices) -> None:
        self._coro = coro
        self._slices = slices

    def send(self, value: Any) -> Any:
        return self._timed(lambda: self._coro.send(value))

    def throw(self, *error: Any) -> Any:
        return self._timed(lambda: self._coro.throw(*error))

    def close(self) -> None:
        self._coro.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coro.__await__()

    def _timed(self, work: Callable[[], Any]) -> Any:
        profile = cProfile.Profile(time.thread_time) if self._slices.profiles else None
        begin_s = time.thread_time()
        if profile is not None:
            profile.enable()
        try:
            return work()
        finally:
            if profile is not None:
                profile.disable()
            self._slices.note(time.thread_time() - begin_s, profile)


def _hottest(profile: cProfile.Profile) -> list[str]:
    try:
        statistics = pstats.Stats(profile, stream=StringIO())
    except TypeError:  # nothing was called
        return []
    rows = sorted(statistics.stats.items(), key=lambda each: -each[1][3])  # type: ignore[attr-defined]
    return [f"{row[3] * 1e3:.1f} ms {Path(name[0]).name}:{name[1]} {name[2]}" for name, row in rows[:14]]


def serve_measured(folder: str, event_loop: str) -> None:
    """The server process: a line `profile`, `threads` or `take` on standard input is answered with one."""
    logging.basicConfig(level=logging.ERROR)
    slices = Slices()
    handle = spawn_simulated(SimulatedOptions(num_token_ids=NUM_TOKEN_IDS, max_model_tokens=2**20, tpot_s=0.002))

    async def serving() -> None:
        loop = asyncio.get_running_loop()
        watch = asyncio.create_task(slices.watch())
        loop.set_task_factory(slices.factory)
        stop = asyncio.Event()
        reading = threading.Thread(target=read, args=(loop, stop), daemon=True)

        def ready(url: str) -> None:
            settle_memory()  # as `run` does
            say(url)
            reading.start()

        options = ServerOptions(
            port=0, event_loop=EventLoop(event_loop), max_request_kv_tokens=2**30, tool_parser="hermes"
        )
        try:
            await serve(handle, Path(folder), options, on_ready=ready, stop=stop)
        finally:
            watch.cancel()
            await handle.close()

    def read(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
        for line in sys.stdin:
            match line.strip():
                case "take":
                    say(json.dumps(slices.take()))
                case "profile":
                    slices.profiles = True
                    say("on")
                case "plain":
                    slices.profiles = False
                    say("off")
                case _:
                    pass
        loop.call_soon_threadsafe(stop.set)

    threading.setprofile(slices.in_thread if "--threads" in sys.argv else None)  # type: ignore[arg-type]
    yield_interpreter()
    gc.callbacks.append(slices.collected)
    with asyncio.Runner(loop_factory=event_loop_factory(EventLoop(event_loop))) as runner:
        runner.run(serving())


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Server:
    """The server process, as its client sees it."""

    def __init__(self, folder: Path, event_loop: str, *flags: str) -> None:
        command = [sys.executable, __file__, "--serve", str(folder), "--event-loop", event_loop, *flags]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        address = urlsplit(self._line())
        self._connection = HTTPConnection(address.hostname or "", address.port, timeout=300)

    def order(self, word: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return self._line()

    def ask(self, path: str, body: bytes) -> int:
        self._connection.request("POST", path, body, {"content-type": "application/json"})
        response = self._connection.getresponse()
        text = response.read()
        if response.status not in (200, 400):  # the simulated engine refuses grammars, when all else is done
            raise SystemExit(f"{path}: {response.status} {text[:300]!r}")
        return response.status

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def measure(server: Server, threads: Server, name: str, *, repeats: int) -> dict[str, Any]:
    """One case: the median and the longest of some requests, and a profile of the longest slice."""
    path, make = CASES[name]
    body = json.dumps(make()).encode()
    status = server.ask(path, body)
    server.order("take")
    reports: list[dict[str, Any]] = []
    for _ in range(repeats):
        server.ask(path, body)
        reports.append(json.loads(server.order("take")))
    server.order("profile")
    server.ask(path, body)
    profiled = json.loads(server.order("take"))
    server.order("plain")
    threads.ask(path, body)
    calls = json.loads(threads.order("take"))["calls_in_threads_ms"]
    longest = sorted(each["longest_ms"] for each in reports)
    return {
        "case": name,
        "what": make.__doc__,
        "status": status,
        "bytes": len(body),
        "longest_slice_ms": {"median": longest[len(longest) // 2], "most": longest[-1]},
        "longest_lag_ms": sorted(each["longest_lag_ms"] for each in reports)[len(reports) // 2],
        "longest_collection_ms": max(each["longest_collection_ms"] for each in reports),
        "longest_collection": max(reports, key=lambda each: each["longest_collection_ms"])["collection"],
        "slices_over_5_ms": max(each["over_5_ms"] for each in reports),
        "functions": profiled["functions"],
        "calls_in_threads_ms": calls,
    }


def model_folder(folder: Path) -> Path:
    """The tiny model's tokenizer, with a template that knows tools."""
    source = model_dir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    (folder / "chat_template.jinja").write_text(
        "{%- for tool in tools or [] %}{{ tool | tojson }}\n{% endfor -%}"
        "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
        "{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
    )
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--threads", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--event-loop", default="uvloop", choices=[each.value for each in EventLoop])
    parser.add_argument("--cases", nargs="+", choices=[*CASES], default=[*CASES])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--functions", action="store_true", help="print which functions the longest slice was in")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.serve:
        serve_measured(arguments.serve, arguments.event_loop)
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model_folder(Path(folder))
        server = Server(Path(folder), arguments.event_loop)
        threads = Server(Path(folder), arguments.event_loop, "--threads")
        for name in arguments.cases:
            row = measure(server, threads, name, repeats=arguments.repeats)
            rows.append(row)
            slices = row["longest_slice_ms"]
            print(f"{name:24} {row['status']} slice {slices['median']:7.2f} ms", end="")
            print(
                f" (most {slices['most']:7.2f}) lag {row['longest_lag_ms']:7.2f} over {row['slices_over_5_ms']}", end=""
            )
            print(f" gc {row['longest_collection_ms']:.2f} {row['longest_collection']}", flush=True)
            if arguments.functions:
                for line in row["functions"]:
                    print("      ", line)
            print("       threads:", row["calls_in_threads_ms"])
        server.end()
        threads.end()
    if arguments.json:
        about = {"event_loop": arguments.event_loop, "repeats": arguments.repeats}
        report = {**msgspec.to_builtins(provenance()), **about, "rows": rows}
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
