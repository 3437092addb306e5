"""Hand-written prompts in the shapes that users and client libraries send.

They are a demonstration, not a held-out set: nothing keeps the generator from drawing some of the same sentences.
"""

from dataclasses import dataclass
from typing import Any

COMPLETIONS = (
    "The capital of France is",
    "The capital of Japan is",
    "The chemical symbol for gold is",
    "The opposite of hot is",
    "2 + 2 =",
    "Once upon a time there was a brave",
)
QUESTIONS = (
    "What is the capital of France?",
    "Who wrote Hamlet?",
    "What is 7 + 5?",
    "Hello!",
    "Tell me a story about a fox.",
    "Who will win the election?",
)


@dataclass(frozen=True, slots=True)
class Case:
    """A question, the functions offered with it, and the calls it wants."""

    question: str
    tools: tuple[dict[str, Any], ...]
    calls: tuple[dict[str, Any], ...]


def _tool(name: str, description: str, properties: dict[str, Any], **rest: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties), **rest}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_WEATHER = _tool("get_weather", "Get the current weather in a city", {"city": {"type": "string"}})
_WEATHER_OF_LOCATION = _tool(
    "get_current_weather",
    "Get the current weather in a given location",
    {"location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"}},
)
_WEATHER_WITH_UNIT = _tool(
    "get_weather",
    "Get current temperature for a given location.",
    {
        "location": {"type": "string", "description": "City and country e.g. Bogota, Colombia"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    required=["location"],
    additionalProperties=False,
)
_TIME = _tool("get_time", "Get the current time in a city", {"city": {"type": "string"}})
_ADD = _tool("add", "Add two numbers", {"a": {"type": "number"}, "b": {"type": "number"}})
_SEARCH = _tool("search", "Search the web", {"query": {"type": "string", "description": "What to search for"}})
_STOCK = _tool("get_stock_price", "Get the current stock price", {"symbol": {"type": "string"}})


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


CASES = (
    Case("What is the weather in Paris?", (_WEATHER,), (_call("get_weather", city="Paris"),)),
    Case("What's the weather like in Paris today?", (_WEATHER_WITH_UNIT,), (_call("get_weather", location="Paris"),)),
    Case(
        "What is the weather in Tokyo in celsius?",
        (_WEATHER_WITH_UNIT, _TIME),
        (_call("get_weather", location="Tokyo", unit="celsius"),),
    ),
    Case(
        "What is the weather like in Boston, MA?",
        (_WEATHER_OF_LOCATION,),
        (_call("get_current_weather", location="Boston, MA"),),
    ),
    Case("What time is it in Berlin?", (_WEATHER, _TIME), (_call("get_time", city="Berlin"),)),
    Case("What is 17 plus 25?", (_ADD, _WEATHER), (_call("add", a=17, b=25),)),
    Case("Search for cheap flights.", (_SEARCH, _WEATHER, _TIME), (_call("search", query="cheap flights"),)),
    Case("What is the stock price of AAPL?", (_STOCK,), (_call("get_stock_price", symbol="AAPL"),)),
    Case(
        "What is the weather in Paris and London?",
        (_WEATHER,),
        (_call("get_weather", city="Paris"), _call("get_weather", city="London")),
    ),
    Case("What is the capital of France?", (_WEATHER,), ()),
    Case("Hello!", (_WEATHER, _TIME), ()),
)
