"""What the tools of this folder record: where and when they ran, and what they saw."""

import json
import os
from pathlib import Path
from typing import Any

from openinfer_core.provenance import provenance


def begun(**more: Any) -> dict[str, Any]:
    """A record of a run that begins: the machine, its load, versions and commit, and what else is said."""
    given = provenance(commit=os.environ.get("COMMIT"))
    seen: dict[str, Any] = {name: getattr(given, name) for name in given.__struct_fields__}
    return seen | {"load_average": round(os.getloadavg()[0], 2)} | more


def say(seen: dict[str, Any], path: Path | None) -> None:
    """Shows a record, and writes it to a file if one is named."""
    print(json.dumps({name: value for name, value in seen.items() if name != "versions"}, indent=1))
    if path is not None:
        path.write_text(json.dumps(seen, indent=1) + "\n", encoding="utf-8")
