"""`JoinRankHost`: ranks that other machines' launchers start, and that join the head over TCP.

    openinfer serve --tensor-parallel-size 16 --rank-host join=0.0.0.0:7000,token-file=F,local=8     the first node
    openinfer rank --join HEAD:7000 --token-file F --ranks 8                                         each other node

Rank 0 and `local - 1` more are processes of the head's node. When all others have come, ranks are numbered by node and
GPU: the head's node, then the others in the order of their indices, where the launcher gave some, or of their names.
The same machines get the same numbers in every run, so sums have the same bits.
"""

import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from openinfer_core import Refused
from openinfer_core.process.accepting import ACCEPT_PAUSE_S, EXHAUSTED
from openinfer_core.process.mutual_proof import NotAdmitted, read_token
from openinfer_engine.ranks.contract import RankLink, RankSpec
from openinfer_engine.ranks.handshake import Node, admit
from openinfer_engine.ranks.join_setting import HeadSetting, JoinSetting
from openinfer_engine.ranks.placement import Placement, RankPlace
from openinfer_engine.ranks.process_host import ProcessRankHost
from openinfer_engine.ranks.socket_link import SocketLink

OPENINFER_CONTRACT = 1

logger = logging.getLogger("openinfer.engine")

_LOOK_S = 0.2  # between two looks, of the thread that lets ranks in, at whether it still should
_HANDSHAKES = 32  # at a time; further connections wait in the listener's queue


class JoinedRanks:
    """Makes the host of `--rank-host join=…`, and says where its ranks would be."""

    def __call__(self, setting: str) -> "JoinRankHost":
        parsed = JoinSetting.parse(setting)
        return JoinRankHost(parsed, token=read_token(parsed.token_file, field="rank_host"))

    def planned(self, setting: str, spec: RankSpec) -> Placement:
        """The head's ranks on its first GPUs; how many nodes the others are of is not known, and taken to be one."""
        local = JoinSetting.parse(setting).local
        num_others = _num_to_join(spec, local)
        places = [(0, gpu) for gpu in range(local)] + [(1, gpu) for gpu in range(num_others)]
        return Placement(tuple(RankPlace(*place) for place in places))


open_joined = JoinedRanks()


class JoinRankHost:
    """Listens at once; `start` waits until all ranks have come.

    Args:
        setting: where it listens.
        token: the secret that ranks show.

    Raises:
        Refused: the address cannot be listened at.
    """

    def __init__(self, setting: HeadSetting, *, token: bytes) -> None:
        self._setting = setting
        self._processes = ProcessRankHost()
        self._joined: list[SocketLink] = []
        self._placement: Placement | None = None
        try:
            self._door = _Door(setting, token)
        except OSError as error:
            raise Refused(f"ranks cannot join at {setting.host}:{setting.port}: {error}") from error

    @property
    def port(self) -> int:
        return self._door.port

    def placement(self) -> Placement:
        if self._placement is None:
            raise RuntimeError("ranks have not been started")
        return self._placement

    def start(self, rank: int, spec: RankSpec) -> RankLink:
        if self._placement is None:
            self._gather(spec)
        if rank < self._setting.local:
            return self._processes.start(rank, spec)
        return self._joined[rank - self._setting.local]

    def give_up(self, why: str) -> None:
        """Ends the wait for ranks, or the links to those that have come; for a launcher that knows of their end."""
        self._door.refuse(Refused(why))
        for link in self._joined:
            link.kill()

    def close(self) -> None:
        self._door.close()
        self._processes.close()

    def _gather(self, spec: RankSpec) -> None:
        wanted = _num_to_join(spec, self._setting.local)
        logger.info("%d of %d ranks are to join at port %d", wanted, spec.num_ranks, self.port)
        links = self._door.wait(wanted, wait_s=self._setting.wait_s)
        try:
            self._joined, placement = arrange(links, self._setting, on_gpu=spec.on_gpu)
            if self._door.refused is not None:  # one has ended between the two: `give_up` found no links
                raise self._door.refused
            self._placement = placement
        except BaseException:
            for link in links:
                link.end(deadline_s=0)
            raise


def _num_to_join(spec: RankSpec, local: int) -> int:
    wanted = spec.num_ranks - local
    if wanted < 1:
        raise Refused(
            f"--rank-host join: with local={local} all {spec.num_ranks} ranks are on this node, and none is to join; "
            "leave --rank-host out"
        )
    return wanted


