"""`openinfer bench sessions`: agents' conversations against a server, ours or any other that speaks OpenAI's API.

Each session waits for its answers, goes on from them, waits for its tools, and may fork sub-agents. Sessions come from
a recording (`--trace`: Weka's and TraceLab's formats) or are generated. Prompts are token ids, so that a recorded block
is the same tokens wherever it comes again. TTFT and cache hits are told by turn, next to the hits that a cache which
forgets nothing would have had, and how many drafts were accepted where the server drafts.

`--check N` is the correctness arm: N turns that the cache helped are asked again under a fresh cache_salt, and must say
the same tokens with the same log-probabilities, but for ties. It fails otherwise.

    openinfer bench sessions --model DIR --device cuda --sessions 6 --kv-tier host=90GiB --check 200
    openinfer bench sessions --url http://127.0.0.1:8000 --served-model NAME --trace traces/ --max-wait-s 5
"""

import argparse
import asyncio
import http.client
import secrets
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from openinfer_bench.arguments import check_folders, check_least
from openinfer_bench.serve import target_of
from openinfer_bench.serve.drafts import DraftWatch
from openinfer_bench.serve.messages import Target
from openinfer_bench.sessions.check import Comparison, Verdict, check, choose, is_right
from openinfer_bench.sessions.figures import (
    heading,
    hits_by_tier,
    line_of,
    rows_of,
    summary,
    tells_cached,
    totals_of,
)
from openinfer_bench.sessions.filler import Filler
from openinfer_bench.sessions.generate import Shape, generate
from openinfer_bench.sessions.play import TOP_LOGPROBS, Played, Player
from openinfer_bench.sessions.plot import check_picture, draw
from openinfer_bench.sessions.session import Session, within
from openinfer_bench.sessions.traces import read_sessions
from openinfer_core import InvalidRequest
from openinfer_core.provenance import provenance

OPENINFER_CONTRACT = 1
_METRICS_S = 10.0
_LEAST = {
    **dict.fromkeys(("sessions", "turns", "first_tokens", "output_tokens", "places", "num_token_ids"), 1),
    **dict.fromkeys(("max_tokens", "max_turns"), 1),
    **dict.fromkeys(("new_tokens", "wait_s", "agents_share", "max_wait_s", "check", "tolerance"), 0),
}


def run(argv: Sequence[str]) -> int:
    """Plays, prints and checks; returns 1 if a turn failed, or said something else without a cache.

    Flags that are not listed go to `openinfer serve`.
    """
    arguments, flags = _parser().parse_known_args(argv)
    _check(arguments)
    shape = Shape(
        sessions=arguments.sessions,
        turns=arguments.turns,
        first_tokens=arguments.first_tokens,
        new_tokens=arguments.new_tokens,
        output_tokens=arguments.output_tokens,
        wait_s=arguments.wait_s,
        agents_share=arguments.agents_share,
    )
    sessions = _sessions(arguments, shape)
    salt = arguments.salt or secrets.token_hex(8)
    filler = Filler(num_token_ids=arguments.num_token_ids, seed=arguments.seed)
    with target_of(arguments, flags) as (target, _):
        top_logprobs = None if arguments.plain else TOP_LOGPROBS
        player = Player(target, filler, places=arguments.places, salt=salt, top_logprobs=top_logprobs)
        before, drafts = _metrics(target), DraftWatch(target)
        asyncio.run(player.play(sessions))
        rows = rows_of(player.played)
        tiers = hits_by_tier(before, _metrics(target))
        totals = totals_of(player.played, player.spans_s) | {"tiers": tiers} | drafts.figures()
        print("\n".join([heading(), *map(line_of, rows), summary(totals)]), flush=True)
        chosen = choose(player.played, turns=arguments.check, seed=arguments.seed)
        found = asyncio.run(check(target, chosen, tolerance=arguments.tolerance, salt=f"{salt}-uncached"))
    if arguments.check:
        print(_verdicts(found))
    report = {
        **msgspec.to_builtins(provenance(commit=arguments.commit)),
        "set_up": {**({"trace": str(arguments.trace)} if arguments.trace else asdict(shape)), "flags": flags},
        "rows": rows,
        "totals": totals,
        "checked": msgspec.to_builtins(found),
    }
    if arguments.json is not None:
        Path(arguments.json).write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    if arguments.plot is not None:
        draw(rows, Path(arguments.plot))
    if arguments.check and not found:
        print(f"nothing was checked: {_why_nothing(player.played)}")
    wrong = bool(arguments.check) and (not found or not is_right(found))
    return 1 if totals["failed"] or wrong else 0


def _check(arguments: argparse.Namespace) -> None:
    """Before anything is played.

    Raises:
        InvalidRequest: a number is out of range, a file cannot be written, or flags do not agree.
        Refused: `--plot` without matplotlib.
    """
    check_least(arguments, _LEAST)
    check_folders(arguments, ("json", "plot"))
    if arguments.plain and arguments.check:
        raise InvalidRequest("--check compares log-probabilities, which --plain does not ask for", field="plain")
    if arguments.agents_share > 1:
        raise InvalidRequest(f"--agents-share is {arguments.agents_share}; it must be 1 at most", field="agents_share")
    if arguments.plot is not None:
        check_picture(Path(arguments.plot))


