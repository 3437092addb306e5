"""`clients.toml`, and the table of what passed: read, drawn, and kept in docs/reference/clients.md."""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
CLIENTS = FOLDER / "clients.toml"
PAGE = FOLDER.parents[1] / "docs" / "reference" / "clients.md"
BEGIN, END = "<!-- begin: ./run clients --write-page -->", "<!-- end -->"
HEAD = ("client", "version", "API")
_PIN = re.compile(r"(@?[^@=\[]+)(?:\[[^\]]*\])?(?:==|@)([^@=]+)")


class Scenario(StrEnum):
    """What each client is asked to do, in this order."""

    PLAIN = "plain"
    STREAM = "stream"
    TOOLS = "tools"
    SCHEMA = "schema"
    ERROR = "error"
    ABORT = "abort"


@dataclass(frozen=True)
class Client:
    """One row of the matrix.

    Attributes:
        name: what it is called here, and its environment and lock.
        runtime: `python` or `node`: where its packages come from.
        requires: pinned packages, as the runtime writes them; the first one's version is the client's.
        driver: a file of drivers/, and its arguments.
        api: the route that it speaks to.
        lacks: scenarios that the client itself cannot do, and why.
        ci: whether `--ci` runs it.
    """

    name: str
    runtime: str
    requires: tuple[str, ...]
    driver: tuple[str, ...]
    api: str
    lacks: Mapping[Scenario, str] = field(default_factory=dict[Scenario, str])
    ci: bool = False
    environment: str = ""

    @property
    def version(self) -> str:
        return pin(self.requires[0])[1]


@dataclass(frozen=True)
class Result:
    """How a scenario ended; `detail` says why it failed."""

    passed: bool
    detail: str = ""


@dataclass(frozen=True)
class Row:
    """One line of the table, as it is written."""

    name: str
    version: str
    api: str
    cells: tuple[str, ...]
    date: str

    @property
    def line(self) -> str:
        return f"| {' | '.join((self.name, self.version, self.api, *self.cells, self.date))} |"


def pin(requirement: str) -> tuple[str, str]:
    """`openai==3.54.0` -> ("openai", "3.54.0"); `@openai/codex@0.169.0` likewise.

    Raises:
        ValueError: it has no exact version.
    """
    found = _PIN.fullmatch(requirement)
    if found is None:
        raise ValueError(f"{requirement!r} is not pinned to one version")
    return found.group(1), found.group(2)


def read_clients(file: Path = CLIENTS) -> list[Client]:
    """Read the matrix.

    Raises:
        ValueError: an entry is wrong; the message says which.
    """
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    clients = [_client(entry) for entry in table["client"]]
    names = [each.name for each in clients]
    if len(names) != len(set(names)):
        raise ValueError("two clients have one name")
    return clients


def _client(entry: Mapping[str, object]) -> Client:
    given = dict(entry)
    lacks = given.pop("lacks", {})
    assert isinstance(lacks, dict)
    requires, driver = given.pop("requires"), given.pop("driver")
    assert isinstance(requires, list)
    assert isinstance(driver, list)
    try:
        client = Client(
            **given,  # type: ignore[arg-type]
            requires=tuple(requires),
            driver=tuple(driver),
            lacks={Scenario(name): str(why) for name, why in lacks.items()},
        )
    except TypeError as error:
        raise ValueError(f"{given.get('name')}: {error}") from error
    if client.runtime not in ("python", "node"):
        raise ValueError(f"{client.name}: runtime is {client.runtime!r}, which is neither python nor node")
    for requirement in client.requires:
        pin(requirement)
    return client


def row_of(client: Client, results: Mapping[Scenario, Result], date: str) -> Row:
    cells = tuple(_cell(client, scenario, results.get(scenario)) for scenario in Scenario)
    return Row(client.name, client.version, client.api, cells, date)


def _cell(client: Client, scenario: Scenario, result: Result | None) -> str:
    if scenario in client.lacks:
        return "–"
    return "yes" if result is not None and result.passed else "no"


def failures(client: Client, results: Mapping[Scenario, Result]) -> list[str]:
    """Return a line for each scenario that the client can do and that did not pass."""
    return [
        f"{client.name}: {scenario}: {results[scenario].detail if scenario in results else 'did not run'}"
        for scenario in Scenario
        if scenario not in client.lacks and not (scenario in results and results[scenario].passed)
    ]


def drawn(rows: Iterable[Row]) -> str:
    """Return the rows as text for a terminal."""
    lines = [(*HEAD, *Scenario)] + [(row.name, row.version, row.api, *row.cells) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def read_rows(page: str) -> list[Row]:
    """Return the rows of the page's table."""
    inside = page.partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in inside.splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [Row(each[0], each[1], each[2], tuple(each[3:-1]), each[-1]) for each in cells]


def with_rows(page: str, rows: Sequence[Row], order: Sequence[str]) -> str:
    """Return the page with these rows in its table; rows of other clients stay, those that are no more go."""
    if BEGIN not in page or END not in page:
        raise ValueError(f"the page lacks the line {BEGIN} or {END}")
    kept = {row.name: row for row in [*read_rows(page), *rows]}
    titles = (*HEAD, *Scenario, "run on")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    lines += [kept[name].line for name in order if name in kept]
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    return before + "\n".join([BEGIN, *lines, END]) + after
