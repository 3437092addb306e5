"""The kit of rank hosts passes ours, and fails hosts that break the contract."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from joined import Joiner, free_port, make_token

from openinfer_core.testing.errors import ConformanceError
from openinfer_engine import Placement, RankHost, RankLink, RankPlace, RankSpec
from openinfer_engine.ranks.join_host import open_joined
from openinfer_engine.ranks.process_host import PipeLink, ProcessRankHost, open_processes
from openinfer_engine.testing import check_rank_host


def test_processes_pass() -> None:
    check_rank_host(lambda: open_processes(""))


@pytest.mark.skipif(sys.platform != "linux", reason="ranks of several machines need a POSIX system; /proc")
def test_joined_ranks_pass(tmp_path: Path) -> None:
    token, joiners = make_token(tmp_path), list[Joiner]()

    def open_host() -> RankHost:
        port = free_port()
        joiners.append(Joiner("--join", f"127.0.0.1:{port}", "--token-file", str(token), "--node", "b", "--ranks", "2"))
        return open_joined(f"127.0.0.1:{port},token-file={token},node=a")

    try:
        check_rank_host(open_host)
    finally:
        for joiner in joiners:
            with joiner:
                pass


class MutantHost(ProcessRankHost):
    """One of ours whose links or whose placement are wrong."""

    def __init__(self, link: type[PipeLink] = PipeLink, placement: Placement | None = None) -> None:
        super().__init__()
        self._make, self._wrong = link, placement

    def start(self, rank: int, spec: RankSpec) -> RankLink:
        super().start(rank, spec).end(deadline_s=0)
        return self._make()

    def placement(self) -> Placement:
        return self._wrong or super().placement()


class Deaf(PipeLink):
    def send(self, frame: bytes) -> None:
        del frame


class Nameless(PipeLink):
    name = ""  # type: ignore[assignment]


class Silent(PipeLink):
    def frames(self) -> Iterator[bytes]:
        for _ in super().frames():
            pass
        return iter(())


@pytest.mark.parametrize(
    ("link", "placement", "complaint"),
    [
        (Deaf, None, "must say so once|does not end"),
        (Nameless, None, "has no name"),
        (Silent, None, "must say so once"),
        (PipeLink, Placement.on_one_node(2), "has 2 of 3 ranks"),
        (PipeLink, Placement((RankPlace(1, 0), RankPlace(0, 0), RankPlace(0, 1))), "rank 0 is on node 1"),
        (PipeLink, Placement((RankPlace(0, 0), RankPlace(1, 0), RankPlace(0, 1))), "must follow each other"),
        (PipeLink, Placement((RankPlace(0, 0), RankPlace(1, 0), RankPlace(1, 1))), "places have no address"),
    ],
)
def test_a_host_that_breaks_the_contract_fails(
    link: type[PipeLink], placement: Placement | None, complaint: str
) -> None:
    with pytest.raises(ConformanceError, match=complaint):
        check_rank_host(lambda: MutantHost(link, placement), deadline_s=5.0 if link is Deaf else 120.0)
