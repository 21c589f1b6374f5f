"""How a machine is divided between replicas."""

import pytest
from tinsmith.engine.devices import Card
from tinsmith.replicas import local
from tinsmith.replicas.local import Share, divide, replicas_from

CARDS = [
    Card("cuda", "H100", 80 << 30, (9, 0)),
    Card("cuda:1", "A10", 24 << 30, (8, 6)),
    Card("cuda:2", "H100", 80 << 30, (9, 0)),
]


def test_replicas_of_a_cpu_divide_threads_and_memory() -> None:
    found = divide(3, "cpu", threads=8, memory=3 << 30)
    assert [share.threads for share in found] == [3, 3, 2]
    assert {share.memory for share in found} == {1 << 30}
    assert [share.threads for share in divide(3, "cpu-bf16", threads=2)] == [1, 1, 1]
    assert divide("auto", "cpu", 8, 5) == divide(1, "cpu", 8, 5) == [Share("cpu", 8, 5)]
    assert str(Share("cpu", 1, 5)) == "cpu, 1 thread"


def test_replicas_of_gpus_have_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of its memory. "auto" takes those that are like the first one."""
    monkeypatch.setattr(local, "cards", lambda kind: CARDS)
    assert divide(2, "cuda", 4, 7) == [Share("cuda", 4, 7), Share("cuda:1", 4, 7)]
    assert [share.device for share in divide("auto", "cuda")] == ["cuda", "cuda:2"]
    assert [share.device for share in divide(3, "cuda:2")] == ["cuda:2", "cuda", "cuda:1"]
    assert [str(share) for share in divide("auto", "cuda:1")] == ["cuda:1"]
    with pytest.raises(ValueError, match="4 replicas need 4 GPUs, and this machine has 3"):
        divide(4, "cuda")


@pytest.mark.parametrize("given", (0, -1, "0", "two", "", 65, "1.5"))
def test_a_bad_number_of_replicas_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match="replicas are from 1 to 64, or auto"):
        replicas_from(given)  # type: ignore[arg-type]


def test_a_number_of_replicas_may_be_text() -> None:
    assert [replicas_from(given) for given in (1, "2", "auto")] == [1, 2, "auto"]
