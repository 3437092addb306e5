"""One file of results from several of `openinfer bench serve`, to stdout: the first one's provenance, all rows."""

import json
import sys
from pathlib import Path

parts = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
whole = parts[0] | {"rows": [row | {"seed": part["set_up"]["seed"]} for part in parts for row in part["rows"]]}
whole["set_up"] = {name: value for name, value in parts[0]["set_up"].items() if name != "seed"}
print(json.dumps(whole, indent=2))
