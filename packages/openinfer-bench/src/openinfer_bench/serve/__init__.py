"""`openinfer bench serve`: latency and throughput of a server under load, ours or any other that speaks OpenAI's API.

Prompts are random token ids, streams are followed to their end, and a request counts only if it ended with as many
tokens as it asked for. The same seed sends the same requests to every server. Workloads are listed below.

    openinfer bench serve --url http://127.0.0.1:8000 --served-model NAME --workload bs1 qps=16 conc=64
    openinfer bench serve --model DIR --device cuda --load-format dummy --workload conc=64    (starts our server)
"""

import argparse
import contextlib
import os
from collections.abc import Generator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from openinfer.models import name_of
from openinfer_bench.arguments import check_folders
from openinfer_bench.serve import workloads
from openinfer_bench.serve.drafts import DraftWatch, line_of_drafts
from openinfer_bench.serve.figures import heading, line_of, row_of
from openinfer_bench.serve.load import send_load
from openinfer_bench.serve.messages import Target
from openinfer_bench.serve.plot import draw
from openinfer_bench.serve.watch import Watch
from openinfer_bench.serve.workloads import Sizes, phases
from openinfer_bench.served import served
from openinfer_core import InvalidRequest
from openinfer_core.provenance import provenance

OPENINFER_CONTRACT = 1


def run(argv: Sequence[str]) -> int:
    """Measures and prints a table; returns 1 if a request failed. Flags that are not listed go to `openinfer serve`."""
    arguments, flags = _parser().parse_known_args(argv)
    check_folders(arguments, ("json", "plot"))
    sizes = Sizes(
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        seconds=arguments.seconds,
        num_token_ids=arguments.num_token_ids,
        seed=arguments.seed,
        abort_share=arguments.abort_share,
    )
    plan = [phase for workload in arguments.workload for phase in phases(workload, sizes)]
    rows: list[dict[str, Any]] = []
    with target_of(arguments, flags) as (target, pid), Watch(target, pid, every_s=arguments.watch) as watch:
        print(heading(), flush=True)
        for phase in plan:
            drafts = DraftWatch(target)
            outcomes = send_load(target, phase, processes=arguments.processes)
            rows.append(row_of(phase.name, outcomes[phase.thrown_away :]) | phase.sizes | drafts.figures())
            print(line_of(rows[-1]) + line_of_drafts(rows[-1]), flush=True)
    if arguments.watch:
        print(watch.summary())
    report = {
        **msgspec.to_builtins(provenance(commit=arguments.commit)),
        "set_up": asdict(sizes) | {"flags": flags},
        "rows": rows,
        "samples": watch.samples,
    }
    if arguments.json is not None:
        Path(arguments.json).write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    if arguments.plot is not None:
        draw(rows, watch.samples, Path(arguments.plot))
    return 1 if any(row["failed"] for row in rows) else 0


@contextlib.contextmanager
def target_of(arguments: argparse.Namespace, flags: Sequence[str]) -> Generator[tuple[Target, int | None]]:
    """The server: the one at `--url`, or ours, which is started; and its process, if that is known."""
    headers = {} if arguments.api_key is None else {"authorization": f"Bearer {arguments.api_key}"}
    if (arguments.url is None) == (arguments.model is None):
        raise InvalidRequest("give --url of a server that runs, or --model to start one", field="url")
    if arguments.model is not None:
        with served(["--model", arguments.model, *flags]) as server:
            model = name_of(arguments.model)
            yield Target(host=server.host, port=server.port, path="", model=model, headers=headers), server.pid
        return
    if flags:
        raise InvalidRequest(f"unknown flags: {' '.join(flags)}", field="url")
    if arguments.served_model is None:
        raise InvalidRequest("--url needs --served-model: what the server calls its model", field="served_model")
    url = urlsplit(str(arguments.url))
    try:
        port = url.port or 80
    except ValueError:
        port = None
    if url.scheme != "http" or url.hostname is None or port is None:
        raise InvalidRequest(f"--url {arguments.url!r} is not of the form http://HOST:PORT", field="url")
    path = url.path.rstrip("/").removesuffix("/v1")
    target = Target(host=url.hostname, port=port, path=path, model=arguments.served_model, headers=headers)
    yield target, arguments.server_pid


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openinfer bench serve",
        description=__doc__,
        epilog=workloads.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--url", metavar="URL", help="a server that runs: http://HOST:PORT")
    add("--served-model", metavar="NAME", help="what that server calls its model")
    add("--server-pid", type=int, metavar="PID", help="its process, for --watch")
    add("--api-key", metavar="KEY", help="sent as a bearer token")
    add(
        "--model", metavar="DIR|NAME", help="start our server with this model; other flags are those of openinfer serve"
    )
    add(
        "--workload",
        nargs="+",
        required=True,
        metavar="W",
        help="bs1, qps=R, conc=N, prefill=L, warm=L1,L2; each may end in :PROMPTxOUTPUT tokens",
    )
    add("--prompt-tokens", type=int, default=1024, metavar="N", help="prompt tokens of bs1, qps and conc")
    add("--output-tokens", type=int, default=128, metavar="N", help="output tokens of bs1, qps and conc")
    add("--seconds", type=float, default=20.0, metavar="S", help="length of qps")
    add("--num-token-ids", type=int, default=151_000, metavar="N", help="vocabulary size: prompts hold ids below it")
    add(
        "--processes", type=int, default=max(1, min(6, (os.cpu_count() or 2) - 1)), metavar="N", help="client processes"
    )
    add(
        "--abort-share",
        type=float,
        default=0.0,
        metavar="X",
        help="share of the requests of qps and conc whose client leaves early",
    )
    add(
        "--watch", type=float, default=0.0, metavar="S", help="look at the server each S seconds: memory, open requests"
    )
    add("--seed", type=int, default=42, metavar="N", help="random seed of prompts, arrivals and aborts")
    add("--commit", metavar="ID", help="commit to record, where the code is in no checkout")
    add("--json", metavar="FILE", help="write the figures to FILE")
    add("--plot", metavar="FILE", help="draw them to FILE (needs openinfer[plot])")
    return parser
