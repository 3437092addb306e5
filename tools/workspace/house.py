"""Measure how easy this code base is to move into: sizes, rooms, repeated facts, comments and words.

    ./run house                         # prints the table of this checkout
    ./run house --write FILE            # and keeps it as JSON, with the lists that the numbers were counted from
    ./run house --against FILE          # before and after, side by side
    ./run house --commit 12aa384        # of another commit

"Product" is what a user's process may run: `packages/*/src` without the kits for tests (`testing`), the benches and
what a tool has generated. Lines are counted with blank lines, comments and docstrings.
"""

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from glossary import Glossary

ROOT = Path(__file__).resolve().parents[2]
SAMPLING_PARAMETER = "min_p"  # one that every layer knows, from the API's field to the kernel
NOT_PRODUCT = re.compile(r"/testing/|/testing\.py$|bench")
PRAGMA = re.compile(r"#\s*(noqa|type:|pyright:|ruff:|pragma)")
MAX_FILES = 20
FACES_OF_OPS = re.compile(r"openinfer_kernels/(ops|cpu|cuda|testing)/|openinfer_kernels/[a-z_]+\.py$")


@dataclass(frozen=True)
class Module:
    """A Python file of the product."""

    path: str
    text: str

    @property
    def package(self) -> str:
        return self.path.split("/")[1]

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def num_lines(self) -> int:
        return self.text.count("\n")

    @cached_property
    def num_docstring_lines(self) -> int:
        return sum(self._docstring_lines(node) for node in ast.walk(self.tree))

    def _docstring_lines(self, node: ast.AST) -> int:
        """A string that stands alone is a docstring, also under an attribute."""
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return (node.end_lineno or node.lineno) - node.lineno + 1
        return 0

    @cached_property
    def num_comment_lines(self) -> int:
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return sum(each.type == tokenize.COMMENT and not PRAGMA.match(each.string) for each in tokens)

    def public_names(self) -> Iterator[str]:
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name

    def method_signatures(self) -> Iterator[str]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef):
                yield node.name


@dataclass
class House:
    """The table, and beside each number the list that it was counted from."""

    commit: str
    numbers: dict[str, float | str] = field(default_factory=dict)
    lists: dict[str, object] = field(default_factory=dict)


def main() -> int:
    options = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="openinfer-house-") as scratch:
        root = check_out(options.commit, Path(scratch)) if options.commit else ROOT
        house = measure(root, commit_of(options.commit or "HEAD"))
    before = json.loads(options.against.read_text("utf-8")) if options.against else None
    print_table(house, before)
    if options.write:
        options.write.write_text(json.dumps(asdict(house), indent=1, ensure_ascii=False) + "\n", "utf-8")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--commit", help="measure this commit instead of the checkout as it lies")
    parser.add_argument("--write", type=Path, metavar="FILE", help="keep the result as JSON")
    parser.add_argument("--against", type=Path, metavar="FILE", help="print the numbers of an earlier result beside")
    return parser.parse_args()


def commit_of(revision: str) -> str:
    return git("rev-parse", "--short", revision).decode().strip()


