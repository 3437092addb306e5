"""Anthropic's Claude Code CLI: `claude --print` on /v1/messages."""

import json
from collections.abc import Sequence
from typing import Any

import cli
import scenarios as s

TOOL = "mcp__weather__get_weather"


class ClaudeCode(cli.Agent):
    def __init__(self, tiny: str, scripted: str, asked: s.Asked) -> None:
        super().__init__("claude", scripted, asked)

    def print(self, scenario: str, *arguments: str, model: str = s.MODEL) -> Any:
        command, of_mcp = self.mcp
        servers = json.dumps({"mcpServers": {"weather": {"command": command, "args": of_mcp}}})
        fixed = ("--output-format", "stream-json", "--verbose", "--include-partial-messages", "--strict-mcp-config")
        variables = {
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": s.KEY,
            "ANTHROPIC_SMALL_FAST_MODEL": s.MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CONFIG_DIR": str(self.home / "claude"),
            "CLAUDE_CODE_MAX_RETRIES": "0",
        }
        flags = ["--print", *fixed, "--model", model, "--mcp-config", servers, "--allowedTools", TOOL, *arguments]
        return self.start([*flags, "--", cli.ask(scenario)], **variables)

    def result(self, scenario: str, *arguments: str) -> dict[str, Any]:
        (result,) = (each for each in self.told(self.print(scenario, *arguments)) if each["type"] == "result")
        s.require(not result["is_error"], result)
        return result

    def plain(self) -> str:
        return self.result("plain")["result"]

    def stream(self) -> Sequence[str]:
        events = [each["event"] for each in self.told(self.print("stream")) if each["type"] == "stream_event"]
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        return [delta["text"] for delta in deltas if delta["type"] == "text_delta"]

    def tools(self) -> str:
        self.record.unlink(missing_ok=True)
        text = self.result("tools")["result"]
        self.note_asked()
        return text

    def schema(self) -> dict[str, Any]:
        return self.result("schema", "--json-schema", json.dumps(s.REPORT_SCHEMA))["structured_output"]

    def error(self) -> Exception:
        process = self.print("plain", model=self.refused)
        (result,) = (each for each in self.told(process) if each["type"] == "result")
        s.require(result["is_error"], result)
        return RuntimeError(result["result"])

    def abort(self) -> None:
        self.leave(self.print("abort"))


if __name__ == "__main__":
    s.main(ClaudeCode)
