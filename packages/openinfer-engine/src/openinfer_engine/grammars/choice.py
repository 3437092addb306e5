"""Which grammar compiler serves an engine: a plug-in by name, or llguidance where it is installed."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from openinfer_core import Plugin, Refused, find_plugin
from openinfer_core.errors import brought_by
from openinfer_core.grammars import GrammarCompiler, Vocabulary
from openinfer_core.plugins import GRAMMAR_COMPILERS
from openinfer_core.tokenizer_files import read_tokenizer

OPENINFER_CONTRACT = 1

AUTO = "auto"
NONE = "none"
LLGUIDANCE = "llguidance"
_NOT_INSTALLED = f"grammar_compiler is llguidance, which is not installed: {brought_by()}"


def choose_grammar_compiler(
    name: str, model_dir: Path, *, is_installed: Callable[[str], bool] = lambda module: find_spec(module) is not None
) -> Plugin | None:
    """The compiler that an option asks for; None for none.

    Raises:
        Refused: llguidance is asked for and not installed.
        PluginError: no package offers the name.
    """
    if name == NONE:
        return None
    if name == AUTO:
        possible = is_installed(LLGUIDANCE) and read_tokenizer(model_dir) is not None
        return find_plugin(GRAMMAR_COMPILERS, LLGUIDANCE) if possible else None
    if name == LLGUIDANCE and not is_installed(LLGUIDANCE):
        raise Refused(_NOT_INSTALLED)
    return find_plugin(GRAMMAR_COMPILERS, name)


def no_grammars_because(*, is_installed: Callable[[str], bool] = lambda module: find_spec(module) is not None) -> str:
    """What a start says where `auto` found no compiler: which requests are refused, why, and what to do."""
    refused = 'JSON schemas, grammars, named tools and tool_choice "required" are refused: '
    if not is_installed(LLGUIDANCE):
        return f"{refused}llguidance is not installed; {brought_by()}"
    return f"{refused}the model folder has no tokenizer that is read here"


def make_grammar_compiler(plugin: Plugin | None, vocabulary: Vocabulary) -> GrammarCompiler | None:
    """Raises `BrokenPlugin`, or `Refused` if it cannot serve this model."""
    if plugin is None:
        return None
    return plugin.make(vocabulary, contract=GrammarCompiler)


def llguidance_compiler(vocabulary: Vocabulary) -> GrammarCompiler:
    """The entry point `llguidance`, loaded when chosen. Raises `Refused`: it, or a tokenizer, is not there."""
    if find_spec(LLGUIDANCE) is None:
        raise Refused(_NOT_INSTALLED)
    from openinfer_engine.grammars.compiler import LlguidanceCompiler

    return LlguidanceCompiler(vocabulary)
