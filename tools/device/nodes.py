"""An engine whose two ranks are on two nodes, as far as NCCL knows, against one whose ranks are on one: bits and times.

    python3 tools/device/nodes.py MODEL OUT.json [--device cpu] [--parallel data]

MODEL needs a config.json alone: weights are random. Each way is an engine in a process of its own: one whose ranks are
its own (NVLink, and our kernel for few rows), and one that a rank joins over TCP (`openinfer rank`) under another
`NCCL_HOSTID`, with sockets on loopback as the only way between the two. NCCL's log says which way it took. Ranks are
tensor-parallel, or data-parallel with experts dealt out, whose rows NCCL gathers where they are on two nodes.

Last, the node of rank 1 is killed while both decode: seconds until the engine says so, until it is closed, and until
an engine that is started anew has answered.
"""

import argparse
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tensor_parallel import answers
from timed_steps import timed

from openinfer_core import GenerateRequest, RequestId, SamplingParams, claim, list_plugins, read_config
from openinfer_core.plugins import MODELS
from openinfer_core.provenance import provenance
from openinfer_engine import GroupBroken, resolve
from openinfer_engine.engine_spec import EngineSpec
from openinfer_engine.launch import build_engine_loop
from openinfer_engine.worker.process_group import start_workers

WAYS = ("one-node", "two-nodes")
KILLED = "killed"
SIZES = ((1, 1024), (8, 1024))
LIMIT_S = {"cuda": 60, "cpu": 300}
JOIN = "import sys; from openinfer_engine.ranks.command import run; sys.exit(run(sys.argv[1:]))"
TRANSPORT = re.compile(r"via (NET/Socket|NET/IB|P2P|SHM)")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parallel", choices=("tensor", "data"), default="tensor")
    parser.add_argument("--way", choices=(*WAYS, KILLED))
    parser.add_argument("--options", type=json.loads, default={}, help="further options of the engine, as JSON")
    arguments = parser.parse_args()
    if arguments.way is not None:
        (killed if arguments.way == KILLED else one_way)(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = {way: run(way, arguments, Path(folder)) for way in (*WAYS, KILLED)}
        said = [np.load(Path(folder) / f"{way}.npy") for way in WAYS]
    delta = np.abs(said[0] - said[1])
    is_equal = bool(np.array_equal(*said))
    report: dict[str, Any] = {"parallel": arguments.parallel, "options": arguments.options}
    report |= {"is_equal": is_equal, "positions": len(delta), "largest_difference": float(delta.max()), "ways": found}
    text = json.dumps({**msgspec.to_builtins(provenance(commit=os.environ.get("COMMIT"))), **report}, indent=2)
    arguments.out.write_text(text + "\n")
    print(f"log-probabilities of {len(delta)} positions, bits equal: {is_equal}, at most {delta.max():.2e} apart")
    for way, each in found.items():
        print(way, json.dumps({name: value for name, value in each.items() if name != "device"}))


def run(way: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    environment = os.environ | {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(folder / f"{way}-%p.log")}
    environment |= {} if way == "one-node" else node(0)
    command = [sys.executable, __file__, str(arguments.model), str(folder / way), "--device", arguments.device]
    command += ["--parallel", arguments.parallel, "--way", way, "--options", json.dumps(arguments.options)]
    subprocess.run(command, env=environment, check=True, timeout=LIMIT_S[arguments.device])
    found = json.loads((folder / f"{way}.json").read_text())
    logs = [log.read_text(errors="replace") for log in folder.glob(f"{way}-*.log")]
    ways = [name for log in logs for name in TRANSPORT.findall(log)]
    return {**found, "channels": {name: ways.count(name) for name in sorted(set(ways))}}


def node(index: int) -> dict[str, str]:
    """The environment of a rank that NCCL takes for one of another machine, with sockets alone."""
    return {"NCCL_HOSTID": f"node-{index}", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}


class Ranks:
    """An engine of two ranks, on one node or on two."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        model_dir = arguments.model
        family: Any = claim(read_config(model_dir), list_plugins(MODELS))[0]
        given = {"load_format": "dummy", "prefix_cache": False, "grammar_compiler": "none", **arguments.options}
        given |= {"device": arguments.device, f"{arguments.parallel}_parallel_size": 2, "rank_host": "process"}
        self.joined: subprocess.Popen[bytes] | None = None
        if arguments.way != "one-node":
            with socket.create_server(("127.0.0.1", 0)) as listener:
                address = f"127.0.0.1:{listener.getsockname()[1]}"
            token = arguments.out.with_suffix(".token")
            token.touch(0o600)
            token.write_text(secrets.token_hex(32))
            given["rank_host"] = f"join={address},token-file={token},local=1"
            asked = ["--join", address, "--token-file", str(token), "--node", "another", "--gpu", "1"]
            command = [sys.executable, "-c", JOIN, *asked, "--model", str(model_dir)]
            self.joined = subprocess.Popen(command, env=os.environ | node(1))
        options = msgspec.convert(given, family.options_type)
        begin_s = time.perf_counter()
        processes = start_workers(EngineSpec.of(family.definition, model_dir, options), options)
        placement = None if processes is None else processes.placement
        plan = resolve(family.definition, model_dir, options, placement=placement)
        self.loop: Any = build_engine_loop(plan, processes)
        self.start_s = time.perf_counter() - begin_s


def one_way(arguments: argparse.Namespace) -> None:
    ranks = Ranks(arguments)
    loop, found = ranks.loop, dict[str, Any](start_s=ranks.start_s, rows=[])
    first, second = answers(loop), answers(loop)
    found["is_repeatable"] = bool(np.array_equal(first, second))
    for batch, prompt in SIZES if arguments.device == "cuda" else ():
        found["rows"].append(timed(loop, batch=batch, prompt=prompt))
    loop.close()
    if ranks.joined is not None:
        found["rank_exit_code"] = ranks.joined.wait(20)
    np.save(arguments.out.with_suffix(".npy"), first)
    arguments.out.with_suffix(".json").write_text(json.dumps(found))


def killed(arguments: argparse.Namespace) -> None:
    ranks = Ranks(arguments)
    assert ranks.joined is not None
    sampling = SamplingParams(max_tokens=4000, temperature=0.0)
    ranks.loop.submit(GenerateRequest(request_id=RequestId(999), prompt_token_ids=(1, 2, 3), sampling=sampling))
    for _ in range(50):
        ranks.loop.step()
    os.kill(ranks.joined.pid, signal.SIGKILL)
    begin_s, message = time.perf_counter(), ""
    try:
        while True:
            ranks.loop.step()
    except GroupBroken as error:
        message = str(error)
    told_s = time.perf_counter() - begin_s
    ranks.loop.close()
    closed_s = time.perf_counter() - begin_s
    ranks.joined.wait(20)
    again = Ranks(arguments)
    said = answers(again.loop)
    served_s = time.perf_counter() - begin_s
    again.loop.close()
    found = {"message": message, "told_s": told_s, "closed_s": closed_s, "served_again_s": served_s}
    arguments.out.with_suffix(".json").write_text(json.dumps({**found, "answered_positions": len(said)}))


if __name__ == "__main__":
    main()
