"""What a measurement was made of."""

from datetime import datetime

from openinfer_core.provenance import provenance


def test_given_commit_is_kept_and_versions_name_ours() -> None:
    found = provenance(commit="abc")
    assert found.commit == "abc"
    assert {"python", "openinfer-core", "numpy"} <= found.versions.keys()
    assert datetime.fromisoformat(found.date).utcoffset() is not None
    assert found.gpu


def test_commit_is_the_checkouts_or_unknown() -> None:
    commit = provenance().commit
    assert commit == "unknown" or len(commit) == 40
