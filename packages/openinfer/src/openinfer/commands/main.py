"""The entry point of the `openinfer` command; `subcommands` does the work, once the packages are known to fit."""

import os
import select
import sys
from collections.abc import Sequence

from openinfer.core_fits import misfit_of_core

EXIT_USAGE = 2
EXIT_UNREAD = 128 + 13  # what a shell says of a command that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns its exit code, 2 for what the user can mend."""
    try:
        from openinfer.commands.subcommands import run
    except ImportError as error:  # an older core has no words for it, so the sentence is made here
        print(f"openinfer: {misfit_of_core(error)}", file=sys.stderr)
        return EXIT_USAGE
    try:
        code = run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_unread():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
        return EXIT_UNREAD
    return code


def _is_unread() -> bool:
    """Whether what read standard output has ended, as `| head` does."""
    if sys.platform == "win32":  # where no pipe can be asked
        return False
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return bool(output.poll(0))


if __name__ == "__main__":
    raise SystemExit(main())
