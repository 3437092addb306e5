"""The commands on the tiny model: figures of every workload, the files they write, and what they refuse."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from openinfer.commands.main import main
from openinfer_bench.serve.figures import line_of, row_of
from openinfer_bench.serve.messages import Outcome

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory of processes is read from /proc")
SMALL = ["--prompt-tokens", "16", "--output-tokens", "4", "--num-token-ids", "400", "--processes", "2"]


@linux
def test_serve_measures_our_server_and_writes_what_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, picture = tmp_path / "serve.json", tmp_path / "serve.png"
    command = ["bench", "serve", "--model", "tiny", "--workload", "bs1", "qps=40", "conc=8", "warm=24", *SMALL]
    command += ["--seconds", "0.5", "--abort-share", "0.3", "--watch", "0.5", "--commit", "abc"]
    assert (
        main([*command, "--json", str(file), "--plot", str(picture), "--num-blocks", "512", "--max-num-seqs", "16"])
        == 0
    )
    result = json.loads(file.read_text())
    assert [row["workload"] for row in result["rows"]] == ["bs1", "qps=40", "conc=8", "cold=24", "warm=24"]
    assert [row["ok"] + row["aborted"] for row in result["rows"]] == [8, 20, 64, 1, 10]
    assert all(row["failed"] == 0 and row["ttft_ms"]["p50"] > 0 for row in result["rows"])
    assert result["rows"][0]["tpot_ms"]["p99"] >= result["rows"][0]["tpot_ms"]["p50"] > 0
    assert result["rows"][-1]["cached_tokens"] == 160
    assert result["commit"] == "abc"
    assert {"gpu", "date", "versions"} <= result.keys()
    assert len(result["samples"]) >= 2
    assert result["samples"][0]["resident_mib"] > 10
    assert [result["samples"][-1][gauge] for gauge in ("open", "running", "waiting", "kv_blocks_used")] == [0, 0, 0, 0]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "warm=24" in capsys.readouterr().out


@linux
def test_serve_tells_how_many_drafts_were_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.json"
    command = ["bench", "serve", "--model", "tiny", "--workload", "bs1", *SMALL, "--output-tokens", "24"]
    assert (
        main([*command, "--json", str(file), "--num-blocks", "64", "--speculative", "ngram,n_min=1,k=3,adaptive=false"])
        == 0
    )
    (row,) = json.loads(file.read_text())["rows"]
    drafts = row["drafts"]
    assert drafts["draft_tokens"] >= drafts["drafts"] > 0
    assert drafts["draft_tokens"] >= drafts["accepted_tokens"] >= 0
    assert drafts["tokens_per_row"] == round(1 + drafts["accepted_tokens"] / drafts["drafts"], 3)
    assert f" of {drafts['draft_tokens']:,} drafts accepted, " in capsys.readouterr().out


@linux
def test_startup_writes_the_phases_of_both_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "startup.json"
    assert main(["bench", "startup", "--model", "tiny", "--repeats", "1", "--keep", "0", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    names = {
        process: [p["name"] for p in result["phases"] if p["process"] == process] for process in ("frontend", "engine")
    }
    assert names["frontend"] == ["arguments", "imports", "text", "engine", "http"]
    assert names["engine"] == ["imports", "config", "device", "operators", "weights", "kv_cache"]
    assert result["own_ready_s"] > 0
    assert result["ready_s"] > 0
    assert result["resident_mb"] >= result["proportional_mb"] > 0
    assert result["processes"] == 2
    assert {"commit", "gpu", "date", "versions"} <= result.keys()
    assert "weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give --url"),
        (["--url", "http://127.0.0.1:1", "--model", "tiny"], "give --url"),
        (["--url", "http://127.0.0.1:1"], "--served-model"),
        (["--url", "ftp://127.0.0.1:1", "--served-model", "m"], "not of the form"),
        (["--url", "http://127.0.0.1:1", "--served-model", "m", "--wat"], "unknown flags: --wat"),
        (["--url", "http://127.0.0.1:1", "--served-model", "m", "--watch", "1"], "--server-pid"),
    ],
)
def test_serve_refuses_in_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--workload", "bs1", *SMALL, *flags]) == 2
    assert message in capsys.readouterr().err


def test_row_counts_only_what_ended_as_asked() -> None:
    def times(*values: float) -> bytes:
        return np.array(values).tobytes()

    row = row_of(
        "conc=4",
        [
            Outcome(begin_s=1.0, times=times(1.5, 1.6, 1.8), tokens=3),
            Outcome(begin_s=1.0, times=times(2.0, 2.1, 3.0), tokens=3),
            Outcome(begin_s=1.0, times=times(9.0), tokens=1, aborted=True),
            Outcome(begin_s=1.0, error="boom"),
        ],
    )
    assert (row["ok"], row["failed"], row["aborted"], row["errors"]) == (2, 1, 1, ["boom"])
    assert row["out_tok_s"] == 3.0
    assert row["ttft_ms"]["mean"] == 750.0
    assert row["tpot_ms"]["p50"] == pytest.approx((150 + 500) / 2)
    assert row["itl_ms"]["p99"] > row["itl_ms"]["p90"] > row["itl_ms"]["p50"]
    assert "boom" in line_of(row)


def test_row_of_nothing_has_no_figures() -> None:
    row = row_of("bs1", [Outcome(begin_s=0.0, error="boom")])
    assert (row["out_tok_s"], row["ttft_ms"], row["itl_ms"]) == (0.0, None, None)
