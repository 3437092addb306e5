"""Run inside an environment that holds one package and what it requires: import it, and print what is installed.

    python -I installed.py NAME     # prints {"size_bytes": {distribution: bytes}, "families": [distribution, ...]}

The import and the loading of each entry point come first: both must work with the declared requirements alone.
"""

import importlib
import json
import sys
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path


def main(name: str) -> None:
    importlib.import_module(name.replace("-", "_"))
    for entry_point in distribution(name).entry_points:
        entry_point.load()
    found = {normalized(each): each for each in distributions()}
    size_bytes = {key: installed_bytes(each) for key, each in found.items()}
    families = [key for key, each in found.items() if each.entry_points.select(group="openinfer.models")]
    print(json.dumps({"size_bytes": size_bytes, "families": families}))


def normalized(each: Distribution) -> str:
    return each.metadata["Name"].lower().replace("_", "-").replace(".", "-")


def installed_bytes(each: Distribution) -> int:
    """Sum the files of a distribution as they lie on disk; compiled caches, which come later, do not count."""
    files = (Path(str(each.locate_file(entry))) for entry in each.files or () if entry.suffix != ".pyc")
    return sum(file.stat().st_size for file in files if file.exists())


if __name__ == "__main__":
    main(sys.argv[1])
