"""Sessions against the real engine with the tiny model, in this process: what is asked and told, and planted errors."""

import asyncio
import contextlib
import http.client
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from openinfer.commands.main import main
from openinfer.models import find_family, find_model_dir
from openinfer_bench.serve.messages import Outcome, ScoredToken, Target
from openinfer_bench.sessions.check import Verdict, check, choose, compare, is_right
from openinfer_bench.sessions.figures import line_of, rows_of, summary, totals_of
from openinfer_bench.sessions.filler import Filler
from openinfer_bench.sessions.generate import Shape, generate
from openinfer_bench.sessions.play import Played, Player
from openinfer_bench.sessions.plot import draw
from openinfer_bench.sessions.reuse import PrefixesSeen
from openinfer_bench.sessions.session import Blocks, Grow, Session, Turn
from openinfer_engine import EngineOptions, build_loop, resolve
from openinfer_engine.options import LoadFormat
from openinfer_engine.testing.adapters import write_adapter
from openinfer_engine.worker.block_tables import BlockTables
from openinfer_engine.worker.state_slots import StateSlots
from openinfer_kv_cache import BlockSequence, PrefixHasher
from openinfer_server import ServerOptions
from openinfer_server.testing import ThreadedServer

SHAPE = Shape(sessions=3, turns=4, first_tokens=50, new_tokens=20, output_tokens=6, wait_s=0.0, agents_share=0.34)
BLOCK = 16
FILLER = Filler(num_token_ids=1500, seed=7)
HYBRID = Path(__file__).parents[1] / "fixtures" / "hybrid" / "config.json"
"""Of a model with recurrent states, of Qwen3.5's kind, whose weights are drawn at random."""


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    shutil.copy(HYBRID, folder)
    shutil.copy(find_model_dir("tiny") / "tokenizer.json", folder)
    return folder


@pytest.fixture
def start() -> Iterator[Callable[..., Target]]:
    """Starts a server, with the tiny model if no folder is given; returns how to reach it."""
    servers: list[ThreadedServer] = []

    def start(
        folder: Path | None = None, *, served: ServerOptions | None = None, **options: int | bool | str
    ) -> Target:
        folder = find_model_dir("tiny") if folder is None else folder
        family, _ = find_family(folder)
        engine = EngineOptions(**({"num_blocks": 256, "max_num_seqs": 16, "max_step_tokens": 128} | options))
        loop = build_loop(resolve(family.definition, folder, engine))
        server = ThreadedServer(loop, folder, served or ServerOptions(port=0))
        servers.append(server.__enter__())
        host, port = server.address
        return Target(host=host, port=port, path="", model=folder.name)

    yield start
    for server in servers:
        server.__exit__(None, None, None)


def play(target: Target, sessions: list[Session], *, salt: str = "a") -> Player:
    player = Player(target, FILLER, places=8, salt=salt)
    asyncio.run(player.play(sessions))
    return player


def verdicts(target: Target, player: Player, *, turns: int = 100, tolerance: float = 0.0) -> list[Verdict]:
    chosen = choose(player.played, turns=turns, seed=1)
    found = asyncio.run(check(target, chosen, tolerance=tolerance, salt="fresh", show=False))
    assert (Verdict.DIFFERENT not in {each.verdict for each in found}) == is_right(found)
    return [each.verdict for each in found]


