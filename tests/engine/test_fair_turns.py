"""Turns of accounts: by weight and rows, whatever an account asks for and however often."""

import random
from collections import Counter

import pytest
from tinsmith.engine.fair_turns import Account, FairTurns, charge


def served(
    accounts: dict[str, Account[str]], rows: dict[str, float], turns: int
) -> tuple[list[str], Counter[str]]:
    """The order of turns of accounts that always have more to do, and the rows of each."""
    fair: FairTurns[str] = FairTurns()
    order, total = [], Counter[str]()
    for name, account in accounts.items():
        fair.add(account, name)
    for _ in range(turns):
        name = fair.take()
        order.append(name)
        total[name] += rows[name]
        charge(accounts[name], rows[name])
        fair.add(accounts[name], name)
    return order, total


def test_equal_accounts_alternate() -> None:
    order, _ = served({name: Account() for name in "abc"}, dict.fromkeys("abc", 512), 9)
    assert sorted(order[:3]) == sorted(order[3:6]) == sorted(order[6:]) == ["a", "b", "c"]


def test_rows_are_shared_by_weight() -> None:
    rows = {"long": 4096.0, "short": 16.0, "heavy": 512.0}
    accounts: dict[str, Account[str]] = {
        "long": Account(), "short": Account(), "heavy": Account(weight=3.0)
    }  # fmt: skip
    _, total = served(accounts, rows, 20_000)
    assert total["short"] == pytest.approx(total["long"], abs=2 * 4096)
    assert total["heavy"] == pytest.approx(3 * total["long"], abs=4 * 4096)


def test_runs_of_one_account_take_turns() -> None:
    fair, account, other = FairTurns[str](), Account[str](), Account[str]()
    for name in ("a", "b", "c"):
        fair.add(account, name)
    fair.add(other, "x")
    seen = []
    for _ in range(8):
        name = fair.take()
        seen.append(name)
        owner = other if name == "x" else account
        charge(owner, 1)
        fair.add(owner, name)
    assert Counter(seen) == {"x": 4, "a": 2, "b": 1, "c": 1}


def test_an_account_that_was_idle_saves_up_no_time() -> None:
    fair, busy, late = FairTurns[str](), Account[str](), Account[str]()
    fair.add(busy, "busy")
    for _ in range(1000):
        assert fair.take() == "busy"
        charge(busy, 512)
        fair.add(busy, "busy")
    fair.add(late, "late")
    seen = Counter[str]()
    for _ in range(10):
        name = fair.take()
        seen[name] += 1
        charge(late if name == "late" else busy, 512)
        fair.add(late if name == "late" else busy, name)
    assert seen["busy"] >= 4


def test_nothing_is_lost_and_first_is_first() -> None:
    rng, fair = random.Random(0), FairTurns[int]()
    accounts = [Account[int](weight=rng.choice((0.5, 1, 2))) for _ in range(5)]
    waiting, number = set(), 0
    for _ in range(3000):
        if waiting and rng.random() < 0.5:
            item = fair.take()
            waiting.remove(item)
            charge(accounts[item % 5], rng.random())
            if rng.random() < 0.2:
                fair.add(accounts[item % 5], item, first=True)
                waiting.add(item)
                assert accounts[item % 5].turns[0] == item
        else:
            number += 1
            fair.add(accounts[number % 5], number)
            waiting.add(number)
        assert bool(fair) == bool(waiting)
    while fair:
        waiting.remove(fair.take())
    assert not waiting
