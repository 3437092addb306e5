"""Write what all packages say of themselves in the same words: Python versions, classifiers, keywords, addresses.

    ./run metadata            # tests/test_workspace.py fails until it has been run

The project files stay complete and static, so that an installer reads a checkout without building anything.
"""

import json
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "https://github.com/openinfer/openinfer"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
CLASSIFIERS = [
    "Development Status :: 4 - Beta",
    "Intended Audience :: Developers",
    "Operating System :: POSIX :: Linux",
    "Programming Language :: Python :: 3",
    *(f"Programming Language :: Python :: {version}" for version in PYTHONS),
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
]
KEYWORDS = ["inference", "large language models", "llm", "serving"]
_TABLE = re.compile(r"^\[project\.urls\]\n(?:[^\[\n].*\n)*\n?", re.MULTILINE)
_LISTS = re.compile(r"^(?:classifiers|keywords) = \[(?:[^\]]|\n)*?\]\n", re.MULTILINE)
_ANCHOR = re.compile(r'^requires-python = ".*"\n', re.MULTILINE)
_NEXT_TABLE = re.compile(r"^\[(?!build-system\]|project\])", re.MULTILINE)


def urls(folder: Path) -> dict[str, str]:
    place = f"{REPOSITORY}/tree/main/{folder.parent.name}/{folder.name}"
    return {
        "Changelog": f"{place}/CHANGELOG.md",
        "Documentation": f"{place}#readme",
        "Homepage": REPOSITORY,
        "Issues": f"{REPOSITORY}/issues",
        "Source": place,
    }


def expected(folder: Path) -> dict[str, object]:
    return {"classifiers": CLASSIFIERS, "keywords": KEYWORDS, "urls": urls(folder)}


def written(text: str, folder: Path) -> str:
    """Return a project file with the common tables, whatever it had of them before."""
    text = _LISTS.sub("", _TABLE.sub("", text))
    classifiers = "".join(f"  {json.dumps(line)},\n" for line in CLASSIFIERS)
    lists = f"classifiers = [\n{classifiers}]\nkeywords = {json.dumps(KEYWORDS)}\n"
    text = _ANCHOR.sub(lambda found: found.group() + lists, text, count=1)
    table = "[project.urls]\n" + "".join(f'{name} = "{url}"\n' for name, url in urls(folder).items())
    place = _NEXT_TABLE.search(text)
    assert place is not None, folder
    return f"{text[: place.start()]}{table}\n{text[place.start() :]}"


def main() -> int:
    for file in sorted([*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("examples/*/pyproject.toml")]):
        text = file.read_text(encoding="utf-8")
        new = written(text, file.parent)
        assert all(tomllib.loads(new)["project"][key] == value for key, value in expected(file.parent).items())
        if new != text:
            file.write_text(new, encoding="utf-8")
            print(f"metadata: {file.relative_to(ROOT)} is written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
