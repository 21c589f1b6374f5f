"""A disk that gets full under a running server, and one that is read-only: sentences, and the last
good checkpoint as it was. (That no step of writing one leaves a half is in test_checkpoint.py.)"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import TESTS, environment

PROGRAM = TESTS / "support" / "small_disk.py"
NAMESPACE = ["unshare", "--map-root-user", "--mount"]


@pytest.fixture(scope="module")
def found(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What tests/support/small_disk.py found."""
    disk = tmp_path_factory.mktemp("disk")
    probe = [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", str(disk)]
    if not shutil.which("unshare") or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("this system lets nobody mount a disk of their own")
    command = [*NAMESPACE, sys.executable, str(PROGRAM), str(tiny_model_dir), str(disk)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment())
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_full_disk_is_a_sentence(found: dict) -> None:
    for what in ("full", "overwrite"):
        assert "the disk is full: the checkpoint" in found[what], found[what]
        assert "was not written" in found[what]
    assert "where the server keeps its sessions and runs" in found["run"], found["run"]
    assert "full" in found["run"]


def test_a_full_disk_says_what_is_needed_what_is_free_and_what_frees_room(found: dict) -> None:
    figures = r"; it needs [\d.]+ KiB, and [\d.]+ KiB are free; `tinsmith prune` frees room"
    for what in ("full", "overwrite"):
        assert re.search(figures, found[what]), found[what]
    saves = [line for line in found["log"] if line.startswith("a save failed: the disk is full: ")]
    assert len(saves) == 2 and all(re.search(figures, line) for line in saves), found["log"]


def test_a_full_disk_is_not_ready_and_507(found: dict) -> None:
    assert found["before"] == [200, None]
    status, why = found["ready"]
    assert status == 503 and why.startswith("checkpoints can't be written to "), why
    assert why.endswith(": the disk is full")
    status, why = found["session"]
    assert status == 507 and why.startswith("the disk is full: ") and "tinsmith prune" in why
    assert why in found["log"]


def test_a_read_only_disk_is_a_sentence(found: dict) -> None:
    assert "where the server keeps its sessions and runs, can't be" in found["read_only"]
    assert "readonly" in found["read_only"] or "unable to open" in found["read_only"]
    assert "Traceback" not in json.dumps(found) and "a bug" not in json.dumps(found)


def test_the_last_good_checkpoint_is_intact(found: dict) -> None:
    assert found["trains_on"] and found["intact"] and found["saves_again"]
    assert found["listed"] == [True] and found["left"] == ["good"]
