"""What every driver of a Python client does: six scenarios, judged here, told to the matrix as lines of JSON.

    python DRIVER.py TINY_URL SCRIPTED_URL [ARGUMENT ...]

A driver is a class with one method per scenario, handed to `main`. Runs in the client's environment: standard library
only. After `abort` the process waits for a line on standard input, so that the connection that a client has left was
closed by the client, not by the end of its process.
"""

import json
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol, get_args

MODEL = "tiny"
QUESTION = "What is the capital of France?"
REPORT_QUESTION = "What is the weather in Paris?"
TOOLS_QUESTION = "How is the weather in Paris, Rome and Oslo? [openinfer:tools]"
ABORT_QUESTION = "Go on for ever. [openinfer:abort]"
City = Literal["Paris", "Rome", "Oslo"]
CITIES = get_args(City)
TOOL_DESCRIPTION = "Get the current weather of a city."
TOOL_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
REPORT_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": list(CITIES)},
        "degrees": {"type": "integer", "minimum": -90, "maximum": 60},
    },
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": TOOL_DESCRIPTION, "parameters": TOOL_SCHEMA},
}
BAD_TEMPERATURE = -1.0
KEY = "none"
TIMEOUT_S = 120
MAX_TOKENS = 200


def turns(question: str) -> list[Any]:
    return [{"role": "user", "content": question}]


class Driver(Protocol):
    """One client.

    `tools` offers `get_weather`, for which `weather` answers, and asks `TOOLS_QUESTION`; it goes on with the client's
    own loop, where it has one, until there is no further call, and returns the last text. `error` sends
    `BAD_TEMPERATURE` and returns what the client raised, if that is the class that it has for a bad request. `abort`
    leaves after the first piece of text. A driver that has something else refused has its name as `refused`.
    """

    def plain(self) -> str: ...
    def stream(self) -> Iterable[str]: ...
    def tools(self) -> str: ...
    def schema(self) -> dict[str, Any]: ...
    def error(self) -> Exception: ...
    def abort(self) -> None: ...


class Asked:
    """The tool, and for which cities it was called."""

    def __init__(self) -> None:
        self.cities: list[str] = []

    def weather(self, city: str) -> str:
        self.cities.append(city)
        return f"{city} is sunny"


def main(make: Callable[..., Driver]) -> None:
    """Run the scenarios named on standard input's first line."""
    wanted = sys.stdin.readline().split()
    asked = Asked()
    driver = make(sys.argv[1], sys.argv[2], asked, *sys.argv[3:])
    for name in wanted:
        try:
            JUDGES[name](driver, asked)
        except Exception as error:  # noqa: BLE001 - whatever a client raises is its result
            traceback.print_exc()
            tell(name, f"{type(error).__name__}: {error}")
        else:
            tell(name, "")
        if name == "abort":
            sys.stdin.readline()


def tell(name: str, detail: str) -> None:
    print(json.dumps({"scenario": name, "passed": not detail, "detail": " ".join(detail.split())[:300]}), flush=True)


def require(holds: bool, said: object) -> None:  # noqa: FBT001 - an assertion
    if not holds:
        raise AssertionError(str(said))


def plain(driver: Driver, asked: Asked) -> None:
    text = driver.plain()
    require("Paris" in text, f"answered {text!r}")


def stream(driver: Driver, asked: Asked) -> None:
    pieces = [piece for piece in driver.stream() if piece]
    require(len(pieces) > 1, f"came in {len(pieces)} pieces")
    require("Paris" in "".join(pieces), f"answered {pieces!r}")


def tools(driver: Driver, asked: Asked) -> None:
    asked.cities.clear()
    text = driver.tools()
    require(asked.cities == list(CITIES), f"called for {asked.cities}, then said {text!r}")
    require(all(f"{city} is sunny" in text for city in CITIES), f"results did not come back: {text!r}")


def schema(driver: Driver, asked: Asked) -> None:
    report = driver.schema()
    require(set(report) == {"city", "degrees"}, report)
    require(report["city"] in CITIES and isinstance(report["degrees"], int), report)


def error(driver: Driver, asked: Asked) -> None:
    said = str(driver.error())
    require(getattr(driver, "refused", "temperature") in said, f"the error does not name what is wrong: {said}")


def abort(driver: Driver, asked: Asked) -> None:
    driver.abort()


JUDGES = {each.__name__: each for each in (plain, stream, tools, schema, error, abort)}


def catch(kind: type[Exception] | tuple[type[Exception], ...], call: Callable[[], object]) -> Exception:
    """Return what a call raises."""
    try:
        answer = call()
    except kind as raised:
        return raised
    raise AssertionError(f"no error was raised; the answer is {answer!r}")
