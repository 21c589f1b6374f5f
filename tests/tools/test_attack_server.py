"""A short part of the attack programs on the server; `python -m tools.attack` runs them whole."""

from types import ModuleType

import pytest

from tools.attack import common, crowd, parse_requests, requests


@pytest.mark.filterwarnings("ignore")  # of the SDK's, that a call is old or new
@pytest.mark.parametrize(("program", "count"), ((requests, 40), (parse_requests, 1000), (crowd, 3)))
def test_a_server_answers_whatever_comes(program: ModuleType, count: int) -> None:
    report = common.run(program, count=count, seed=0)
    assert not report.failures, "\n".join(report.failures)
    assert report.count == count
