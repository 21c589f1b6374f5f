"""A short part of the attacks on the folder of checkpoints (tools/attack): readers beside saves,
kills and full disks, and what anyone may have written to it."""

import shutil

import pytest

from tools.attack import common, kills, listings, parse_listings, readers


def run(program, count: int) -> None:
    report = common.run(program, count=count)
    assert not report.failures, "\n".join(report.failures)
    assert report.count == count


def test_readers_beside_saves_find_one_version() -> None:
    run(readers, 40)


@pytest.mark.skipif(not shutil.which("cc"), reason="the faults need a C compiler")
def test_kills_and_full_disks_lose_nothing_that_was_answered() -> None:
    run(kills, 20)


def test_what_anyone_may_have_written_harms_no_other() -> None:
    run(listings, 25)
    run(parse_listings, 3000)
