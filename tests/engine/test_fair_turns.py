"""Turns of clients and runs: by weight and rows, whatever one asks for and however often."""

import random
from collections import Counter

import pytest
from tinsmith.engine.fair_turns import Client, Clocked, FairTurns


class Work(Clocked):
    """A run that asks for micro-batches of so many rows."""

    def __init__(self, client: Client["Work"], name: str, rows: float):
        super().__init__()
        self.client, self.name, self.rows = client, name, rows


def serve(runs: list[Work], turns: int) -> tuple[list[str], Counter[str]]:
    """The order of turns of runs that always have more to do, and the rows of each."""
    fair: FairTurns[Work] = FairTurns()
    order, total = [], Counter[str]()
    for run in runs:
        fair.add(run.client, run)
    for _ in range(turns):
        run = fair.take()
        order.append(run.name)
        total[run.name] += run.rows
        run.charge(run.rows)
        run.client.charge(run.rows)
        fair.add(run.client, run)
    return order, total


def test_equal_clients_alternate() -> None:
    order, _ = serve([Work(Client(), name, 512) for name in "abc"], 9)
    assert sorted(order[:3]) == sorted(order[3:6]) == sorted(order[6:]) == ["a", "b", "c"]


def test_clients_share_rows_by_weight() -> None:
    heavy: Client[Work] = Client(weight=3.0)
    runs = [Work(Client(), "long", 4096), Work(Client(), "short", 16), Work(heavy, "heavy", 512)]
    _, total = serve(runs, 20_000)
    assert total["short"] == pytest.approx(total["long"], abs=2 * 4096)
    assert total["heavy"] == pytest.approx(3 * total["long"], abs=4 * 4096)


def test_a_clients_runs_share_its_rows() -> None:
    many: Client[Work] = Client()
    runs = [Work(many, "long", 4096), Work(many, "short", 16), Work(Client(), "other", 512)]
    _, total = serve(runs, 20_000)
    assert total["short"] == pytest.approx(total["long"], abs=2 * 4096)
    assert total["other"] == pytest.approx(total["short"] + total["long"], abs=4 * 4096)


def test_who_was_idle_saves_up_no_turns() -> None:
    fair = FairTurns[Work]()
    busy, late = Work(Client(), "busy", 512), Work(Client(), "late", 512)
    fair.add(busy.client, busy)
    seen = Counter[str]()
    for turn in range(1010):
        if turn == 1000:
            fair.add(late.client, late)
            seen.clear()
        run = fair.take()
        seen[run.name] += 1
        run.charge(512)
        run.client.charge(512)
        fair.add(run.client, run)
    assert seen["busy"] >= 4


def test_nothing_is_lost() -> None:
    rng, fair = random.Random(0), FairTurns[Work]()
    clients = [Client[Work](weight=rng.choice((0.5, 1, 2))) for _ in range(5)]
    waiting = set()
    for number in range(3000):
        if waiting and rng.random() < 0.5:
            run = fair.take()
            waiting.remove(run)
            run.charge(rng.random())
            run.client.charge(rng.random())
        else:
            run = Work(rng.choice(clients), str(number), 1)
            fair.add(run.client, run)
            waiting.add(run)
        assert bool(fair) == bool(waiting)
    while fair:
        waiting.remove(fair.take())
    assert not waiting
    with pytest.raises(ValueError, match="empty"):
        fair.take()
