"""Command-line agents as clients: each question is a process of its own, with the weather's tool from an MCP server."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import scenarios as s

POLL_S = 0.1
MCP = Path(__file__).with_name("weather_mcp.py")


class Agent:
    """An agent whose command prints JSON objects, one a line.

    Attributes:
        refused: what an error must name: agents send no temperature, so it is the model.
    """

    refused = "no-such-model"

    def __init__(self, command: str, url: str, asked: s.Asked) -> None:
        self.command = str(Path.cwd() / "node_modules" / ".bin" / command)
        self.url = url
        self.asked = asked
        self.home = Path(os.environ["HOME"])
        self.record = self.home / "asked"
        self.folder = self.home / "work"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    @property
    def mcp(self) -> tuple[str, Sequence[str]]:
        """The MCP server's command and its arguments."""
        return sys.executable, [str(MCP), str(self.record)]

    def start(self, arguments: Sequence[str], **variables: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [self.command, *arguments],
            cwd=self.folder,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )

    def told(self, process: "subprocess.Popen[str]") -> Iterator[dict[str, Any]]:
        """What it prints until it ends."""
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", file=sys.stderr)
                if line.startswith("{"):
                    yield json.loads(line)

    def note_asked(self) -> None:
        """Take over for which cities the MCP server was asked."""
        self.asked.cities += self.record.read_text("utf-8").split() if self.record.exists() else []

    def leave(self, process: "subprocess.Popen[str]") -> None:
        """Interrupt it, as ctrl-c does, once the server answers."""
        while process.poll() is None and not self.is_busy():
            time.sleep(POLL_S)
        process.send_signal(signal.SIGINT)
        list(self.told(process))

    def is_busy(self) -> bool:
        with urllib.request.urlopen(f"{self.url}/load", timeout=s.TIMEOUT_S) as answer:
            return json.load(answer)["server_load"] > 0


def ask(scenario: str) -> str:
    return f"Answer. [openinfer:{scenario}]"
