"""`RayRankHost`: ranks on several nodes of a Ray cluster, joined over our own TCP links.

openinfer serve --model DIR --tensor-parallel-size 16 --rank-host ray=auto,ranks-per-node=8

engine's process: rank 0 and the others of its node, as processes         an actor on each other node
  ├─ pipe ─► placer ═ Ray ═ starts actors, tells them where to join ═════► RankNode
  └─ TCP ◄═ token, then steps and heartbeats ════════════════════════════ the processes that it starts
"""

import contextlib
import logging
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import msgspec

from openinfer_core import Refused
from openinfer_engine.ranks.contract import RankLink, RankSpec
from openinfer_engine.ranks.join_host import JoinRankHost
from openinfer_engine.ranks.join_setting import HeadSetting
from openinfer_engine.ranks.placement import Placement, RankPlace
from openinfer_ray.ranks.messages import Failed, Invite, Place, Placed, ToPlacer, from_placer, line_of
from openinfer_ray.ranks.setting import RaySetting

OPENINFER_CONTRACT = 1

logger = logging.getLogger("openinfer.engine")

PLACER = (sys.executable, "-P", "-m", "openinfer_ray.ranks.placer")
_TOKEN_BYTES = 32
_END_S = 15.0  # what the placer may take to end its actors
_HEAD = "head"


class RanksOnRay:
    """Makes the host of `--rank-host ray=…`, and says where its ranks would be."""

    def __call__(self, setting: str) -> "RayRankHost":
        return RayRankHost(RaySetting.parse(setting))

    def planned(self, setting: str, spec: RankSpec) -> Placement:
        """Each node's ranks on its first GPUs."""
        shares = RaySetting.parse(setting).shares_of(spec)
        return Placement(tuple(RankPlace(node, gpu) for node, count in enumerate(shares) for gpu in range(count)))


open_on_ray = RanksOnRay()


class RayRankHost:
    """Asks Ray for nodes when the first rank is started.

    Args:
        setting: which nodes.
        placer: the command of the process that speaks to Ray.
    """

    def __init__(self, setting: RaySetting, *, placer: Sequence[str] = PLACER) -> None:
        self._setting = setting
        self._command = placer
        self._placer: _Placer | None = None
        self._head: JoinRankHost | None = None

    def placement(self) -> Placement:
        if self._head is None:
            raise RuntimeError("ranks have not been started")
        return self._head.placement()

    def start(self, rank: int, spec: RankSpec) -> RankLink:
        if self._head is None:
            self._head = self._invite(spec)
        return self._head.start(rank, spec)

    def close(self) -> None:
        # First the placer: that its actors end is then no failure.
        if self._placer is not None:
            self._placer.close()
        if self._head is not None:
            self._head.close()

    def _invite(self, spec: RankSpec) -> JoinRankHost:
        """A head that listens where the actors have been told to join."""
        setting = self._setting
        local, *others = setting.shares_of(spec)
        order = Place(
            address=setting.address,
            shares=tuple(others),
            cpus=setting.cpus,
            on_gpu=spec.on_gpu,
            wait_s=setting.wait_s,
            group=setting.group,
            model=setting.model,
        )
        self._placer = _Placer(self._command)
        address = self._placer.place(order)
        token = secrets.token_hex(_TOKEN_BYTES).encode()
        at = HeadSetting(host=address, port=0, local=local, node=_HEAD, wait_s=setting.wait_s)
        head = JoinRankHost(at, token=token)
        invite = Invite(host=address, port=head.port, token=token)
        self._placer.invite(invite, failed=head.give_up)
        return head


class _Placer:
    """The engine's end of the process that speaks to Ray."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._is_closing = False
        self._watching: threading.Thread | None = None

    def place(self, order: Place) -> str:
        """Has actors started; returns the address of this node.

        Raises:
            Refused: Ray, or so many nodes of it, cannot be had.
        """
        self._say(order)
        answer = self._hear()
        if isinstance(answer, Placed):
            return answer.host
        raise Refused(_why(answer))

    def invite(self, invite: Invite, *, failed: Callable[[str], None]) -> None:
        """Has ranks join; what happens to an actor is told by a thread, with the reason."""
        self._watching = threading.Thread(target=self._watch, args=(failed,), name="openinfer-placer", daemon=True)
        self._watching.start()
        self._say(invite)

    def close(self) -> None:
        """Ends the actors. Idempotent."""
        self._is_closing = True
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._watching is not None:
            self._watching.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _watch(self, failed: Callable[[str], None]) -> None:
        is_there = True
        while is_there:
            heard = self._hear()
            is_there = heard is not None
            if not self._is_closing:
                why = _why(heard)
                logger.error("ranks on Ray: %s", why)
                failed(why)

    def _say(self, message: ToPlacer) -> None:
        """A placer that is gone is heard of where it should answer."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(line_of(message))
                self._process.stdin.flush()

    def _hear(self) -> Placed | Failed | None:
        """None if the placer is gone, or says what it should not."""
        line = b"" if self._process.stdout is None else self._process.stdout.readline()
        try:
            return from_placer.decode(line) if line else None
        except msgspec.MsgspecError:
            logger.exception("what places ranks on Ray said %r", line)
            return None


def _why(heard: Placed | Failed | None) -> str:
    return heard.why if isinstance(heard, Failed) else "the process that places ranks on Ray has ended"
