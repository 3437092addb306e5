"""The site of `docs/`: mkdocs calls these hooks, and `./run docs` runs mkdocs.

    ./run docs                 # builds .run/site, strictly: a broken link or an unknown name ends it
    ./run docs --serve         # on http://127.0.0.1:8001, rebuilt at each change

The pages are written to be read in the repository. Here links to what lies outside docs/ become addresses of the
repository, and each package gets a page with what its `__all__` promises, from the docstrings.
"""

import argparse
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = {"Reference": "Reference", "Api": "Python API", "Notes": "Laboratory notes"}  # folders' names, in order
_LINK = re.compile(r"(\]\()(?!https?://|#|mailto:)([^)#\s]+)")


def outside_links(markdown: str, page: str, repository: str) -> str:
    """Return a page of docs/ whose links to other parts of the repository go there."""

    def replaced(found: re.Match[str]) -> str:
        parts: list[str] = []
        for part in (PurePosixPath("docs") / PurePosixPath(page).parent / found.group(2)).parts:
            parts = parts[:-1] if part == ".." else [*parts, part]
        if parts[:1] == ["docs"]:
            return f"{found.group(1)}{os.path.relpath('/'.join(parts[1:]), Path(page).parent)}"
        kind = "tree" if (ROOT / Path(*parts)).is_dir() else "blob"
        return f"{found.group(1)}{repository}/{kind}/main/{'/'.join(parts)}"

    return _LINK.sub(replaced, markdown)


def api_pages() -> dict[str, str]:
    """Map each package's page to its text, which mkdocstrings fills."""
    pages = {}
    for file in sorted(ROOT.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        module = project["name"].replace("-", "_")
        pages[f"api/{module}.md"] = f"# {project['name']}\n\n{project['description']}\n\n::: {module}\n"
    return pages


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, text in api_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_nav(nav: Any, config: Any, files: Any) -> Any:
    """Put pages before folders, and folders in their order."""
    del config, files
    order = list(SECTIONS)
    nav.items.sort(key=lambda item: order.index(item.title) if item.is_section else -1)
    for item in nav.items:
        if item.is_section:
            item.title = SECTIONS[item.title]
    return nav


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    del files
    return outside_links(markdown, page.file.src_uri, config["extra"]["repository"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--serve", action="store_true", help="serve it on http://127.0.0.1:8001")
    command = ["serve", "--dev-addr", "127.0.0.1:8001"] if parser.parse_args().serve else ["build", "--strict"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run([sys.executable, "-m", "mkdocs", *command], cwd=ROOT, env=environment, check=False)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
