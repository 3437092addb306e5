"""What `openinfer_ray.ranks.placer` is, without Ray: its actors are threads here, on nodes that have names alone.

    python fake_placer.py joins                ranks join as they should
    python fake_placer.py refuses              no node can be had
    python fake_placer.py dies                 before it has placed anything
    python fake_placer.py loses                says that a node is gone, in the place of joining

With the path of a named pipe after it, it says so too when a line comes from there.
"""

import os
import signal
import sys
import threading
from pathlib import Path

import msgspec

from openinfer_ray.ranks.messages import Failed, Invitation, Invite, Place, Placed, line_of, to_placer
from openinfer_ray.ranks.node import RankNode


def say(message: Placed | Failed) -> None:
    sys.stdout.buffer.write(line_of(message))
    sys.stdout.buffer.flush()


def main(way: str, *, signs: Path | None = None) -> None:
    order = to_placer.decode(sys.stdin.buffer.readline())
    assert isinstance(order, Place)
    if way == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "refuses":
        say(Failed(why=f"no {len(order.shares)} nodes"))
    else:
        say(Placed(host="127.0.0.1"))
        invite = to_placer.decode(sys.stdin.buffer.readline())
        assert isinstance(invite, Invite)
        if way == "loses":
            say(Failed(why="node b is gone"))
        else:
            _join(order, invite)
    if signs is not None:
        with signs.open() as lines:  # a named pipe: waits for what opens it
            lines.readline()
        say(Failed(why="node b is gone"))
    sys.stdin.buffer.read()  # until the engine is gone


def _join(order: Place, invite: Invite) -> None:
    for index, ranks in enumerate(order.shares, 1):
        told = Invitation(to=invite, node=f"node-{index}", node_index=index, ranks=ranks, model=order.model)
        threading.Thread(target=_run, args=(msgspec.json.encode(told),)).start()


def _run(told: bytes) -> None:
    if why := RankNode(cpus=1).join(told):
        say(Failed(why=why))


if __name__ == "__main__":
    said = os.dup(1)
    os.dup2(2, 1)  # ranks inherit it, and may print
    sys.stdout = os.fdopen(said, "w")
    main(sys.argv[1], signs=Path(sys.argv[2]) if len(sys.argv) > 2 else None)
