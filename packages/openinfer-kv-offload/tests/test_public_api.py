import openinfer_kv_offload


def test_all_is_sorted_and_complete():
    exported = openinfer_kv_offload.__all__
    assert exported == sorted(exported)
    assert len(set(exported)) == len(exported)
    for name in exported:
        assert getattr(openinfer_kv_offload, name).__name__ == name
