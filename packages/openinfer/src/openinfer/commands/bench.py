"""`openinfer bench NAME`: runs a benchmark of an installed package (`openinfer.benches`)."""

import argparse
from collections.abc import Sequence

from openinfer_core import Refused, find_plugin, list_plugins
from openinfer_core.errors import brought_by
from openinfer_core.plugins import Lister, installed

BENCHES = "openinfer.benches"


def run(argv: Sequence[str], *, lister: Lister = installed) -> int:
    """Runs the benchmark named; its own flags follow its name. Raises `Refused` if no package offers one."""
    names = sorted({plugin.name for plugin in list_plugins(BENCHES, lister=lister)})
    if not names:
        raise Refused(f"no benchmark is installed; openinfer-bench has them: {brought_by()}")
    parser = argparse.ArgumentParser(
        prog="openinfer bench", description=__doc__, epilog="installed: " + ", ".join(names), allow_abbrev=False
    )
    parser.add_argument("name", metavar="NAME", help="the benchmark; its own flags follow (NAME --help)")
    chosen = parser.parse_args(argv[:1])
    return int(find_plugin(BENCHES, chosen.name, lister=lister).load()(list(argv[1:])))
