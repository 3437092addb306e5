"""Ranks that join over TCP: the tokens of ranks of one machine, and an end for all when one is gone or silent."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from joined import (
    MODEL_DIR,
    REQUESTS,
    WAIT_S,
    Joiner,
    copy_of_model,
    free_port,
    make_loop,
    make_request,
    make_token,
    starting,
    tokens_of,
)

from openinfer_core import (
    EngineClosed,
    Failed,
    FailureKind,
    GenerateRequest,
    Refused,
    RequestId,
    SamplingParams,
    TokenEvent,
    Tokens,
)
from openinfer_core.process.local import InProcessEngine
from openinfer_engine import GroupBroken, StepLoop
from openinfer_engine.options import LoadFormat
from openinfer_engine.worker.process_runner import ProcessRunner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks of several machines need a POSIX system; /proc")


@pytest.fixture
def port() -> int:
    return free_port()


def host(port: int, token: Path, **fields: Any) -> str:
    further = "".join(f",{name.replace('_', '-')}={value}" for name, value in fields.items())
    return f"join=127.0.0.1:{port},token-file={token}{further}"


def join(port: int, token: Path, *arguments: str) -> Joiner:
    return Joiner("--join", f"127.0.0.1:{port}", "--token-file", str(token), *arguments)


@contextlib.contextmanager
def two_nodes(port: int, tmp_path: Path, *arguments: str, **options: Any) -> Generator[tuple[StepLoop, Joiner]]:
    """A head and one rank of another node, which have started."""
    token = make_token(tmp_path)
    given = {"node": "a", **options.pop("fields", {})}
    with (
        join(port, token, "--node", "b", *arguments) as joiner,
        starting(host(port, token, **given), 2, **options) as loop,
    ):
        yield loop.result(WAIT_S), joiner


def step_until_it_ends(loop: StepLoop) -> str:
    loop.submit(make_request(0, max_tokens=4000))
    with pytest.raises(GroupBroken) as broken:
        step_forever(loop)
    return str(broken.value)


def step_forever(loop: StepLoop) -> None:
    while True:
        loop.step()


async def read_all(engine: InProcessEngine, seen: list[TokenEvent]) -> None:
    async for events in engine.events():
        seen += events


def test_two_nodes_with_models_at_different_paths_say_what_two_ranks_of_one_machine_say(
    port: int, tmp_path: Path
) -> None:
    loop = make_loop("thread", 2)
    expected = tokens_of(loop)
    loop.close()
    with two_nodes(port, tmp_path, "--model", str(copy_of_model(tmp_path))) as (loop, joiner):
        assert tokens_of(loop) == expected
        assert isinstance(loop.runner, ProcessRunner)
        assert loop.runner.process_ids == []
        loop.close()
        code, said = joiner.wait()
    assert code == 0, said
    assert f"GPU 0 of node b has joined 127.0.0.1:{port}" in said


def test_ranks_of_the_heads_node_and_of_another_one_repeat_their_bits(tmp_path: Path) -> None:
    runs: list[dict[int, list[TokenEvent]]] = []
    for _ in range(2):
        port, token = free_port(), make_token(tmp_path)
        with (
            join(port, token, "--node", "b", "--ranks", "2") as joiner,
            starting(host(port, token, node="a", local=2), 4, **four_heads(tmp_path)) as starts,
        ):
            loop = starts.result(WAIT_S)
            runs.append(tokens_of(loop, REQUESTS[:2]))
            assert len(loop.runner.process_ids) == 1  # type: ignore[attr-defined]
            loop.close()
            assert joiner.wait()[0] == 0
    assert runs[0] == runs[1]


def test_a_second_pass_in_other_steps_has_the_same_bits_where_they_do_not_depend_on_the_batch(
    port: int, tmp_path: Path
) -> None:
    """Prompts that are cut elsewhere, in steps with other rows, on two nodes: what a busy network does to the cuts."""
    requests = [long_request(index) for index in range(4)]
    with two_nodes(port, tmp_path, batch_invariant=True, prefix_cache=False) as (loop, _):
        together = tokens_of(loop, requests)
        alone = [tokens_of(loop, [request]) for request in reversed(requests)]
    apart = {number: events for each in alone for number, events in each.items()}
    assert cuts_of(together) != cuts_of(apart)
    assert bits_of(together) == bits_of(apart)


def long_request(index: int) -> GenerateRequest:
    prompt = tuple((11 * index + 3 * place) % 250 for place in range(70 + 9 * index))
    sampling = SamplingParams(max_tokens=12, temperature=0.8, seed=index, logprobs=2, prompt_logprobs=0)
    return GenerateRequest(request_id=RequestId(index), prompt_token_ids=prompt, sampling=sampling)


def cuts_of(said: dict[int, list[TokenEvent]]) -> dict[int, list[int]]:
    """Prompt tokens that were scored in one step, of each request."""
    return {
        number: [len(event.prompt_logprobs) for event in events if isinstance(event, Tokens) and event.prompt_logprobs]
        for number, events in said.items()
    }


def bits_of(said: dict[int, list[TokenEvent]]) -> dict[int, list[object]]:
    """Ids and log-probabilities of each request, in whichever steps they came."""
    of_all: dict[int, list[object]] = {}
    for number, events in said.items():
        tokens = [event for event in events if isinstance(event, Tokens)]
        scored = [each for event in tokens for each in event.prompt_logprobs or ()]
        chosen = [each for event in tokens for each in event.logprobs or ()]
        of_all[number] = [scored, chosen, [each for event in tokens for each in event.token_ids]]
    return of_all


def four_heads(folder: Path) -> dict[str, Any]:
    """A model that four ranks can share; without weights."""
    model = folder / "four-heads"
    model.mkdir(exist_ok=True)
    config = json.loads((MODEL_DIR / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4, "num_hidden_layers": 2}))
    return {"model_dir": model, "load_format": LoadFormat.DUMMY}


def test_a_frozen_rank_ends_the_engine_and_ends_itself_once_it_can(port: int, tmp_path: Path) -> None:
    with two_nodes(port, tmp_path, rank_timeout_s=6) as (loop, joiner):
        (rank,) = joiner.ranks()
        os.kill(rank, signal.SIGSTOP)
        reason = step_until_it_ends(loop)
        assert "rank 1 (GPU 0 of node b) has said nothing for 6 s" in reason
        os.kill(rank, signal.SIGCONT)
        assert joiner.wait()[0] == 1


def test_an_idle_engine_whose_rank_freezes_ends_and_a_request_gets_its_terminal_event(
    port: int, tmp_path: Path
) -> None:
    with two_nodes(port, tmp_path, rank_timeout_s=6) as (loop, joiner):

        async def scenario() -> list[TokenEvent]:
            engine = InProcessEngine(loop)
            seen: list[TokenEvent] = []
            os.kill(joiner.ranks()[0], signal.SIGSTOP)
            engine.submit(make_request(0, max_tokens=4000))
            with pytest.raises(EngineClosed):
                await read_all(engine, seen)
            await engine.close()
            return seen

        events = asyncio.run(asyncio.wait_for(scenario(), WAIT_S))
    assert [event.kind for event in events if isinstance(event, Failed)] == [FailureKind.SHUTDOWN]


def test_a_rank_that_is_killed_ends_the_engine(port: int, tmp_path: Path) -> None:
    with two_nodes(port, tmp_path) as (loop, joiner):
        os.kill(joiner.ranks()[0], signal.SIGKILL)
        assert "rank 1 has died: the link to node b (127.0.0.1) was closed" in step_until_it_ends(loop)
        assert joiner.wait()[0] == 1


def test_the_death_of_the_command_takes_its_ranks_and_the_engine_along(port: int, tmp_path: Path) -> None:
    with two_nodes(port, tmp_path) as (loop, joiner):
        joiner.process.kill()
        assert "rank 1 has died: the link to node b" in step_until_it_ends(loop)


HEAD = """
import sys
sys.path.insert(0, sys.argv[2])
from joined import make_loop
loop = make_loop(sys.argv[1], 2, rank_timeout_s=6)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_whose_head_is_gone_or_frozen_end_themselves(
    port: int, tmp_path: Path, signal_number: signal.Signals
) -> None:
    token = make_token(tmp_path)
    command = [sys.executable, "-c", HEAD, host(port, token, node="a"), str(Path(__file__).parent)]
    with (
        join(port, token, "--node", "b") as joiner,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as head,
    ):
        assert head.stdout is not None
        assert head.stdout.readline() == b"ready\n"
        head.send_signal(signal_number)
        code, said = joiner.wait()
        head.kill()
    assert code == 1
    assert ("the engine has said nothing for 6 s" in said) == (signal_number == signal.SIGSTOP)


