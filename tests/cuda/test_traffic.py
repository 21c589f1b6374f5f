"""The bytes that a layer moves in a card's memory: what the emulated card counts of each access is
what the passes' widths say, and RESULTS.md has the table that follows."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import traffic
from support import ROOT
from support.op_devices import setup_py
from traffic import KEYS, ROWS, SMALL, once

pytestmark = pytest.mark.slow

PROGRAM = ROOT / "benchmarks/traffic.py"

# As counted: what the delta rule's backward writes for itself, and a token that is decoded with its
# state, follow from no width of a row.
RULE_BACKWARD, DELTA_DECODED = 686_180, 209_352
# Bytes at most of spans and lists of pages, which each pass that needs them reads, and of the sums
# in the norm of a layer's gradients.
LISTS = 192


@cache
def counted() -> dict[str, list[int]]:
    """By a process of its own, whose emulated card is one that counts."""
    if setup_py().SANITIZE:
        pytest.skip("the sanitizer of the counter and this build's can't be together")
    done = subprocess.run([sys.executable, PROGRAM, "--count"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_dense_layer_moves_what_its_passes_say() -> None:
    forward, backward, decoded = counted()["full_attention"]
    assert forward == pytest.approx(ROWS * traffic.forward(SMALL) + once(SMALL), abs=LISTS)
    wanted = ROWS * traffic.backward(SMALL, cut=True) + once(SMALL, back=True)
    assert backward == pytest.approx(wanted, abs=LISTS)
    assert decoded == pytest.approx(traffic.decoded(SMALL, KEYS), abs=LISTS)


def test_a_gated_delta_net_moves_what_its_passes_say() -> None:
    forward, backward, decoded = counted()["linear_attention"]
    rows = ROWS * sum((traffic.delta(SMALL) | traffic.mlp(SMALL)).values())
    assert forward == pytest.approx(rows + once(SMALL, is_delta=True), abs=LISTS)
    rows = ROWS * traffic.delta_backward(SMALL, cut=True) + RULE_BACKWARD
    assert backward == pytest.approx(rows + once(SMALL, back=True, is_delta=True), abs=LISTS)
    assert decoded == DELTA_DECODED


def test_the_table_is_the_programs() -> None:
    table = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, check=True)
    assert table.stdout in (Path(ROOT) / "benchmarks/RESULTS.md").read_text()