def _sessions(arguments: argparse.Namespace, shape: Shape) -> list[Session]:
    """What is played, cut to what the server takes.

    Raises:
        InvalidRequest: nothing is left.
    """
    if arguments.trace is None:
        sessions = generate(shape, seed=arguments.seed)
    else:
        sessions = read_sessions(Path(arguments.trace))[: arguments.sessions]
    limits = {"max_tokens": arguments.max_tokens, "max_wait_s": arguments.max_wait_s, "max_turns": arguments.max_turns}
    kept = [cut for session in sessions if (cut := within(session, **limits)).turns]
    if not kept:
        raise InvalidRequest("no session has a turn that fits --max-tokens", field="max_tokens")
    return kept


def _metrics(target: Target) -> dict[str, float]:
    """Samples of the server's `/metrics` by name and labels; none where it has no such page."""
    connection = http.client.HTTPConnection(target.host, target.port, timeout=_METRICS_S)
    try:
        connection.request("GET", f"{target.path}/metrics", headers=target.headers)
        response = connection.getresponse()
        text = response.read().decode(errors="replace") if response.status == 200 else ""
    except (OSError, http.client.HTTPException):
        return {}
    finally:
        connection.close()
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            try:
                found[name] = float(value)
            except ValueError:
                continue
    return found


def _why_nothing(played: Sequence[Played]) -> str:
    if all(each.outcome.error for each in played):
        return "no turn was answered"
    return "the cache helped no turn" if tells_cached(played) else "the server tells no cached tokens"


def _verdicts(found: Sequence[Comparison]) -> str:
    counts = {verdict: sum(each.verdict is verdict for each in found) for verdict in Verdict}
    largest = max((each.difference for each in found), default=0.0)
    said = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items())
    return (
        f"checked {len(found)} cached turns without a cache: {said}; log-probabilities differ by {largest:.2g} at most"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openinfer bench sessions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--url", metavar="URL", help="a server that runs: http://HOST:PORT")
    add("--served-model", metavar="NAME", help="what that server calls its model")
    add("--server-pid", type=int, metavar="PID", help=argparse.SUPPRESS)
    add("--api-key", metavar="KEY", help="sent as a bearer token")
    add("--model", metavar="DIR|NAME", help="start our server with this model; other flags are openinfer serve's")
    add("--trace", metavar="PATH", help="recorded sessions, a file or a folder; else they are generated")
    shape = Shape()
    add("--sessions", type=int, default=shape.sessions, metavar="N", help="how many (default: %(default)s)")
    add("--turns", type=int, default=shape.turns, metavar="N", help="of a generated session (default: %(default)s)")
    add("--first-tokens", type=int, default=shape.first_tokens, metavar="N", help="of its first prompt")
    add("--new-tokens", type=int, default=shape.new_tokens, metavar="N", help="that a turn adds (%(default)s)")
    add("--output-tokens", type=int, default=shape.output_tokens, metavar="N", help="of a turn (%(default)s)")
    add("--wait-s", type=float, default=shape.wait_s, metavar="S", help="of a tool (%(default)s)")
    add("--agents-share", type=float, default=shape.agents_share, metavar="X", help="of sessions with a sub-agent")
    add("--places", type=int, default=64, metavar="N", help="sessions at once (%(default)s)")
    add("--max-tokens", type=int, default=120_000, metavar="N", help="a session ends before a turn with more")
    add("--max-wait-s", type=float, default=60.0, metavar="S", help="longer waits are cut (%(default)s)")
    add("--max-turns", type=int, metavar="N", help="of each conversation")
    add("--num-token-ids", type=int, default=151_000, metavar="N", help="vocabulary size: prompts hold ids below it")
    add("--seed", type=int, default=42, metavar="N", help="of the text and of the sample that is checked")
    add(
        "--salt",
        metavar="TEXT",
        help="cache_salt of the sessions; a random one by default. Give one to find what a run before left in a tier",
    )
    add(
        "--plain",
        action="store_true",
        help="ask for no log-probabilities and no token ids, which take servers different times; answers are filler in"
        " the prompts after them",
    )
    add("--check", type=int, default=0, metavar="N", help="turns to ask again without a cache")
    add(
        "--tolerance",
        type=float,
        default=0.1,
        metavar="X",
        help="of log-probabilities of equal tokens; 0: nothing may differ, not by a tie either (--batch-invariant)",
    )
    add("--commit", metavar="ID", help="commit to record, where the code is in no checkout")
    add("--json", metavar="FILE", help="write the figures to FILE")
    add("--plot", metavar="FILE", help="draw them to FILE (needs openinfer[plot])")
    return parser
