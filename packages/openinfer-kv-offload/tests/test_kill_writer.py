"""A few kills; `python -m openinfer_kv_offload.testing.soak` does fifty."""

from openinfer_kv_offload.testing.kill_writer import kill_writers


def test_a_store_whose_writers_were_killed_has_every_completed_block_and_no_wrong_one(tmp_path):
    report = kill_writers(tmp_path / "store", kills=3)
    assert report.kills == 3
    assert report.completed_blocks >= 3
    assert report.found_blocks >= report.completed_blocks
    assert report.wrong_blocks == report.lost_blocks == 0