def arrange(links: list[SocketLink], setting: HeadSetting, *, on_gpu: bool) -> tuple[list[SocketLink], Placement]:
    """The links in order of ranks, and where all ranks are.

    Raises:
        Refused: two nodes have one index, a node has two, or two ranks one GPU.
    """
    _check_nodes([link.node for link in links], setting, on_gpu=on_gpu)
    last = 1 + max((link.node.index or 0 for link in links), default=0)

    def order(link: SocketLink) -> tuple[bool, int, str, int]:
        node = link.node
        return node.name != setting.node, last if node.index is None else node.index, node.name, node.gpu

    in_order = sorted(links, key=order)
    names = list(dict.fromkeys([setting.node, *(link.node.name for link in in_order)]))
    others = [link for link in links if link.node.name != setting.node]
    own_address = (others or links)[0].own_address
    places = [RankPlace(0, gpu, own_address) for gpu in range(setting.local)]
    places += [RankPlace(names.index(link.node.name), link.node.gpu, link.node.address) for link in in_order]
    return in_order, Placement(tuple(places))


def _check_nodes(nodes: list[Node], setting: HeadSetting, *, on_gpu: bool) -> None:
    indices = {(node.name, node.index) for node in nodes}
    for name, count in Counter(name for name, _ in indices).items():
        if count > 1:
            raise Refused(f"the ranks of node {name} give it several indices; --node-index is that of the node")
    for index, count in Counter(index for _, index in indices if index is not None).items():
        if count > 1:
            raise Refused(f"several nodes have the index {index}; each needs one of its own")
    own = [(setting.node, gpu) for gpu in range(setting.local)]
    taken = Counter([*own, *((node.name, node.gpu) for node in nodes)])
    for (name, gpu), count in taken.items():
        if count > 1 and on_gpu:
            raise Refused(
                f"GPU {gpu} of node {name} is given to {count} ranks: start the ranks of a node by one command with "
                "--ranks, give each --gpu, or name the nodes apart with --node"
            )


class _Door:
    """Where ranks come in: each connection has a thread while it shows what it is."""

    def __init__(self, setting: HeadSetting, token: bytes) -> None:
        self._token = token
        family = socket.AF_INET6 if ":" in setting.host else socket.AF_INET
        self._listener = socket.create_server((setting.host, setting.port), family=family, backlog=128)
        self._listener.settimeout(_LOOK_S)
        self.port: int = self._listener.getsockname()[1]
        self._changed = threading.Condition()
        self._links: list[SocketLink] = []
        self.refused: Refused | None = None  # why not all ranks can come, or stay
        self._is_closed = False
        self._handshakes = ThreadPoolExecutor(_HANDSHAKES, thread_name_prefix="openinfer-handshake")
        self._room = threading.Semaphore(_HANDSHAKES)
        self._accepting = threading.Thread(target=self._accept, name="openinfer-rank-door", daemon=True)
        self._accepting.start()

    def wait(self, count: int, *, wait_s: float) -> list[SocketLink]:
        """So many ranks; none is let in afterwards.

        Raises:
            Refused: they have not come in time, or one cannot take part.
        """
        end_s = time.monotonic() + wait_s
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._links) >= count or self.refused is not None, end_s - time.monotonic()
            )
            links, refused = self._links, self.refused
            self._links = []
        self.close()
        if refused is None and len(links) >= count:
            for link in links[count:]:
                link.end(deadline_s=0)
            return links[:count]
        for link in links:
            link.end(deadline_s=0)
        here = ", ".join(sorted(link.name for link in links)) or "none"
        raise refused or Refused(
            f"--rank-host join: {len(links)} of {count} ranks have come within {wait_s:g} s ({here}); start the others "
            "with: openinfer rank --join HOST:PORT --token-file FILE"
        )

    def refuse(self, why: Refused) -> None:
        """The first reason is what `wait` raises."""
        with self._changed:
            self.refused = self.refused or why
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._accepting.join()
        self._handshakes.shutdown()

    def _accept(self) -> None:
        with self._listener:
            while not self._is_closed:
                if not self._room.acquire(timeout=_LOOK_S):
                    continue
                try:
                    connection, peer = self._listener.accept()
                except OSError as error:
                    self._room.release()
                    if error.errno in EXHAUSTED:
                        self._rest()
                    continue
                self._handshakes.submit(self._let_in, connection, str(peer[0]))

    def _rest(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, ACCEPT_PAUSE_S)

    def _let_in(self, connection: socket.socket, peer: str) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(self._room.release)
            closing = undo.enter_context(contextlib.ExitStack())
            closing.callback(connection.close)
            try:
                node = admit(connection, token=self._token)
            except NotAdmitted as error:
                logger.warning("a connection from %s is no rank: %s", peer, error)
                return
            except Refused as error:
                self.refuse(error)
                return
            with self._changed:
                # One that came too late finds its connection closed.
                if self._is_closed:
                    return
                closing.pop_all()
                self._links.append(SocketLink(connection, node))
                self._changed.notify_all()
