"""A short part of the attack programs on the server; `python -m tools.attack` runs them whole."""

from types import ModuleType

import pytest

from tools.attack import common, crowd, parse_requests, replica_soak, requests


@pytest.mark.filterwarnings("ignore")  # of the SDK's, that a call is old or new
@pytest.mark.parametrize(("program", "count"), ((requests, 40), (parse_requests, 1000), (crowd, 3)))
def test_a_server_answers_whatever_comes(program: ModuleType, count: int) -> None:
    report = common.run(program, count=count, seed=0)
    assert not report.failures, "\n".join(report.failures)
    assert report.count == count


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_replies_have_the_bits_of_a_quiet_server_whatever_happens_to_replicas() -> None:
    """One training with a killed replica, and one with a stopped one."""
    report = common.run(replica_soak, count=2, seed=0)
    assert not report.failures, "\n".join(report.failures)
    assert report.outcomes == {"killed": 1, "silent": 1}
