import pytest

from openinfer_core.errors import UnknownPlugin
from openinfer_kv_cache import LayoutMismatchError, TransferState
from openinfer_kv_cache.testing.tier_cases import chain, kit_layout, load, save
from openinfer_kv_offload import DiskTier, HostTier, TierConfigError, TierStack, open_tiers
from openinfer_kv_offload.setting_fields import parse_size
from openinfer_kv_offload.settings import open_disk, open_host

LAYOUT = kit_layout()


def test_sizes_have_binary_units():
    assert [parse_size(text) for text in ("1KiB", "3MiB", "64GiB", "2TiB")] == [2**10, 3 * 2**20, 2**36, 2**41]
    for text in ("64", "64GB", "1.5GiB", "-1GiB", ""):
        with pytest.raises(TierConfigError, match="is not a size"):
            parse_size(text)


def test_tiers_are_opened_by_the_names_of_their_entry_points(tmp_path):
    settings = ["host=1MiB,policy=lfu,ttl_s=600", f"disk={tmp_path / 'store'},2MiB,segment_bytes=65536"]
    tier = open_tiers(settings, LAYOUT)
    assert isinstance(tier, TierStack)
    assert save(tier, chain(1, 2)) is TransferState.COMPLETED
    tier.close()
    again = open_tiers(settings, LAYOUT)
    assert load(again, chain(1, 2)) == 2
    again.close()


def test_one_setting_is_that_tier_and_not_a_stack(tmp_path):
    for setting, kind in (("host=1MiB", HostTier), (f"disk={tmp_path},1MiB", DiskTier)):
        tier = open_tiers([setting], LAYOUT)
        assert isinstance(tier, kind)
        tier.close()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("host", "is not NAME=SETTING"),
        ("host=1MiB,polcy=lru", "unknown field `polcy`"),
        ("host=1MiB,policy=fifo", "Invalid enum value 'fifo'"),
        ("host=1MiB,lru", "is not one more NAME=VALUE"),
        ("host=1MiB,ttl_s=-1", "ttl_s is -1.0"),
        ("disk=/tmp/nowhere", "write FOLDER,SIZE"),
    ],
)
def test_settings_that_mean_nothing_are_refused(setting, message):
    with pytest.raises(TierConfigError, match=message):
        open_tiers([setting], LAYOUT)


def test_unknown_tiers_and_no_tiers_are_refused():
    with pytest.raises(UnknownPlugin, match=r"disk, host, .*s3"):
        open_tiers(["tape=1TiB"], LAYOUT)
    with pytest.raises(TierConfigError, match="no tier"):
        open_tiers([], LAYOUT)


def test_a_refused_tier_leaves_none_open(tmp_path):
    setting = f"{tmp_path},1MiB"
    open_disk(LAYOUT, setting).close()
    with pytest.raises(LayoutMismatchError):
        open_tiers(["host=1MiB", f"disk={setting}"], kit_layout(model_tag="other"))
    with pytest.raises(UnknownPlugin):
        open_tiers([f"disk={setting}", "tape=1TiB"], LAYOUT)
    open_disk(LAYOUT, setting).close()
    open_host(LAYOUT, "1MiB").close()
