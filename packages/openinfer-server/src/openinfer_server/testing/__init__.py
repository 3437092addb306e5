"""Fakes and conformance kits for tests of this server and of what is built on it.

fakes     `ParrotLoop`, an engine that repeats its prompt, `ScriptedLoop`, one that follows a script; `ThreadedServer`
parsers   `check_tool_parser`, `check_reasoning_parser`: the contract of parsers, in every way of cutting a text
"""

from openinfer_server.testing.fakes import (
    DEADLINE_S,
    ParrotLoop,
    RecordingEngine,
    ScriptedLoop,
    ThreadedServer,
    wait_until,
)

__all__ = ["DEADLINE_S", "ParrotLoop", "RecordingEngine", "ScriptedLoop", "ThreadedServer", "wait_until"]
