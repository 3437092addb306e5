"""What several owners share: none takes what the others need."""

import random
from collections import Counter

import pytest

from openinfer_server.http.api_errors import ApiError
from openinfer_server.limits.shared_budget import SharedBudget, owner_of


def fill(budget: SharedBudget, owner: str) -> tuple[int, int]:
    """How many an owner gets, one by one, and the status of the refusal."""
    before = budget.used

    def take_all() -> None:
        while True:
            budget.take(owner, 1)

    with pytest.raises(ApiError) as refusal:
        take_all()
    assert refusal.value.headers == ((b"retry-after", b"1"),)
    return budget.used - before, refusal.value.status


def test_each_owner_finds_three_quarters_of_what_the_ones_before_have_left():
    budget = SharedBudget("requests", 1024, unit="requests")
    assert [fill(budget, owner) for owner in "abcd"] == [(768, 429), (192, 429), (48, 429), (12, 429)]
    assert budget.used == 768 + 192 + 48 + 12
    assert budget.refused == 4


def test_small_budget_is_one_owners_to_the_end():
    budget = SharedBudget("requests", 3, unit="requests")
    assert fill(budget, "a") == (3, 503)
    assert fill(budget, "b") == (0, 503)


def test_large_draws_leave_room_for_a_newcomer():
    """Two draws of half a budget would be all of it: only the first is allowed."""
    for second, status in (("a", 429), ("b", 503)):
        budget = SharedBudget("characters", 1000, unit="characters")
        budget.take("a", 500)
        with pytest.raises(ApiError) as refusal:
            budget.take(second, 500)
        assert refusal.value.status == status
        budget.take("c", 300)


def test_first_draw_may_be_all_of_it():
    budget = SharedBudget("bytes", 100, unit="bytes")
    budget.take("a", 100)
    with pytest.raises(ApiError, match="room for 100 bytes at a time") as refusal:
        budget.take("b", 1)
    assert refusal.value.status == 503
    budget.give_back("a", 100)
    budget.take("b", 80)
    with pytest.raises(ApiError, match="80 of 100 bytes are yours already") as refusal:
        budget.take("b", 1)
    assert refusal.value.status == 429


def test_books_agree_with_a_list_of_what_was_taken():
    draw = random.Random(0)
    budget = SharedBudget("bytes", 1000, unit="bytes")
    taken: list[tuple[str, int]] = []
    for _ in range(2000):
        if taken and draw.random() < 0.5:
            budget.give_back(*taken.pop(draw.randrange(len(taken))))
        else:
            owner, amount = draw.choice("abc"), draw.randint(1, 100)
            held = Counter()
            for each, num in taken:
                held[each] += num
            left = 1000 - held.total()
            may = amount <= left and (not taken or held[owner] + amount <= 3 * (left - amount + 1))
            try:
                budget.take(owner, amount)
            except ApiError:
                assert not may
            else:
                assert may
                taken.append((owner, amount))
        assert budget.used == sum(amount for _, amount in taken)


@pytest.mark.parametrize(
    ("address", "owner"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("/run/openinfer.sock", "/run/openinfer.sock"),
    ],
)
def test_owner_of_an_address_is_its_host_or_its_network(address, owner):
    assert owner_of(address) == owner
