"""The connector against what was recorded of the class that it extends."""

import inspect

import pytest

from openinfer_kv_offload import TierConfigError


def test_every_override_takes_what_vllm_passes(vllm):
    from openinfer_kv_offload.vllm import OpenInferConnector

    overridden = [name for name in vars(OpenInferConnector) if name in vllm.methods and name != "__init__"]
    abstract = {name for name, facts in vllm.methods.items() if facts["abstract"]}
    assert abstract <= set(overridden)
    for name in overridden:
        facts, ours = vllm.methods[name], inspect.getattr_static(OpenInferConnector, name)
        if facts["kind"] == "property":
            assert isinstance(ours, property)
            continue
        parameters = inspect.signature(ours).parameters
        named = [each for each, of in parameters.items() if of.kind is not of.VAR_KEYWORD]
        assert named == facts["parameters"], name
        assert any(of.kind is of.VAR_KEYWORD for of in parameters.values()) == facts["keywords"], name
    assert list(inspect.signature(OpenInferConnector.__init__).parameters) == vllm.methods["__init__"]["parameters"]


def test_nothing_of_vllms_that_is_abstract_is_left_and_both_sides_can_be_made(vllm):
    scheduler = vllm.connector("SCHEDULER", tiers=["host=1MiB"])
    worker = vllm.connector("WORKER", tiers=["host=1MiB"])
    assert not scheduler.requires_kv_delivery
    assert worker.get_finished(set()) == (None, None)  # before its pool is registered
    worker.shutdown()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "kv_connector_extra_config: .*required field `tiers`; fields are tiers, digest_key_file"),
        ({"tiers": []}, "tiers is empty"),
        ({"tiers": ["host=1MiB"], "tires": 1}, "unknown field `tires`"),
        ({"tiers": ["disk=/tmp/x,1GiB"]}, "digest_key_file is missing"),
        ({"tiers": ["host=1MiB"], "load_timeout_s": 0}, "load_timeout_s is 0"),
        ({"tiers": ["host=1MiB"], "digest_key_file": "/nowhere"}, "digest_key_file: "),
        ({"tiers": ["host=1MiB"], "policy": "fail"}, "kv_load_failure_policy is 'fail'"),
        ({"tiers": ["host=1MiB"], "specs": ["MambaSpec"]}, r"this has \['MambaSpec'\]"),
        ({"tiers": ["host=1MiB"], "specs": ["FullAttentionSpec", "MambaSpec"]}, r"this has \['Full.*', 'MambaSpec'\]"),
        ({"tiers": ["host=1MiB"], "specs": ["SlidingWindowSpec:8"]}, r"with a group of full attention .*; this has"),
        ({"tiers": ["host=1MiB"], "specs": ["FullAttentionSpec", "SlidingWindowMLASpec:8"]}, r"'SlidingWindowMLASpec'"),
        # These derive from FullAttentionSpec, and leave gaps in what they keep of a prefix.
        ({"tiers": ["host=1MiB"], "specs": ["RSWASpec"]}, r"every block of a prefix, .*; this has \['RSWASpec'\]"),
        ({"tiers": ["host=1MiB"], "specs": ["SinkFullAttentionSpec"]}, r"this has \['SinkFullAttentionSpec'\]"),
        ({"tiers": ["host=1MiB"], "specs": ["SomeonesCompressedSpec"]}, r"this has \['SomeonesCompressedSpec'\]"),
    ],
)
def test_what_it_does_not_serve_is_refused(vllm, settings, message):
    with pytest.raises(TierConfigError, match=message):
        vllm.connector("SCHEDULER", **settings)


@pytest.mark.parametrize("spec", ["FullAttentionSpec", "MLAAttentionSpec", "TQFullAttentionSpec"])
def test_attention_that_keeps_every_block_of_a_prefix_is_served(vllm, spec):
    assert not vllm.connector("SCHEDULER", tiers=["host=1MiB"], specs=[spec]).requires_kv_delivery


def test_several_groups_are_served_where_vllm_computes_a_whole_request_again_and_refused_where_it_cannot(vllm):
    settings = {"tiers": ["host=1MiB"], "specs": ["FullAttentionSpec", "SlidingWindowSpec:8"]}
    if "get_transfer_results" in vllm.methods:
        assert not vllm.connector("SCHEDULER", **settings).requires_kv_delivery
    else:
        with pytest.raises(TierConfigError, match=r"vLLM 0\.25\.0 cannot compute again .* 2 KV cache groups"):
            vllm.connector("SCHEDULER", **settings)


def test_groups_whose_blocks_differ_in_tokens_are_refused(vllm):
    from openinfer_kv_offload.vllm.tables import read_groups

    def group(name, **facts):
        spec = type(name, (), facts)()
        return vllm.given("KVCacheGroupSpec", layer_names=["a"], kv_cache_spec=spec)

    groups = [group("FullAttentionSpec", block_size=4), group("SlidingWindowSpec", block_size=8, sliding_window=9)]
    if "get_transfer_results" in vllm.methods:
        with pytest.raises(TierConfigError, match=r"blocks of one size; these have \[4, 8\] tokens"):
            read_groups(groups)
