"""OpenAI's Codex CLI: `codex exec` on /v1/responses; its tools from MCP servers come in namespaces."""

import json
from collections.abc import Sequence
from typing import Any

import cli
import scenarios as s


class Codex(cli.Agent):
    def __init__(self, tiny: str, scripted: str, asked: s.Asked) -> None:
        super().__init__("codex", scripted, asked)

    def exec(self, *arguments: str, model: str = s.MODEL) -> Any:
        command, of_mcp = self.mcp
        provider = f'{{name="openinfer", base_url="{self.url}/v1", wire_api="responses", request_max_retries=0}}'
        settings = {
            "model_provider": '"openinfer"',
            "model_providers.openinfer": provider,
            "mcp_servers.weather": f"{{command={json.dumps(command)}, args={json.dumps(of_mcp)}}}",
        }
        flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        # it calls the weather's tool and no other: the script says so
        fixed = ("--json", "--ephemeral", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        return self.start(["exec", *fixed, *flags, "-m", model, *arguments], CODEX_HOME=str(self.codex_home()))

    def codex_home(self) -> Any:
        folder = self.home / "codex"
        folder.mkdir(exist_ok=True)
        return folder

    def answer(self, *arguments: str) -> str:
        items = [each["item"] for each in self.told(self.exec(*arguments)) if each["type"] == "item.completed"]
        return [item["text"] for item in items if item["type"] == "agent_message"][-1]

    def plain(self) -> str:
        return self.answer(cli.ask("plain"))

    def stream(self) -> Sequence[str]:
        raise NotImplementedError

    def tools(self) -> str:
        self.record.unlink(missing_ok=True)
        text = self.answer(cli.ask("tools"))
        self.note_asked()
        return text

    def schema(self) -> dict[str, Any]:
        file = self.folder / "schema.json"
        file.write_text(json.dumps(s.REPORT_SCHEMA), encoding="utf-8")
        return json.loads(self.answer("--output-schema", str(file), cli.ask("schema")))

    def error(self) -> Exception:
        process = self.exec(cli.ask("plain"), model=self.refused)
        failed = [each for each in self.told(process) if each["type"] == "turn.failed"]
        s.require(process.returncode != 0 and len(failed) == 1, f"ended with {process.returncode}: {failed}")
        return RuntimeError(failed[0]["error"]["message"])

    def abort(self) -> None:
        self.leave(self.exec(cli.ask("abort")))


if __name__ == "__main__":
    s.main(Codex)
