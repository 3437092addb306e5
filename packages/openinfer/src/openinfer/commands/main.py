"""The entry point of the `openinfer` command; `subcommands` does the work, once the packages are known to fit."""

import sys
from collections.abc import Sequence

from openinfer.core_fits import misfit_of_core

EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns its exit code, 2 for what the user can mend."""
    try:
        from openinfer.commands.subcommands import run
    except ImportError as error:  # an older core has no words for it, so the sentence is made here
        print(f"openinfer: {misfit_of_core(error)}", file=sys.stderr)
        return EXIT_USAGE
    return run(list(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    raise SystemExit(main())