def git(*arguments: str) -> bytes:
    return subprocess.run(("git", *arguments), cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


def check_out(commit: str, folder: Path) -> Path:
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as archive:
        archive.extractall(folder, filter="data")
    return folder


def measure(root: Path, commit: str) -> House:
    modules = product_modules(root)
    house = House(commit)
    count_lines(house, root, modules)
    count_files_of_folders(house, root)
    count_files_of_one_parameter(house, root)
    count_files_of_families(house, modules)
    count_signatures_of_operators(house, root)
    count_words(house, root)
    count_shared_names(house, modules)
    return house


def product_modules(root: Path) -> list[Module]:
    paths = sorted(root.glob("packages/*/src/**/*.py"))
    named = [(path.relative_to(root).as_posix(), path) for path in paths]
    return [
        Module(name, text)
        for name, path in named
        if not NOT_PRODUCT.search(name) and not is_generated(text := path.read_text("utf-8"))
    ]


def is_generated(text: str) -> bool:
    return bool(re.search(r"(?i)\bgenerated by\b|do not edit", text[:400]))


def count_lines(house: House, root: Path, modules: list[Module]) -> None:
    by_package: Counter[str] = Counter()
    for module in modules:
        by_package[module.package] += module.num_lines
    total = sum(by_package.values())
    comments = sum(module.num_comment_lines for module in modules)
    docstrings = sum(module.num_docstring_lines for module in modules)
    cuda = list(root.glob("packages/*/src/**/*.cu*"))
    house.numbers["product lines of Python"] = total
    house.numbers["lines of CUDA"] = sum(path.read_text("utf-8").count("\n") for path in cuda)
    house.numbers["product files of Python"] = len(modules)
    house.numbers["comment lines per 1,000 lines"] = round(1000 * comments / total, 1)
    house.numbers["docstring lines, %"] = round(100 * docstrings / total, 1)
    house.lists["product lines by package"] = dict(sorted(by_package.items()))


def count_files_of_folders(house: House, root: Path) -> None:
    sizes: Counter[str] = Counter()
    for kind in ("py", "cu", "cuh"):
        for path in root.glob(f"packages/*/src/**/*.{kind}"):
            sizes[path.parent.relative_to(root).as_posix()] += 1
    house.numbers["files in the fullest folder"] = max(sizes.values())
    crowded = {folder: size for folder, size in sizes.most_common() if size > MAX_FILES}
    house.numbers[f"folders with more than {MAX_FILES} files"] = len(crowded)
    house.lists[f"folders with more than {MAX_FILES} files"] = crowded


def count_files_of_one_parameter(house: House, root: Path) -> None:
    """Hand-written files that name one sampling parameter, without kits and benches: each is touched for a new one."""
    word = re.compile(rf"\b{SAMPLING_PARAMETER}\b")
    naming = []
    for path in sorted(root.glob("packages/*/src/**/*")):
        name = path.relative_to(root).as_posix()
        if path.suffix not in {".py", ".cu", ".cuh"} or NOT_PRODUCT.search(name):
            continue
        text = path.read_text("utf-8")
        if word.search(text) and not is_generated(text):
            naming.append(name)
    house.numbers[f"files that name the sampling parameter {SAMPLING_PARAMETER}"] = len(naming)
    house.numbers["packages that they are in"] = len({name.split("/")[1] for name in naming})
    house.lists[f"files that name the sampling parameter {SAMPLING_PARAMETER}"] = naming


def count_files_of_families(house: House, modules: list[Module]) -> None:
    """Per package with a `family.py` at its top, every file but `__init__.py`."""
    homes = {module.path.rpartition("/")[0] for module in modules if re.search(r"/src/[^/]+/family\.py$", module.path)}
    homes = {home for home in homes if home.rpartition("/")[2] not in {"openinfer_core", "openinfer_engine"}}
    files = {
        home.rpartition("/")[2]: sorted(
            module.path.removeprefix(home + "/")
            for module in modules
            if module.path.startswith(home + "/") and not module.path.endswith("__init__.py")
        )
        for home in sorted(homes)
    }
    house.numbers["files of a model family, most"] = max(map(len, files.values()))
    house.lists["files of a model family"] = files


def count_signatures_of_operators(house: House, root: Path) -> None:
    """How often each method of the `Ops` Protocols is written as a `def` of its name, the Protocol's own among them."""
    written: Counter[str] = Counter()
    operators: set[str] = set()
    for path in root.glob("packages/openinfer-kernels/src/**/*.py"):
        name = path.relative_to(root).as_posix()
        if not FACES_OF_OPS.search(name):
            continue
        module = Module(name, path.read_text("utf-8"))
        written.update(module.method_signatures())
        if "/ops/" in name and "/cpu/" not in name and "/cuda/" not in name:
            operators |= set(methods_of_protocols(module))
    counts = {name: written[name] for name in sorted(operators)}
    house.numbers["operators"] = len(counts)
    house.numbers["signatures of one operator, mean"] = round(sum(counts.values()) / max(1, len(counts)), 1)
    house.numbers["signatures of one operator, most"] = max(counts.values(), default=0)
    house.lists["signatures of operators"] = counts


def methods_of_protocols(module: Module) -> Iterator[str]:
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases):
            for method in node.body:
                is_property = isinstance(method, ast.FunctionDef) and "property" in map(
                    ast.unparse, method.decorator_list
                )
                if isinstance(method, ast.FunctionDef) and not is_property:
                    yield method.name


def count_words(house: House, root: Path) -> None:
    found = Counter(each.says for each in Glossary.load().findings(root))
    house.numbers["uses of retired words"] = sum(found.values())
    house.numbers["retired words in use"] = len(found)
    house.lists["retired words"] = dict(found.most_common())


def count_shared_names(house: House, modules: list[Module]) -> None:
    homes: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for name in module.public_names():
            homes[name].add(module.package)
    shared = {name: sorted(packages) for name, packages in sorted(homes.items()) if len(packages) > 1}
    house.numbers["public classes of one name in two packages"] = len(shared)
    house.lists["public classes of one name in two packages"] = shared


def print_table(house: House, before: dict[str, dict[str, object]] | None) -> None:
    head = f"{'':52}{'' if before is None else str(before['commit']):>10}{house.commit:>10}"
    print(head)
    for name, value in house.numbers.items():
        earlier = "" if before is None else f"{before['numbers'].get(name, '-')!s:>10}"
        print(f"{name:52}{earlier or '          '}{value!s:>10}")


if __name__ == "__main__":
    sys.exit(main())
