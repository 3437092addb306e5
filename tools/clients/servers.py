"""The two servers that clients meet: `openinfer serve` with the tiny model, and the same server before a script."""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from openinfer.models import find_model_dir
from openinfer_core.engine import EngineInfo
from openinfer_server import ServerOptions
from openinfer_server.testing import ScriptedLoop, ThreadedServer, wait_until

from .script import Script

MODEL = "tiny"  # what both servers call their model
ENDPOINTS = ("ollama",)  # further APIs of both
START_S = 300.0
_STEP_S = 0.002  # long enough that an endless answer outlasts every client
_SERVING = f"openinfer: serving {MODEL} on "


@dataclass
class Scripted:
    """The scripted server."""

    server: ThreadedServer
    loop: ScriptedLoop

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def aborted(self) -> int:
        return len(self.server.engine.aborted)

    def is_free(self) -> bool:
        return not self.loop.busy

    def wait_until_free(self) -> None:
        """Wait for the end of what clients have left.

        Raises:
            AssertionError: it did not come.
        """
        wait_until(self.is_free, "the engine is free after the client has left")


@contextlib.contextmanager
def scripted_server() -> Iterator[Scripted]:
    """Start a server whose model follows the script."""
    folder = find_model_dir(MODEL)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stop_token_id = json.loads((folder / "config.json").read_bytes())["eos_token_id"]
    info = EngineInfo(
        model=MODEL,
        family="scripted",
        max_model_tokens=2**20,  # prompts of agents are long
        num_token_ids=tokenizer.get_vocab_size(),
        eos_token_ids=(stop_token_id,),
        block_size_tokens=16,
        num_blocks=2**17,
        max_num_seqs=64,
        max_waiting=256,
    )
    loop = ScriptedLoop(info, Script(tokenizer, stop_token_id), step_s=_STEP_S)
    options = ServerOptions(port=0, model_name=[MODEL], endpoints=ENDPOINTS)
    with ThreadedServer(loop, folder, options) as server:
        yield Scripted(server, loop)


@contextlib.contextmanager
def tiny_server(log: Path) -> Iterator[str]:
    """Run `openinfer serve` with the tiny model; give its address.

    Raises:
        RuntimeError: it did not start.
    """
    program = str(Path(sys.executable).with_name("openinfer"))
    command = (program, "serve", "--model", MODEL, "--port", "0", "--endpoints", ",".join(ENDPOINTS))
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    late = threading.Timer(START_S, process.kill)
    late.start()
    try:
        line = next((each for each in process.stdout if each.startswith(_SERVING)), None)
        late.cancel()
        if line is None:
            raise RuntimeError(f"openinfer serve ended with {process.wait()}: {log.read_text(encoding='utf-8')}")
        yield line.removeprefix(_SERVING).split()[0]
    finally:
        late.cancel()
        process.terminate()
        process.wait(START_S)
        process.stdout.close()
