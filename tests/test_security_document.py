"""Every test that SECURITY.md names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "packages" / "openinfer-server" / "tests"


def test_every_test_that_the_document_names_exists():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    defined = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    functions = re.findall(r"`(test_\w+)`", text)
    assert len(functions) > 20
    assert [name for name in functions if f"def {name}(" not in defined] == []
    files = re.findall(r"`((?:openinfer-\w+/tests/(?:\w+/)*)?test_\w+\.py)`", text)
    ours = {path.name for path in TESTS.rglob("test_*.py")}
    assert [name for name in files if name not in ours and not (ROOT / "packages" / name).is_file()] == []
