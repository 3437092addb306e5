import openinfer_kv_cache


def test_all_is_sorted_and_complete():
    exported = openinfer_kv_cache.__all__
    kinds = [0 if name.isupper() else 1 if name[0].isupper() else 2 for name in exported]  # constants, classes, others
    assert [*zip(kinds, exported, strict=True)] == sorted(zip(kinds, exported, strict=True))
    assert len(set(exported)) == len(exported)
    for name, kind in zip(exported, kinds, strict=True):
        assert kind == 0 or getattr(openinfer_kv_cache, name).__name__ == name
        assert hasattr(openinfer_kv_cache, name)
