"""Whether another tenant is expected; seconds are the test's."""

from openinfer_engine.scheduler.company import COMPANY_S, Company


def test_another_tenant_is_expected_for_a_minute_after_it_had_something_running() -> None:
    company = Company()
    company.note({"a"}, now_s=0.0)
    assert not company.is_expected_by({"a"})
    company.note({"b"}, now_s=1.0)
    company.note({"a"}, now_s=2.0)
    assert company.is_expected_by({"a"})
    assert not company.is_expected_by({"a", "b"})
    company.note({"a"}, now_s=1.0 + COMPANY_S)
    assert company.is_expected_by({"a"})
    company.note({"a"}, now_s=1.1 + COMPANY_S)
    assert not company.is_expected_by({"a"})
    assert company.is_expected_by({"b"})


def test_tenants_are_forgotten_in_the_order_in_which_they_were_seen() -> None:
    company = Company()
    for second in range(200):
        company.note({f"tenant {second}", "steady"}, now_s=float(second))
    assert company.is_expected_by({"steady"})
    company.note((), now_s=200.0 + COMPANY_S)
    assert not company.is_expected_by(set())
