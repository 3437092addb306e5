import json

from openinfer_kv_offload.bench import run


def test_bench_writes_figures_of_both_tiers(tmp_path, capsys):
    file = tmp_path / "bench.json"
    assert run(["--chain-blocks", "8", "--moved-blocks", "1", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["block_bytes"] == 2359296  # Qwen3-4B
    assert {"commit", "date", "machine", "versions"} <= report.keys()
    assert set(report["tiers"]) == {"host", "disk"}
    assert all(value > 0 for tier in report["tiers"].values() for value in tier.values())
    assert "us/block" in capsys.readouterr().out
