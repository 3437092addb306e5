"""Mistral's format since tokenizer v11: special tokens before the name and before the arguments, nothing after them.

    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}

Source: https://github.com/mistralai/mistral-common.
"""

import re

from openinfer_server.parsers import CallParser, Markers, ModelTraits, Script

BEGIN, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_BEGIN = Markers(BEGIN)
_NAME = re.compile(r"[\w.-]*")


class MistralParser(CallParser):
    """Arguments are handed on as they come."""

    visible_tokens = (BEGIN, ARGUMENTS)

    @classmethod
    def claims(cls, traits: ModelTraits) -> bool:
        """Whether the template writes both tokens."""
        return BEGIN in traits.template and ARGUMENTS in traits.template

    def run(self) -> Script[None]:
        """Content and calls, to the end."""
        while (yield from self.content_until(_BEGIN)):
            self.begin_tentative(BEGIN)
            name = yield from self.run_of(_NAME)
            if name and (yield from self.literal(ARGUMENTS)) and (yield from self.peek()) == "{":
                self.begin_call(name)
                yield from self.json_value(self.arguments)
                self.end_call()
            else:
                self.give_up()