class DroppingWay:
    """A way between a rank and the head that loses all that is sent from some moment on, and closes nothing."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._drops = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def drop(self) -> None:
        self._drops.set()

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._sockets.append(near)
                try:
                    far = socket.create_connection(self._target)
                except OSError:  # the head does not listen yet: the rank comes again
                    near.close()
                    continue
                self._sockets.append(far)
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not self._drops.is_set():
                    target.sendall(data)
            if not self._drops.is_set():
                target.shutdown(socket.SHUT_WR)


def test_a_link_that_drops_everything_ends_the_engine_and_the_rank(port: int, tmp_path: Path) -> None:
    token = make_token(tmp_path)
    with starting(host(port, token, node="a"), 2, rank_timeout_s=6) as starts:
        wait_until_it_listens(port)
        way = DroppingWay(("127.0.0.1", port))
        with contextlib.closing(way), join(way.port, token, "--node", "b") as joiner:
            loop = starts.result(WAIT_S)
            way.drop()
            assert "rank 1 (GPU 0 of node b) has said nothing for 6 s" in step_until_it_ends(loop)
            code, said = joiner.wait()
            assert code == 1
            assert "the engine has said nothing for 6 s: this rank ends" in said


def wait_until_it_listens(port: int) -> None:
    for _ in range(WAIT_S * 20):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        threading.Event().wait(0.05)
    raise AssertionError("the head does not listen")


def test_a_wrong_token_is_refused_and_the_right_one_is_still_awaited(port: int, tmp_path: Path) -> None:
    token = make_token(tmp_path)
    with starting(host(port, token, node="a"), 2) as starts:
        with join(port, make_token(tmp_path, "another"), "--node", "c") as stranger:
            code, said = stranger.wait()
        assert code != 0
        assert "the head does not take this rank: the token is not this engine's" in said
        assert not starts.done()
        with join(port, token, "--node", "b"):
            starts.result(WAIT_S).close()


def test_another_checkpoint_is_refused_in_one_sentence(port: int, tmp_path: Path) -> None:
    token, other = make_token(tmp_path), copy_of_model(tmp_path)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": config["rope_theta"] + 1}))
    with join(port, token, "--node", "b", "--model", str(other)) as joiner:
        with pytest.raises(
            Refused,
            match=r"rank 1 \(GPU 0 of node b\) is not composed as rank 0 is: checkpoint and KV layout is .* there and",
        ):
            make_loop(host(port, token, node="a"), 2)
        assert joiner.wait()[0] == 1


def test_ranks_that_do_not_come_end_the_start(port: int, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"0 of 1 ranks have come within 1 s \(none\); start the others with"):
        make_loop(host(port, make_token(tmp_path), wait_s=1), 2)


def test_a_head_that_cannot_be_reached_is_said(port: int, tmp_path: Path) -> None:
    with join(port, make_token(tmp_path), "--wait-s", "0") as joiner:
        code, said = joiner.wait()
    assert code != 0
    assert f"the head at 127.0.0.1:{port} cannot be reached" in said


def test_a_host_with_nobody_to_join_is_refused(port: int, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="none is to join; leave --rank-host out"):
        make_loop(host(port, make_token(tmp_path), local=2), 2)
