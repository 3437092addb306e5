"""`openinfer completion bash|zsh|fish`: prints what completes commands and flags in a shell.

openinfer completion bash > ~/.local/share/bash-completion/completions/openinfer
openinfer completion zsh > ~/.zfunc/_openinfer              # ~/.zfunc on fpath
openinfer completion fish > ~/.config/fish/completions/openinfer.fish
"""

import argparse
import shlex
from collections.abc import Mapping, Sequence

from openinfer.commands import chat, generate, plan, serve
from openinfer.commands.model_arguments import complete_parser
from openinfer_core import list_plugins
from openinfer_core.plugins import MODELS

# command -> flag -> the values that it takes; none for flags of another kind
Tree = Mapping[str, Mapping[str, Sequence[str]]]

_SHELLS = ("bash", "zsh", "fish")
_CONFIGURES = {"serve": serve.configure, "chat": chat.configure, "generate": generate.configure, "plan": plan.configure}


def run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="openinfer completion", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shell", choices=_SHELLS)
    shell = parser.parse_args(argv).shell
    print({"bash": for_bash, "zsh": for_zsh, "fish": for_fish}[shell](flags_of_commands()), end="")
    return 0


def flags_of_commands() -> Tree:
    """Every command, and the flags of those that load a model, with the options of all installed families."""
    from openinfer.commands.subcommands import all_commands

    options = list(dict.fromkeys(plugin.load()().options_type for plugin in list_plugins(MODELS)))
    tree: dict[str, dict[str, Sequence[str]]] = {name: {} for name in all_commands()}
    for command, configure in _CONFIGURES.items():
        parser = complete_parser(command, configure, options)
        tree[command] = {name: _values_of(action) for name, action in sorted(parser.flags.items())}
    return tree


def _values_of(action: argparse.Action) -> Sequence[str]:
    if action.choices:
        return [str(choice) for choice in action.choices]
    metavar = action.metavar
    return metavar.split("|") if isinstance(metavar, str) and metavar.islower() and "|" in metavar else []


def for_bash(tree: Tree) -> str:
    cases = [f"    {name}) words={shlex.quote(' '.join(flags))} ;;" for name, flags in tree.items() if flags]
    values = {flag: values for flags in tree.values() for flag, values in flags.items() if values}
    of_values = [
        f'    {flag}) COMPREPLY=($(compgen -W {shlex.quote(" ".join(values))} -- "$word")); return ;;'
        for flag, values in values.items()
    ]
    return "\n".join(
        [
            "_openinfer() {",
            '  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words=""',
            "  if ((COMP_CWORD == 1)); then",
            f'    COMPREPLY=($(compgen -W {shlex.quote(" ".join(tree))} -- "$word")); return',
            "  fi",
            '  case "$before" in',
            *of_values,
            "  esac",
            '  case "${COMP_WORDS[1]}" in',
            *cases,
            "  esac",
            '  [[ $word == -* ]] && COMPREPLY=($(compgen -W "$words" -- "$word"))',
            "}",
            "complete -o default -F _openinfer openinfer",
            "",
        ]
    )


def for_zsh(tree: Tree) -> str:
    """Bash's, which zsh understands."""
    return "#compdef openinfer\nautoload -U +X bashcompinit && bashcompinit\n" + for_bash(tree)


def for_fish(tree: Tree) -> str:
    lines = [f"complete -c openinfer -n __fish_use_subcommand -f -a {shlex.quote(' '.join(tree))}"]
    for command, flags in tree.items():
        for flag, values in flags.items():
            line = f"complete -c openinfer -n '__fish_seen_subcommand_from {command}' -l {flag.removeprefix('--')}"
            lines.append(f"{line} -x -a {shlex.quote(' '.join(values))}" if values else line)
    return "\n".join([*lines, ""])
