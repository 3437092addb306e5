"""The tools that keep the workspace in order: what they find, and that the pages name them rightly."""

import importlib.util
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "tools" / "workspace"
TABLE = """
scanned = ["docs/**", "README.md"]
skipped = ["docs/old/**"]

[[word]]
pattern = '\\bharvest(s|ed)?\\b'
say = "process outputs"

[[word]]
pattern = '\\bMove\\b'
in = ["docs/kv*"]
say = "transfer"

[[allowed]]
path = "docs/farm.md"
pattern = 'harvested corn'
reason = "is corn"
"""


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"workspace_{name}", TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the module's names
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def glossary() -> ModuleType:
    return load_tool("glossary")


def test_retired_words_are_found_where_they_are_wrong_and_nowhere_else(glossary: ModuleType, tmp_path: Path) -> None:
    files = {
        "README.md": "We harvest.\nMove on.\n",
        "docs/kv-tiers.md": "A `Move` ends. Harvest is another word.\n",
        "docs/farm.md": "harvested corn\nharvested wheat\n",
        "docs/old/notes.md": "harvest\n",
        "src/code.py": "harvest = 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "table.toml").write_text(TABLE)
    found = glossary.Glossary.load(tmp_path / "table.toml").findings(tmp_path)
    assert [(each.path, each.line_number, each.word, each.says) for each in found] == [
        ("README.md", 1, "harvest", "process outputs"),
        ("docs/farm.md", 2, "harvested", "process outputs"),
        ("docs/kv-tiers.md", 1, "Move", "transfer"),
    ]


def test_glossary_gives_a_word_for_each_and_a_reason_for_each_exception(glossary: ModuleType) -> None:
    table = glossary.Glossary.load()
    assert all(word.says for word in table.words)
    assert all(each.reason for each in table.allowed)
    (most, times), *_ = Counter(word.pattern.pattern for word in table.words).most_common(1)
    assert times == 1, most


def test_each_commit_tests_what_a_commit_touches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = load_tool("each_commit")
    for folder in ("packages/a/tests", "examples/b/tests", "tests"):
        (tmp_path / folder).mkdir(parents=True)
    touched = {
        "package": ["packages/a/src/a/x.py", "packages/a/README.md"],
        "example and a page": ["examples/b/tests/test_x.py", "docs/x.md"],
        "package that it removes": ["packages/gone/src/gone/x.py", "packages/gone/pyproject.toml"],
    }
    monkeypatch.setattr(tool, "TREE", tmp_path)
    monkeypatch.setattr(tool.Commit, "touched", property(lambda commit: touched[commit.subject]))
    folders = {name: tool.test_folders(tool.Commit("0" * 40, name)) for name in touched}
    assert folders == {
        "package": ["packages/a/tests"],
        "example and a page": ["examples/b/tests", "tests"],
        "package that it removes": ["tests"],
    }


def test_what_a_commit_has_passed_is_known_to_the_next_run(tmp_path: Path) -> None:
    tool = load_tool("each_commit")
    commit = tool.Commit("0" * 40, "x")
    tool.Results(tmp_path / "results").passed(commit, "lint", 1.25)
    again = tool.Results(tmp_path / "results")
    assert again.seconds(commit, "lint") == pytest.approx(1.2, abs=0.1)
    assert again.seconds(commit, "types") is None


def test_commits_that_blame_looks_through_are_moves_and_renames() -> None:
    says_so = load_tool("blame_ignore").SAYS_SO
    assert says_so.search("engine, move: weights are read under weights/")
    assert says_so.search("kernels, rename: sharers are multicast CTAs")
    assert not says_so.search("engine: what moves is removed: all of it")


def test_oldest_core_is_the_lowest_release_within_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    uv = ModuleType("uv")  # which only the tools' own environment has, and nothing here calls
    uv.find_uv_bin = lambda: "uv"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "uv", uv)
    monkeypatch.syspath_prepend(TOOLS)
    tool = load_tool("oldest_core")
    assert tool.lowest_allowed(ROOT) == (0, 1, 0)
    tags = ["openinfer-core-0.1.10", "openinfer-core-0.1.2", "openinfer-core-0.0.9", "openinfer-server-0.1.0"]
    assert tool.oldest_tag(tags, (0, 1, 0)) == "openinfer-core-0.1.2"
    assert tool.oldest_tag(tags, (0, 2, 0)) is None
    assert tool.oldest_tag([], (0, 1, 0)) is None


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", ".ci/run", "docs/reference/public-api.md"])
def test_commands_that_a_page_names_are_there(page: str) -> None:
    scripts = tomllib.loads((ROOT / "hatch.toml").read_text(encoding="utf-8"))["envs"]["default"]["scripts"]
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"\./run ([a-z][a-z-]*)", text)) | set(re.findall(r"(?m)^step ([a-z-]+)", text))
    assert named
    assert named <= scripts.keys() | {"demo", "openinfer"}  # these two are the file run's own


def test_commands_of_pages_are_checked_by_name_and_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = load_tool("page_commands")
    of_openinfer = {("serve",): {"--model"}, ("bench", "scheduler"): {"--json"}}
    monkeypatch.setattr(tool, "flags_of_openinfer", lambda words: (words in of_openinfer, of_openinfer.get(words)))
    text = """
./run install --cuda13 --nccl   # --comment
./run install --cuda99
./run lintt
./run openinfer serve --model /x --modle=/x && echo --other
openinfer bench scheduler --json FILE | head --lines 3
/opt/openinfer/bin/openinfer bench schedulr
python3 dist/install.py --into ~/x
curl --anything
"""
    block = tool.Block(ROOT / "README.md", 1, "", text)
    assert list(tool.wrong_commands(block)) == [
        "README.md:1: ./run install --cuda99 has no --cuda99",
        "README.md:1: there is no ./run lintt",
        "README.md:1: openinfer serve --model has no --modle",
        "README.md:1: there is no openinfer bench schedulr",
    ]


def test_blocks_of_a_page_run_in_order_in_a_bare_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tool = load_tool("page_commands")
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\ntest -z ${LEAK-}\necho hi > $HOME/x\n```\n```\nexit 7\n```\n```sh\ncat $HOME/x\nfalse\n```\n"
    )
    monkeypatch.setenv("LEAK", "1")
    assert tool.run_page(page, list(tool.blocks_of(page))) == f"{page}:8: exit code 1"
    assert "\nhi\n" in capfd.readouterr().out


def test_pages_of_the_site_link_to_the_repository_where_a_link_leaves_the_docs() -> None:
    tool = load_tool("docs_site")

    def shown(link: str, page: str = "reference/kernels.md") -> str:
        text: str = tool.outside_links(f"see [x]({link}).", page, "https://example.test/repo")
        return text.removeprefix("see [x](").removesuffix(").")

    assert shown("../../packages/openinfer-core/README.md#promises") == (
        "https://example.test/repo/blob/main/packages/openinfer-core/README.md#promises"
    )
    assert shown("../deploy", page="production.md") == "https://example.test/repo/tree/main/deploy"
    assert shown("../../docs/notes/kernels.md") == "../notes/kernels.md"
    assert shown("metrics.md") == "metrics.md"
    assert shown("#here") == "#here"
    assert shown("https://example.test/x") == "https://example.test/x"


def test_every_package_has_a_page_of_its_own_in_the_site() -> None:
    pages = load_tool("docs_site").api_pages()
    assert set(pages) == {f"api/{path.name.replace('-', '_')}.md" for path in ROOT.glob("packages/*")}
    assert "::: openinfer_core\n" in pages["api/openinfer_core.md"]
