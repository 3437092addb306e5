"""Answers as models write them, in each format that comes with the server: what its parsers are checked with."""

from collections.abc import Mapping
from typing import Any

# Functions on offer -> JSON Schema of their parameters.
TOOLS: Mapping[str, Mapping[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["city"],
    },
    "write_file": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "content": {"type": "string"},
            "options": {"$ref": "#/$defs/Options"},
        },
        "$defs": {"Options": {"type": "object", "properties": {"modes": {"type": "array"}}}},
    },
    "now": {"type": "object", "properties": {}},
}

# Name in `openinfer.tool_parsers` -> answers.
TOOL_TEXTS: Mapping[str, tuple[str, ...]] = {
    "hermes": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich \\"old\\" town", "days": 3}}\n</tool_call>',
        (
            'I look it up.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>\n'
            '{"name": "write_file", "arguments": {"path": "a.txt", "content": "</tool_call> }{ \\\\ 🙂"}}\n</tool_call>'
        ),
        '<tool_call>{"arguments": {"city": "Rome"}, "name": "get_weather"}</tool_call>\nDone.',
        "A call stands between <tool_call> and </tool_call>; {braces} do not matter.",
    ),
    "qwen3-coder": (
        (
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
            "<parameter=metric>\nTrue\n</parameter>\n<parameter=note>\nnull\n</parameter>\n</function>\n</tool_call>"
        ),
        (
            "I write it.\n\n<tool_call>\n<function=write_file>\n<parameter=path>\na.py\n</parameter>\n"
            "<parameter=content>\nif a < b:\n"
            '    print("\\n🙂")\n\n</parameter>\n<parameter=options>\n'
            '{"modes": [1, "x"]}\n</parameter>\n</function>\n</tool_call>\n'
            "<tool_call>\n<function=now>\n</function>\n</tool_call>"
        ),
        "<function=get_weather>\n<parameter=city>\nRome\n<parameter=days>\nmany\n</parameter>\n</function>\nDone.",
        "A function is written as <function=name> between <tool_call> tags.",
    ),
    "deepseek-v3": (
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            '{"city": "Zürich", "days": 3}\n```<｜tool▁call▁end｜>\n'
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n"
            "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        (
            "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>write_file<｜tool▁sep｜>"
            '{"path": "a", "content": "```\\n<｜tool▁call▁end｜>🙂"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>Done.'
        ),
        "No call, ```json\n{}\n``` only.",
    ),
    "deepseek-v4": (
        (
            'I look it up.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
            '<｜DSML｜parameter name="city" string="true">Zürich "old"\ntown</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
        ),
        (
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="write_file">\n'
            '<｜DSML｜parameter name="content" string="true">if a < b: 🙂\n</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="options" string="false">{"modes": [1, "x"]}</｜DSML｜parameter>'
            "\n</｜DSML｜invoke>\n"
            "</｜DSML｜function_calls>"
        ),
        "Tags begin with <｜DSML｜, as in <｜DSML｜invoke.",
    ),
    "kimi-k2": (
        (
            "I look it up.<|tool_calls_section_begin|>"
            "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
            '{"city": "Zürich", "days": 3}<|tool_call_end|>'
            "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>"
            "{}<|tool_call_end|><|tool_calls_section_end|>"
        ),
        (
            "<|tool_call_begin|>write_file:7<|tool_call_argument_begin|>\n"
            '{"path": "a", "content": "<|tool_call_end|> \\" 🙂"}\n<|tool_call_end|>Done.'
        ),
        "No call <| at all |>.",
    ),
}

# Name in `openinfer.reasoning_parsers` -> answers.
REASONING_TEXTS: Mapping[str, tuple[str, ...]] = {
    "qwen3": (
        "<think>\nThe user asks … 🙂\n\nSo </thin k> it is.\n</think>\n\nParis.\n",
        "The tag <think> opens a block, and </think> ends it.",
        "I am already thinking.\n</think>\n\nRome.",
        "<think>\n\n</think>\n\nYes.",
    ),
    "deepseek": (
        "<think>Okay, the user …\n</think>Paris.",
        "I am already thinking.</think>\n\nRome.",
        "Without any thought.",
    ),
    "kimi-k2": (
        "<think>I need the weather.</think>Let me look.",
        (
            "<think>I need the weather.<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
        ),
        "Without any thought.",
    ),
}

# Ends of prompts: reasoning not opened, opened, and closed.
REASONING_PROMPTS = ("<|im_start|>assistant\n", "<｜Assistant｜><think>\n", "<think>\n\n</think>\n\n")

# Reasoning and tool parsers that serve one model.
PAIRS = (
    ("qwen3", "hermes"),
    ("qwen3", "qwen3-coder"),
    ("deepseek", "deepseek-v3"),
    ("deepseek", "deepseek-v4"),
    ("kimi-k2", "kimi-k2"),
)
