"""Which grammar compiler serves an engine: a plug-in by name, or llguidance where it is installed."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from openinfer_core import Plugin, Refused, find_plugin
from openinfer_core.grammars import GrammarCompiler, MakeGrammarCompiler, Vocabulary
from openinfer_core.plugins import GRAMMAR_COMPILERS

AUTO = "auto"
NONE = "none"
LLGUIDANCE = "llguidance"


def choose_grammar_compiler(
    name: str, model_dir: Path, *, is_installed: Callable[[str], bool] = lambda module: find_spec(module) is not None
) -> Plugin | None:
    """The compiler that an option asks for; None for none.

    Args:
        name: of a plug-in, `auto` or `none`.
        model_dir: `auto` is none for a model without a tokenizer.
        is_installed: whether a module can be imported.

    Raises:
        Refused: llguidance is asked for and not installed.
        PluginError: no package offers the name.
    """
    if name == NONE:
        return None
    if name == AUTO:
        possible = is_installed(LLGUIDANCE) and (model_dir / "tokenizer.json").is_file()
        return find_plugin(GRAMMAR_COMPILERS, LLGUIDANCE) if possible else None
    if name == LLGUIDANCE and not is_installed(LLGUIDANCE):
        raise Refused("grammar_compiler is llguidance, which is not installed; install openinfer-engine[structured]")
    return find_plugin(GRAMMAR_COMPILERS, name)


def make_grammar_compiler(plugin: Plugin | None, vocabulary: Vocabulary) -> GrammarCompiler | None:
    """Begins a compiler.

    Raises:
        BrokenPlugin: it failed to load.
        Refused: it cannot serve this model.
    """
    if plugin is None:
        return None
    make: MakeGrammarCompiler = plugin.load()
    return make(vocabulary)