def test_sessions_hit_what_they_allow_and_say_the_same_without_a_cache(start: Callable[..., Target]) -> None:
    target = start(batch_invariant=True)
    player = play(target, generate(SHAPE, seed=3))
    totals = totals_of(player.played, player.spans_s)
    assert (totals["sessions"], totals["turns"], totals["failed"]) == (3, 13, 0)  # a sub-agent has a quarter: one turn
    assert totals["cached_tokens"] == sum(each.allowed_tokens for each in player.played) > 0
    assert totals["hits_of_allowed"] == 1.0
    rows = rows_of(player.played)
    assert [row["turn"] for row in rows] == [1, 2, 3, 4]
    assert [row["ok"] for row in rows] == [4, 3, 3, 3]
    assert set(verdicts(target, player)) == {Verdict.SAME}
    by_turn = {(each.session, each.turn): each for each in player.played}
    first, second = by_turn["session-0", 1], by_turn["session-0", 2]
    said = np.frombuffer(second.prompt, np.int32)
    assert said[:50].tobytes() == first.prompt
    assert said[50:56].tolist() == first.outcome.token_ids  # a conversation goes on from what the server said
    agent = next(each for each in player.played if each.session.endswith("/agent"))
    parent = by_turn[agent.session.removesuffix("/agent"), 3]
    assert agent.prompt.startswith(parent.prompt)
    assert agent.begin_s >= parent.end_s


def test_equal_blocks_are_equal_tokens_within_their_scope(start: Callable[..., Target]) -> None:
    def session(name: str, scope: str, *names: int) -> Session:
        prompt = Blocks(names=names, block_tokens=16, num_tokens=16 * len(names) + 3)
        return Session(name=name, scope=scope, turns=(Turn(prompt=prompt, output_tokens=1),))

    target = start()
    found: list[int] = []
    for each in (session("a", "s", 1, 2, 3), session("b", "s", 1, 2, 4), session("c", "t", 1, 2, 3)):
        found += [played.outcome.cached_tokens for played in play(target, [each]).played]
    assert found == [0, 32, 0]


def test_blocks_beyond_a_prompt_are_not_made(start: Callable[..., Target]) -> None:
    many = Blocks(names=(1, 2**70, *range(10**5)), block_tokens=2**24, num_tokens=20)
    few = Blocks(names=(1,), block_tokens=16, num_tokens=20)
    turns = tuple(Turn(prompt=prompt, output_tokens=1) for prompt in (many, few))
    one, two = play(start(), [Session(name="s", turns=turns)]).played
    assert (one.prompt_tokens, one.outcome.error) == (20, "")
    assert one.prompt[:64] == two.prompt[:64]  # of 16 tokens: a shorter block is the beginning of a longer one
    assert one.prompt != two.prompt


def test_a_session_ends_where_a_turn_fails(start: Callable[..., Target]) -> None:
    turns = [Turn(prompt=Grow(keep_tokens=0, new_tokens=size), output_tokens=2) for size in (20, 10**6, 20)]
    player = play(start(), [Session(name="s", turns=tuple(turns))])
    assert [bool(each.outcome.error) for each in player.played] == [False, True]
    assert totals_of(player.played, player.spans_s)["failed"] == 1


def stale_block(patch: pytest.MonkeyPatch) -> None:
    """The last block of a cached prefix is another's."""
    find = BlockSequence._find_prefix  # noqa: SLF001 - a mutant changes what is private

    def find_stale(self, *args):
        found = find(self, *args)
        pool = self._pool
        others = [block for block in pool._registry.values() if block not in found]  # noqa: SLF001 - as above
        return [*found[:-1], others[0]] if found and others else found

    patch.setattr(BlockSequence, "_find_prefix", find_stale)


