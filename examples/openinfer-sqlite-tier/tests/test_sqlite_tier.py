"""The SQLite tier against the published kit, under random faults, and as a user opens it."""

import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from openinfer_kv_cache import KvLayout, TransferState
from openinfer_kv_cache.testing.tier_cases import chain, kit_layout, load, save
from openinfer_kv_cache.testing.tier_contract import FaultInjector, check_tier
from openinfer_kv_cache.testing.tier_machine import tier_machine
from openinfer_kv_offload import RemoteTier, RemoteTierOptions, TierConfigError, open_tiers
from openinfer_sqlite_tier import SqliteStore

MakeCase = Callable[[], "SqliteCase"]


class SqliteCase:
    is_persistent = True
    capacity_blocks = 12

    def __init__(self, folder: Path) -> None:
        self._path = str(folder / "kv.db")

    def open(self, layout: KvLayout, faults: FaultInjector) -> RemoteTier:
        budget_bytes = self.capacity_blocks * (layout.block_bytes + 128)
        options = RemoteTierOptions(budget_bytes=budget_bytes, connections=1)
        return RemoteTier(layout, SqliteStore(self._path), options, wrap_medium=faults.wrap)


@pytest.fixture
def make_case(tmp_path: Path) -> MakeCase:
    return lambda: SqliteCase(Path(tempfile.mkdtemp(dir=tmp_path)))


def test_tier_keeps_the_contract(make_case: MakeCase) -> None:
    check_tier(make_case)


def test_random_use_under_faults_never_gives_wrong_bytes(make_case: MakeCase) -> None:
    machine, seen = tier_machine(make_case)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=8,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert seen["loaded blocks"] > 20


def test_tier_is_found_by_its_name_also_below_another(tmp_path: Path) -> None:
    names = ["host=1MiB", f"sqlite={tmp_path / 'kv.db'},1MiB"]
    tier = open_tiers(names, kit_layout())
    assert save(tier, chain(1, 3)) is TransferState.COMPLETED
    tier.close()
    again = open_tiers(names, kit_layout())
    assert load(again, chain(1, 3)) == 3
    again.close()


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(TierConfigError, match="write FILE,SIZE"):
        open_tiers(["sqlite=/tmp/kv.db"], kit_layout())


def test_a_file_that_is_no_database_is_an_error_of_the_medium(tmp_path: Path) -> None:
    (tmp_path / "kv.db").write_bytes(b"no database" * 100)
    with pytest.raises(OSError, match="not a database") as refused:
        SqliteStore(str(tmp_path / "kv.db"))
    assert isinstance(refused.value.__cause__, sqlite3.Error)
