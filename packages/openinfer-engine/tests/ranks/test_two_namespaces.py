"""Two nodes that share nothing but a wire: each has its own network and mount namespace, and its model elsewhere.

head: 10.77.0.1, model at MODEL_DIR ──veth── rank: 10.77.0.2, the model mounted at another path, hidden at this one
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from joined import MODEL_DIR, WAIT_S, Joiner, make_loop, make_token, tokens_of


def can_make_namespaces() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    tried = subprocess.run(["ip", "netns", "add", "openinfer-try"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", "openinfer-try"], capture_output=True, check=False)
    return tried.returncode == 0


pytestmark = pytest.mark.skipif(not can_make_namespaces(), reason="needs root on Linux with `ip netns`")

HEAD_ADDRESS, RANK_ADDRESS, PORT = "10.77.0.1", "10.77.0.2", 7700
HEAD = """
import os, sys
sys.path.insert(0, sys.argv[2])
import msgspec
from joined import make_loop, make_request, tokens_of
from openinfer_engine import GroupBroken
from pathlib import Path
loop = make_loop(sys.argv[1], 2, Path(sys.argv[4]), rank_timeout_s=int(sys.argv[3]))
said = msgspec.json.encode(tokens_of(loop))
print(said.decode(), flush=True)
try:
    for line in sys.stdin:
        loop.submit(make_request(9, max_tokens=4000))
        print("steps", flush=True)
        while True:
            loop.step()
except GroupBroken as error:
    print(error, flush=True)
loop.close()
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def network() -> Generator[tuple[str, str]]:
    """Two network namespaces with a wire between them; their names."""
    head, rank = f"openinfer-head-{os.getpid()}", f"openinfer-rank-{os.getpid()}"
    with contextlib.ExitStack() as undo:
        for name in (head, rank):
            ip("netns", "add", name)
            undo.callback(ip, "netns", "del", name)
        ip("link", "add", "veth-head", "netns", head, "type", "veth", "peer", "name", "veth-rank", "netns", rank)
        for name, link, address in ((head, "veth-head", HEAD_ADDRESS), (rank, "veth-rank", RANK_ADDRESS)):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield head, rank


@contextlib.contextmanager
def two_nodes(
    network: tuple[str, str], folder: Path, *, timeout_s: int
) -> Generator[tuple["subprocess.Popen[str]", Joiner]]:
    """A head and a rank, each in its namespaces, which have said what the tokens of one engine are."""
    head_name, rank_name = network
    token, of_head, of_rank = make_token(folder), folder / "of-head", folder / "of-rank"
    for each in (of_head, of_rank):
        each.mkdir()
    rank_host = f"join={HEAD_ADDRESS}:{PORT},token-file={token},node=a,wait-s={WAIT_S}"
    arguments = ["--join", f"{HEAD_ADDRESS}:{PORT}", "--token-file", str(token), "--node", "b"]
    here = str(Path(__file__).parent)
    command = [*within(head_name, of_head), sys.executable, "-c", HEAD, rank_host, here, str(timeout_s), str(of_head)]
    with (
        Joiner(*arguments, "--model", str(of_rank), within=within(rank_name, of_rank)) as joiner,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as head,
    ):
        try:
            yield head, joiner
        finally:
            head.kill()


def within(name: str, model: Path) -> list[str]:
    """What runs a command in a network namespace, and in a mount namespace that has the model at this path alone."""
    return ["ip", "netns", "exec", name, "sh", "-c", f'mount --bind {MODEL_DIR} {model} && exec "$@"', "sh"]


def line_of(head: "subprocess.Popen[str]") -> str:
    assert head.stdout is not None
    return head.stdout.readline().strip()


def step(head: "subprocess.Popen[str]") -> None:
    assert head.stdin is not None
    head.stdin.write("go\n")
    head.stdin.flush()
    assert line_of(head) == "steps"


def test_two_nodes_say_what_two_ranks_of_one_machine_say(network: tuple[str, str], tmp_path: Path) -> None:
    import msgspec

    loop = make_loop("thread", 2)
    expected = msgspec.json.encode(tokens_of(loop)).decode()
    loop.close()
    with two_nodes(network, tmp_path, timeout_s=8) as (head, joiner):
        assert line_of(head) == expected
        assert head.stdin is not None
        head.stdin.close()
        assert head.wait(WAIT_S) == 0
        code, said = joiner.wait()
        assert code == 0, said


def test_a_wire_that_drops_all_packets_ends_the_engine_and_the_rank(network: tuple[str, str], tmp_path: Path) -> None:
    with two_nodes(network, tmp_path, timeout_s=6) as (head, joiner):
        assert line_of(head)
        step(head)
        ip("-n", network[1], "link", "set", "veth-rank", "down")  # closes nothing: packets are lost
        assert "rank 1 (GPU 0 of node b) has said nothing for 6 s" in line_of(head)
        code, said = joiner.wait()
        assert code == 1
        assert "the engine has said nothing for 6 s: this rank ends" in said


def test_the_death_of_the_ranks_node_in_a_step_ends_the_engine(network: tuple[str, str], tmp_path: Path) -> None:
    with two_nodes(network, tmp_path, timeout_s=8) as (head, joiner):
        assert line_of(head)
        step(head)
        joiner.process.kill()
        assert "rank 1 has died: the link to node b (10.77.0.2) was closed" in line_of(head)
        assert head.wait(WAIT_S) == 0
