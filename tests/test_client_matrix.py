"""`./run clients`: its list, its table and page, its scripted model and its proxy; no client is run."""

import http.client
import importlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
ENTRY = """
[[client]]
name = "one"
runtime = "python"
requires = ["one-sdk[http]==1.2"]
driver = ["one.py"]
api = "/v1/one"
[client.lacks]
schema = "it knows none"
"""


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("table", monkeypatch)


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module(f"tools.clients.{name}")


def test_every_client_has_a_driver_and_a_lock_of_its_pins(table: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    environments = load("environments", monkeypatch)
    clients = table.read_clients()
    assert {each.name for each in clients if each.ci} == {"openai", "openai-responses", "anthropic", "langchain"}
    for client in clients:
        assert (table.FOLDER / "drivers" / client.driver[0]).exists(), client.name
        assert all(client.lacks.values()), f"{client.name} has a gap without a reason"
        if client.runtime == "python":
            locked = dict(table.pin(line.partition(" ;")[0]) for line in lines_of(environments.lock_of(client)))
            pinned = dict(map(table.pin, client.requires))
            assert {name: locked.get(name) for name in pinned} == pinned, f"./run clients --lock: {client.name}"
    locks = {environments.lock_of(each).name for each in clients if each.runtime == "python"}
    assert {file.name for file in environments.LOCKS.iterdir()} == locks


def lines_of(lock: Path) -> list[str]:
    return [line for line in lock.read_text("utf-8").splitlines() if line and not line.startswith("#")]


def test_the_page_has_every_client_in_its_version_and_what_it_can_do_passed(table: ModuleType) -> None:
    rows = {row.name: row for row in table.read_rows(table.PAGE.read_text("utf-8"))}
    clients = table.read_clients()
    assert list(rows) == [each.name for each in clients]
    for client in clients:
        passed = {scenario: table.Result(passed=True) for scenario in table.Scenario}
        assert rows[client.name] == table.row_of(client, passed, rows[client.name].date), "./run clients --write-page"


def test_an_entry_without_a_version_or_of_an_unknown_kind_is_refused(table: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "clients.toml"
    for wrong, word in (
        (ENTRY.replace("==1.2", ">=1.2"), "one version"),
        (ENTRY.replace('"python"', '"perl"'), "perl"),
        (ENTRY.replace("schema =", "sing ="), "sing"),
        (ENTRY.replace("api =", "route ="), "route"),
        (ENTRY + ENTRY, "two clients"),
    ):
        file.write_text(wrong)
        with pytest.raises(ValueError, match=word):
            table.read_clients(file)


def test_what_a_client_lacks_is_no_failure_and_everything_else_is(table: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "clients.toml"
    file.write_text(ENTRY)
    (client,) = table.read_clients(file)
    assert client.version == "1.2"
    scenario = table.Scenario
    results = {each: table.Result(passed=True) for each in scenario if each not in (scenario.SCHEMA, scenario.ABORT)}
    results[scenario.ERROR] = table.Result(passed=False, detail="no class")
    assert table.failures(client, results) == ["one: error: no class", "one: abort: did not run"]
    row = table.row_of(client, results, "2026-01-02")
    assert row.cells == ("yes", "yes", "yes", "–", "no", "no")
    assert table.drawn([row]).splitlines()[1].split() == ["one", "1.2", "/v1/one", *row.cells]


def test_rows_of_other_clients_stay_on_the_page(table: ModuleType) -> None:
    page = f"# Clients\n{table.BEGIN}\n{table.END}\nbelow\n"
    cells = ("yes",) * len(table.Scenario)
    first, second = (table.Row(name, "1.0", "/v1/x", cells, "2026-01-02") for name in ("a", "b"))
    written = table.with_rows(table.with_rows(page, [second], ["a", "b"]), [first], ["a", "b"])
    assert table.read_rows(written) == [first, second]
    assert written.startswith("# Clients\n")
    assert written.endswith("\nbelow\n")
    assert table.read_rows(table.with_rows(written, [], ["b"])) == [second]
    with pytest.raises(ValueError, match="lacks the line"):
        table.with_rows("# Clients\n", [first], ["a"])


def test_the_scripted_model_calls_for_each_city_in_turn_and_then_sums_up(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("script", monkeypatch)
    prompt = '{"type": "function", "function": {"name": "mcp__weather__get_weather"}}\nHow? [openinfer:tools]'
    for city in script.CITIES:
        text, ends = script.answer(prompt, constrained=False)
        said = json.loads(text.partition("<tool_call>")[2].partition("</tool_call>")[0])
        assert (said, ends) == ({"name": "mcp__weather__get_weather", "arguments": {"city": city}}, True)
        prompt += f"{text}\n<tool_response>\n{city} is sunny\n</tool_response>\n"
    text, ends = script.answer(prompt, constrained=False)
    assert text.endswith("The weather: Paris is sunny; Rome is sunny; Oslo is sunny.")
    assert ends


def test_the_scripted_model_goes_by_the_last_question_and_keeps_a_schema_only_where_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = load("script", monkeypatch)
    ask = "[openinfer:tools] [openinfer:schema]<think>\n\n</think>\n\n"
    assert script.answer(ask, constrained=True) == (json.dumps(script.REPORT), True)
    assert script.answer(ask, constrained=False) == (script.PLAIN, True)
    offer = '{"type": "function", "function": {"name": "StructuredOutput"}}[openinfer:schema]'
    assert '{"name": "StructuredOutput", "arguments": {"city"' in script.answer(offer, constrained=False)[0]
    told = f"{offer}<tool_response>\nok\n</tool_response>"
    assert script.answer(told, constrained=False)[0].endswith(script.PLAIN)
    assert script.answer("a title, please", constrained=False)[0].endswith(script.SIDE)
    assert not script.answer("[openinfer:abort]", constrained=False)[1]


def test_captures_keep_the_form_of_each_kind_of_request_once_and_no_texts_paths_or_ids(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, table: ModuleType
) -> None:
    captures, proxy = load("captures", monkeypatch), load("proxy", monkeypatch)
    (tmp_path / "clients.toml").write_text(ENTRY)
    (client,) = table.read_clients(tmp_path / "clients.toml")
    secret, other = "b" * 32, "c" * 32

    def exchange(text: str, call_id: str, status: int = 200, **fields: object) -> object:
        tools = [{"type": "function", "name": "f", "description": "What is theirs, and long enough."}]
        body = {"messages": [{"role": "user", "content": text, "id": f"call_{call_id}"}], "tools": tools, **fields}
        return proxy.Exchange("POST", "/v1/x?beta=true", {"authorization": secret}, body, status)

    exchanges = [
        exchange("Read /home/someone/notes, and then tell me", secret),
        exchange("[openinfer:plain]", other),
        exchange("One more kind", secret, stream=True),
        exchange("refused", secret, 400),
        exchange("goes on", secret, previous_response_id="resp_1"),
    ]
    captures.write(client, exchanges, tmp_path / "captures")
    text = (tmp_path / "captures" / "one.json").read_text()
    kept = json.loads(text)
    assert (kept["client"], kept["version"], len(kept["tools"])) == ("one", "1.2", 1)
    assert [request["body"]["messages"][0]["content"] for request in kept["requests"]] == ["(text)", "One more kind"]
    assert [request["body"]["tools"] for request in kept["requests"]] == [0, 0]
    assert kept["requests"][1]["body"]["stream"] is True
    for word in (secret, other, "someone", "theirs", "authorization", "beta"):
        assert word not in text
    captures.write(client, [exchange("Read /home/other/notes, and then tell me", other)], tmp_path / "again")
    assert json.loads((tmp_path / "again" / "one.json").read_text())["requests"] == kept["requests"][:1]


class Echo(BaseHTTPRequestHandler):
    """Answers 200 with what was sent, or 400 on /no."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(400 if self.path == "/no" else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def upstream() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_proxy_hands_on_and_remembers_requests_of_one_connection(
    upstream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy_module = load("proxy", monkeypatch)
    with proxy_module.CapturingProxy(upstream) as proxy:
        connection = http.client.HTTPConnection("127.0.0.1", int(proxy.url.rpartition(":")[2]), timeout=20)
        for path, body in (("/yes", b'{"a": 1}'), ("/no", b'{"b": [2]}')):
            connection.request("POST", path, body, {"X-Label": "one"})
            assert connection.getresponse().read() == body
        connection.close()
    seen = [(each.method, each.path, each.body, each.status, each.answer) for each in proxy.exchanges]
    assert seen == [("POST", "/yes", {"a": 1}, 200, ""), ("POST", "/no", {"b": [2]}, 400, '{"b": [2]}')]
    assert proxy.exchanges[0].headers["x-label"] == "one"
