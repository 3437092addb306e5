"""A server of the Model Context Protocol with one tool, `get_weather`, for agents that take their tools from such.

    python weather_mcp.py FILE      # the cities it was asked for are appended to FILE, one a line

Speaks JSON-RPC over standard input and output, one message a line. Standard library only.
"""

import json
import sys
from pathlib import Path
from typing import Any

import scenarios as s

TOOL = {"name": "get_weather", "description": s.TOOL_DESCRIPTION, "inputSchema": s.TOOL_SCHEMA}


def main(file: Path) -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message and "method" in message:
            answer = {
                "jsonrpc": "2.0",
                "id": message["id"],
                **answered(message["method"], message.get("params", {}), file),
            }
            print(json.dumps(answer), flush=True)


def answered(method: str, params: dict[str, Any], file: Path) -> dict[str, Any]:
    if method == "initialize":
        server = {"name": "weather", "version": "1.0"}
        return {
            "result": {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": server,
            }
        }
    if method == "tools/list":
        return {"result": {"tools": [TOOL]}}
    if method == "tools/call":
        city = params["arguments"]["city"]
        with file.open("a", encoding="utf-8") as asked:
            asked.write(f"{city}\n")
        return {"result": {"content": [{"type": "text", "text": s.Asked().weather(city)}]}}
    if method == "ping":
        return {"result": {}}
    return {"error": {"code": -32601, "message": f"no method {method}"}}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
