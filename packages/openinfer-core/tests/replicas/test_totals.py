"""What several engines are together: numbers added up, and each tier and plug-in told of once."""

from openinfer_core.engine import EngineState, EngineStats, GrammarStats, KvTierStats, PluginFaults, SlowCall
from openinfer_core.replicas.totals import stats_of_all


def test_numbers_are_added_up_and_the_oldest_step_counts() -> None:
    total = stats_of_all([EngineStats(running=1, step_age_s=0.5), EngineStats(running=2, waiting=3, step_age_s=0.25)])
    assert (total.running, total.waiting, total.step_age_s) == (3, 3, 0.5)
    assert total.state is EngineState.SERVING


def test_accepted_drafts_are_added_by_place() -> None:
    total = stats_of_all(
        [
            EngineStats(spec_decode_num_accepted_tokens_per_pos=(3, 1)),
            EngineStats(spec_decode_num_accepted_tokens_per_pos=(2, 2, 1)),
        ]
    )
    assert total.spec_decode_num_accepted_tokens_per_pos == (5, 3, 1)


def test_a_tier_of_several_is_one_and_says_what_is_wrong_with_one_of_them() -> None:
    """A page of metrics that named it twice would be none."""
    told = [
        KvTierStats(tier="host", finds=2, failures={"full": 1}),
        KvTierStats(tier="host", finds=3, failures={"full": 2, "slow": 1}, condition="full"),
    ]
    (tier,) = stats_of_all([EngineStats(kv_tiers=(each,)) for each in told]).kv_tiers
    assert tier == KvTierStats(tier="host", finds=5, failures={"full": 3, "slow": 1}, condition="full")


def test_tiers_of_other_names_stay_apart() -> None:
    tiers = (KvTierStats(tier="host", finds=1), KvTierStats(tier="disk", finds=2))
    assert stats_of_all([EngineStats(kv_tiers=tiers), EngineStats()]).kv_tiers == tiers


def test_a_plug_in_of_several_is_one() -> None:
    faults = PluginFaults(group="openinfer.schedulers", plugin="token-budget", counts={"lost": 1, "bad_plan": 0})
    total = stats_of_all([EngineStats(plugin_faults=(faults,)), EngineStats(plugin_faults=(faults,))])
    (plugin,) = total.plugin_faults
    assert plugin.counts == {"lost": 2, "bad_plan": 0}


def test_the_first_that_has_any_tells_of_grammars_and_slow_calls() -> None:
    grammars, slow = GrammarStats(kept=2), SlowCall(plugin="p", call="plan", age_s=2.0)
    total = stats_of_all([EngineStats(), EngineStats(grammars=grammars, slow_call=slow)])
    assert (total.grammars, total.slow_call) == (grammars, slow)
