"""A short part of the attack programs on the server; `python tests/attack` runs them whole."""

from attack import common, requests


def test_changed_requests_are_answered_with_results_or_sentences() -> None:
    report = common.run(requests, count=60, seed=0, seconds=10)
    assert not report.failures, "\n".join(report.failures)
    assert report.count > 0, report
