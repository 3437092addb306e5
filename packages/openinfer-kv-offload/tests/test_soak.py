import json

from openinfer_kv_offload.testing.servers import S3_ENVIRONMENT
from openinfer_kv_offload.testing.soak import main


def test_soak_writes_what_it_saw(tmp_path, capsys, monkeypatch):
    for name, value in S3_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)  # so that what the soak sets is taken back
    file = tmp_path / "soak.json"
    assert main(["--steps", "1", "--kills", "1", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert json.loads(capsys.readouterr().out) == report
    assert report["kills"]["wrong_blocks"] == 0
    assert set(report["machines"]) == {"host", "host-lfu", "disk", "stack-through", "stack-back", "valkey", "s3"}
    assert {"commit", "date", "machine", "versions"} <= report.keys()
