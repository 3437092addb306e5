"""Tool calls and reasoning out of text: the contract, the parsers that come with the server, and how they are chosen.

Nothing here knows HTTP or any endpoint. An endpoint asks `ModelParsers.open` for an `OutputParser` per answer, feeds it
the answer's text as it comes, and writes the deltas in its own form.
"""

from openinfer_server.parsers.calls import CallParser
from openinfer_server.parsers.choose import ModelParsers, choose_parsers
from openinfer_server.parsers.contract import ModelTraits, OutputTextParser, ParserContext, ReasoningParser, ToolParser
from openinfer_server.parsers.deltas import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentDelta,
    Delta,
    ReasoningDelta,
    merge,
)
from openinfer_server.parsers.output import OutputParser, ParserFault
from openinfer_server.parsers.script import Script, ScriptedParser
from openinfer_server.parsers.syntax.call_syntax import CallableFunction, CallSyntax, CallWriter, LarkTexts
from openinfer_server.parsers.syntax.markers import Markers
from openinfer_server.parsers.tagged_arguments import TaggedArgumentsParser

__all__ = [
    "CallArguments",
    "CallEnd",
    "CallParser",
    "CallStart",
    "CallSyntax",
    "CallWriter",
    "CallableFunction",
    "ContentDelta",
    "Delta",
    "LarkTexts",
    "Markers",
    "ModelParsers",
    "ModelTraits",
    "OutputParser",
    "OutputTextParser",
    "ParserContext",
    "ParserFault",
    "ReasoningDelta",
    "ReasoningParser",
    "Script",
    "ScriptedParser",
    "TaggedArgumentsParser",
    "ToolParser",
    "choose_parsers",
    "merge",
]
