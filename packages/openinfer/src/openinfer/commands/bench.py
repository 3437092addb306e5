"""`openinfer bench NAME`: runs a benchmark that an installed package offers (`openinfer.benches`)."""

import argparse
from collections.abc import Sequence

from openinfer_core import find_plugin, list_plugins

BENCHES = "openinfer.benches"


def run(argv: Sequence[str]) -> int:
    """Runs the benchmark named; its own flags follow its name."""
    names = sorted({plugin.name for plugin in list_plugins(BENCHES)})
    parser = argparse.ArgumentParser(
        prog="openinfer bench", description=__doc__, epilog="installed: " + ", ".join(names), allow_abbrev=False
    )
    parser.add_argument("name", metavar="NAME", help="the benchmark; its own flags follow (NAME --help)")
    chosen = parser.parse_args(argv[:1])
    return int(find_plugin(BENCHES, chosen.name).load()(list(argv[1:])))
