"""`openinfer chat`: turns, commands, ctrl-c, with a model in this process and with a server."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path

import pytest

from openinfer.chat.session import ChatSession, Message
from openinfer.chat.speakers import ServerSpeaker
from openinfer.commands.main import main
from openinfer_core import InvalidRequest, Refused


class Parrot:
    """Says each turn again, in words; a turn `stop` is interrupted after two, `fail` refused."""

    def __init__(self) -> None:
        self.closed = 0

    def answer(self, messages: Sequence[Message]) -> Iterator[str]:
        try:
            for index, word in enumerate(messages[-1]["content"].split(" ")):
                if word == "fail":
                    raise Refused("the parrot refuses")
                if index == 2 and "stop" in messages[-1]["content"]:
                    raise KeyboardInterrupt
                yield f"{word} "
        finally:
            self.closed += 1


def talk(*lines: str | BaseException, system: str | None = None) -> tuple[ChatSession, str]:
    waiting, out = iter(lines), StringIO()

    def read(prompt: str) -> str:
        line = next(waiting, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    session = ChatSession(Parrot(), system=system, read=read, out=out)
    session.run()
    return session, out.getvalue()


def test_turns_and_answers_are_kept() -> None:
    session, out = talk("hello you", "and again", system="Be kind.")
    assert [message["role"] for message in session.messages] == ["system", *["user", "assistant"] * 2]
    assert session.messages[2]["content"] == "hello you "
    assert out == "hello you \nand again \n\n"


def test_a_turn_of_several_lines() -> None:
    session, _ = talk('"""one', "two", 'three"""', "four \\", "five", '"""/help"""')
    assert [each["content"] for each in session.messages if each["role"] == "user"] == [
        "one\ntwo\nthree",
        "four \nfive",
        "/help",
    ]


def test_ctrl_c_stops_the_answer_and_not_the_chat() -> None:
    session, out = talk("a b stop c", "more")
    assert out == "a b \n(stopped)\nmore \n\n"
    assert [each["content"] for each in session.messages] == ["a b stop c", "a b ", "more", "more "]


def test_ctrl_c_at_the_prompt_says_how_to_end() -> None:
    _, out = talk(KeyboardInterrupt(), "x", "/exit", "never")
    assert "ctrl-d or /exit ends" in out
    assert "never" not in out


def test_a_turn_that_was_refused_is_not_kept() -> None:
    session, out = talk("fail", "fine")
    assert "the parrot refuses" in out
    assert [each["content"] for each in session.messages] == ["fine", "fine "]


def test_commands(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    session, out = talk(
        "hi", f"/save {file}", "/save", "/save /nowhere/x", "/nonsense", "/help", "/system Be brief.", "yes"
    )
    assert json.loads(file.read_text()) == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi "}]
    assert session.messages[0] == {"role": "system", "content": "Be brief."}
    assert len(session.messages) == 3
    for said in ("saved 2 messages", "/save needs a file", "cannot be written", "/nonsense is no command", "/clear "):
        assert said in out
    assert talk("hi", "/clear")[0].messages == []


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:8000", "http://"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="not of the form http"):
        ServerSpeaker(url, model="m", api_key=None, sampling={})


def test_a_server_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 2
    assert "the server at http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err


def chat(*argv: str, said: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "openinfer.commands.main", "chat", *argv]
    return subprocess.run(command, input=said, capture_output=True, text=True, timeout=120, check=False)


def test_with_a_model_and_with_a_server() -> None:
    question = "What is the capital of Japan?\n/save /dev/stdout\n"
    here = chat("tiny", "--temperature", "0", "--max-tokens", "48", said=question)
    assert "Tokyo" in here.stdout, here.stderr
    command = [sys.executable, "-m", "openinfer.commands.main", "serve", "tiny", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            url = next(word for word in server.stdout.readline().split() if word.startswith("http"))
            there = chat("--url", url, "--temperature", "0", "--max-tokens", "48", said=question)
            assert "Tokyo" in there.stdout, there.stderr
            assert there.stdout.startswith(f"tiny at {url}")
            refused = chat("--url", url, "--served-model", "other", said="hi\n")
            assert "the server answered 404" in refused.stdout
            unbounded = chat(f"--url={url}", "--temperature", "0", said=question)
            assert "Tokyo" in unbounded.stdout
        finally:
            server.kill()


def test_sigint_while_a_model_answers_stops_it_alone() -> None:
    command = [sys.executable, "-m", "openinfer.commands.main", "chat", "tiny", "--min-tokens", "400"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
        env=environment,
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdout.readline()
            process.stdin.write("Tell me a story.\n")
            process.stdin.flush()
            assert process.stdout.read(8)  # the answer has begun
            process.send_signal(signal.SIGINT)
            out, err = process.communicate("/exit\n", timeout=60)
            assert "(stopped)" in out, err
            assert process.returncode == 0
        finally:
            process.kill()
