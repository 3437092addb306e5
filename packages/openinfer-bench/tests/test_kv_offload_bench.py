import json

from openinfer_bench.kv_offload import run
from openinfer_kv_offload.testing.servers import S3_ENVIRONMENT


def test_bench_writes_figures_of_every_tier(tmp_path, capsys, monkeypatch):
    for name, value in S3_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)  # so that what the bench sets is taken back
    file = tmp_path / "bench.json"
    assert run(["--chain-blocks", "8", "--moved-blocks", "1", "--servers", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["block_bytes"] == 2359296  # Qwen3-4B
    assert {"commit", "date", "machine", "versions"} <= report.keys()
    assert set(report["tiers"]) == {"host", "disk", "valkey", "s3"}
    assert all(value > 0 for tier in report["tiers"].values() for value in tier.values())
    assert "us/block" in capsys.readouterr().out