def positions_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Rows that begin with a cached prefix rotate by one position too many."""
    build = BlockTables.batch

    def shifted(self, plan, ops, *args, **kwargs):
        batch = build(self, plan, ops, *args, **kwargs)
        lengths = np.asarray(plan.counts)
        batch.positions[: lengths.sum()] += np.repeat((plan.starts > 0) & (lengths > 1), lengths).astype(np.int32)
        return batch

    patch.setattr(BlockTables, "batch", shifted)


def dropped_salt(patch: pytest.MonkeyPatch) -> None:
    """Prefixes of every salt are one."""
    patch.setattr("openinfer_server.request.plan.salt_of", lambda tenant, given: None)


@pytest.mark.parametrize("plant", [stale_block, positions_off_by_one, dropped_salt])
def test_the_arm_finds_what_is_planted(
    plant: Callable[[pytest.MonkeyPatch], None], start: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    target = start(batch_invariant=True)
    player = play(target, generate(SHAPE, seed=3))
    assert Verdict.DIFFERENT in verdicts(target, player, tolerance=0.1)


def adapter_reused_by_name(patch: pytest.MonkeyPatch) -> None:
    """Prefixes of an adapter are known by its name, not by its content."""
    root = PrefixHasher.root

    def root_by_name(self, *, lora_name=None, adapter_digest=None, cache_salt=None):
        del adapter_digest
        return root(self, lora_name=lora_name, cache_salt=cache_salt)

    patch.setattr(PrefixHasher, "root", root_by_name)


@pytest.mark.parametrize("plant", [None, adapter_reused_by_name])
def test_the_arm_finds_an_adapter_that_is_reused_by_name(
    plant: Callable[[pytest.MonkeyPatch], None] | None,
    start: Callable[..., Target],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if plant is not None:
        plant(monkeypatch)
    model_dir = find_model_dir("tiny")
    family, _ = find_family(model_dir)
    config = json.loads((model_dir / "config.json").read_bytes())
    for seed, name in enumerate(("before", "after")):
        write_adapter(tmp_path / name, family.definition, config, rank=8, seed=seed)
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\ntenant = "operators"\nkey = "operators-0123456789"\nlevel = "admin"\n')
    keys.chmod(0o600)
    served = ServerOptions(port=0, api_keys_file=str(keys))
    target = start(batch_invariant=True, lora_root=str(tmp_path), served=served)
    target = msgspec.structs.replace(target, model="ours", headers={"x-api-key": "operators-0123456789"})
    for name in ("before", "after"):
        change_adapter(target, "load", lora_name="ours", lora_path=name)
        player = play(target, generate(SHAPE, seed=3))  # the second time with equal prompts and salt
        if name == "before":
            change_adapter(target, "unload", lora_name="ours")
    assert any(each.outcome.cached_tokens for each in player.played)
    found = set(verdicts(target, player))
    assert found == {Verdict.SAME} if plant is None else Verdict.DIFFERENT in found


def change_adapter(target: Target, verb: str, **fields: str) -> None:
    connection = http.client.HTTPConnection(target.host, target.port, timeout=60)
    with contextlib.closing(connection):
        headers = {"content-type": "application/json", **target.headers}
        connection.request("POST", f"/v1/{verb}_lora_adapter", json.dumps(fields), headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()


def state_one_boundary_back(patch: pytest.MonkeyPatch) -> None:
    """Recurrent states are copied before the row that they are to follow; rows have one block, so a block too early."""
    advance = StateSlots.advance

    def advance_and_keep(self, plan) -> None:
        advance(self, plan)
        self._copy(plan.state_snapshots)

    patch.setattr(StateSlots, "advance", advance_and_keep)
    patch.setattr(StateSlots, "keep", lambda self, plan: None)


@pytest.mark.parametrize("plant", [None, state_one_boundary_back, positions_off_by_one, dropped_salt])
def test_the_arm_finds_what_is_planted_in_a_hybrid(
    plant: Callable[[pytest.MonkeyPatch], None] | None,
    start: Callable[..., Target],
    hybrid: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if plant is not None:
        plant(monkeypatch)
    target = start(
        hybrid, batch_invariant=True, load_format=LoadFormat.DUMMY, block_size_tokens=BLOCK, max_step_tokens=BLOCK
    )
    player = play(target, generate(SHAPE, seed=3))
    assert any(each.outcome.cached_tokens for each in player.played)
    found = set(verdicts(target, player))
    assert found == {Verdict.SAME} if plant is None else Verdict.DIFFERENT in found


def scored(*tokens: tuple[str, float, dict[str, float]]) -> list[ScoredToken]:
    return [ScoredToken(text, logprob, {text: logprob} | top) for text, logprob, top in tokens]


@pytest.mark.parametrize(
    ("uncached", "tolerance", "verdict", "position"),
    [
        ([("a", -1.0, {}), ("b", -2.0, {})], 0.0, Verdict.SAME, None),
        ([("a", -1.05, {}), ("b", -2.0, {})], 0.1, Verdict.SAME, None),
        ([("a", -1.2, {}), ("b", -2.0, {})], 0.1, Verdict.DIFFERENT, 0),
        ([("a", -1.0, {}), ("c", -1.99, {"b": -2.005})], 0.1, Verdict.TIE, 1),
        ([("a", -1.0, {}), ("c", -1.99, {"b": -2.005})], 0.0, Verdict.DIFFERENT, 1),
        ([("a", -1.0, {}), ("c", -1.9, {"b": -2.0})], 0.1, Verdict.DIFFERENT, 1),
        ([("a", -1.0, {}), ("c", -1.9, {})], 0.1, Verdict.DIFFERENT, 1),
        ([("a", -1.0, {})], 0.1, Verdict.UNANSWERED, None),
    ],
)
def test_ties_and_differences(uncached, tolerance: float, verdict: Verdict, position: int | None) -> None:
    cached = scored(("a", -1.0, {}), ("b", -2.0, {}))
    assert compare(cached, scored(*uncached), tolerance=tolerance)[:2] == (verdict, position)


def test_tokens_that_are_spelled_alike_are_told_apart_by_their_ids() -> None:
    said = scored(("\ufffd", -1.0, {}), ("b", -2.0, {}))
    assert compare(said, said, tolerance=0.1, token_ids=([1, 2], [1, 2]))[0] is Verdict.SAME
    assert compare(said, said, tolerance=0.1, token_ids=([1, 2], [3, 2]))[:2] == (Verdict.DIFFERENT, 0)
    assert compare(said, said, tolerance=0.1, token_ids=([], [3, 2]))[0] is Verdict.SAME  # a server that tells none


def turn_of(session: str, number: int, *, error: str = "", cached: int | None = None) -> Played:
    outcome = Outcome(begin_s=0.0, times=np.ones(1).tobytes(), tokens=1, error=error)
    outcome.cached_tokens, outcome.tells_cached = cached or 0, cached is not None
    sizes = {"prompt_tokens": 40, "output_tokens": 1, "allowed_tokens": 32 * (number > 1)}
    return Played(session=session, turn=number, prompt=b"", **sizes, begin_s=0.0, end_s=1.0, outcome=outcome)


def test_hits_that_a_server_does_not_tell_are_no_misses(tmp_path: Path) -> None:
    spans = {"a": (0.0, 2.0), "b": (0.0, 0.5)}
    played = [turn_of("a", 1), turn_of("b", 1, error="boom"), turn_of("a", 2)]
    rows, totals = rows_of(played), totals_of(played, spans)
    assert [(row["new_tokens"], row["hit_rate"]) for row in rows] == [(None, None)] * 2
    assert line_of(rows[1]).split()[3:7] == ["40", "-", "-", "80.0%"]
    assert (totals["cached_tokens"], totals["hits_of_allowed"]) == (None, None)
    assert "tells no cached tokens; a session takes 2.0 s" in summary(totals).replace(" in its usage", "")
    assert "1 sessions ended where a turn failed" in summary(totals)  # and its half second is no session's time
    draw(rows, tmp_path / "untold.png")
    played[2] = turn_of("a", 2, cached=32)  # of the first turn it says nothing, since there was nothing
    assert [(row["new_tokens"], row["hit_rate"]) for row in rows_of(played)] == [(40, 0.0), (8, 0.8)]
    assert totals_of(played, spans)["hits_of_allowed"] == 1.0


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--places", "0"),
        ("--sessions", "-1"),
        ("--output-tokens", "0"),
        ("--new-tokens", "-5"),
        ("--agents-share", "2"),
        ("--wait-s", "nan"),
        ("--check", "-1"),
        ("--max-turns", "0"),
        ("--json", "/nowhere/at/all.json"),
        ("--plot", "/nowhere/at/all.png"),
        ("--plot", "picture.docx"),
        ("--url", "http://127.0.0.1:99999"),
    ],
)
def test_what_cannot_be_played_or_written_is_refused_at_once(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "http://127.0.0.1:9"
    assert main(["bench", "sessions", "--url", url, "--served-model", "m", flag, value]) == 2
    assert flag in capsys.readouterr().err


def test_filler_is_a_function_of_its_name() -> None:
    long = FILLER.tokens("block", "s", 1, num_tokens=100)
    assert long[:30].tolist() == FILLER.tokens("block", "s", 1, num_tokens=30).tolist()
    assert long.tolist() != FILLER.tokens("block", "s", 2, num_tokens=100).tolist()
    assert long.min() >= 0
    assert long.max() < 1500
    assert len(set(long.tolist())) > 80
    assert FILLER.tokens("block", "s", 1, num_tokens=4).tolist() == [94, 597, 515, 191]  # on every machine


def test_what_a_cache_could_have_had() -> None:
    seen = PrefixesSeen()
    tokens = np.arange(100, dtype=np.int32)
    assert seen.reusable_tokens(tokens) == 0
    seen.add(tokens[:50])
    assert seen.reusable_tokens(tokens) == 48
    assert seen.reusable_tokens(tokens[:48]) == 32  # the last token is always computed
    other = tokens.copy()
    other[20] = 7
    assert seen.reusable_tokens(other) == 16


def test_the_command_plays_checks_writes_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "sessions.json", tmp_path / "sessions.png"
    small = "--sessions 2 --turns 3 --first-tokens 40 --new-tokens 16 --output-tokens 4 --wait-s 0 --num-token-ids 400"
    command = ["bench", "sessions", "--model", "tiny", *small.split(), "--check", "4", "--json", str(file)]
    command += ["--plot", str(picture), "--commit", "abc", "--num-blocks", "256", "--kv-tier", "host=16MiB"]
    command += ["--speculative", "ngram,n_min=1,adaptive=false"]
    assert main(command) == 0
    result = json.loads(file.read_text())
    assert [row["turn"] for row in result["rows"]] == [1, 2, 3]
    assert [each["verdict"] for each in result["checked"]] == ["same"] * 4
    assert result["totals"]["tiers"]["gpu_tokens"] == result["totals"]["cached_tokens"] > 0
    assert result["commit"] == "abc"
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown, drafts = capsys.readouterr().out, result["totals"]["drafts"]
    assert "checked 4 cached turns" in shown
    assert drafts["draft_tokens"] >= drafts["drafts"] > 0
    assert f" of {drafts['draft_tokens']:,} drafts accepted, " in shown


def test_plain_sessions_ask_for_tokens_alone_and_go_on_from_filler(start: Callable[..., Target]) -> None:
    player = Player(start(), FILLER, places=8, salt="a", top_logprobs=None)
    asyncio.run(player.play(generate(SHAPE, seed=3)))
    totals = totals_of(player.played, player.spans_s)
    assert totals["failed"] == 0
    assert totals["hits_of_allowed"] == 1.0
    assert not any(each.outcome.scored or each.outcome.token_ids for each in player.played)
    second = next(each for each in player.played if (each.session, each.turn) == ("session-0", 2))
    filler = FILLER.tokens("output", "session-0", 1, num_tokens=SHAPE.output_tokens)
    assert np.frombuffer(second.prompt, np.int32)[50:56].tolist() == filler.tolist()


def test_plain_sessions_are_not_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sessions", "--model", "tiny", "--plain", "--check", "1"]) == 2
    assert "--plain" in capsys.readouterr().err


def test_nothing_to_play_and_nothing_to_check_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sessions", "--model", "tiny", "--max-tokens", "100"]) == 2
    assert "--max-tokens" in capsys.readouterr().err
    small = "--sessions 1 --turns 1 --first-tokens 20 --output-tokens 2 --num-token-ids 400 --check 1"
    assert main(["bench", "sessions", "--model", "tiny", *small.split()]) == 1
    assert "nothing was checked" in capsys.readouterr().out
