"""Arrays that another thread changes while a call reads them: each call is refused or does what was
checked. In processes of their own, which what is looked up unchecked would end."""

import itertools
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import beside

CHANGES = 500
FAR = 1 << 30  # an id whose row would be far from any memory
ROWS, LENGTH = 60, 100


def repeat(
    call: Callable[[], object], change: Callable[[int], None], pause: float = 0.0005
) -> tuple[int, int]:
    """Calls until one was done and another thread has changed what is given CHANGES times; counts
    calls that were done, and those that were refused."""
    ended, counts, changes = threading.Event(), [0, 0], 0

    def change_on() -> None:
        nonlocal changes
        for number in itertools.count():
            change(number)
            changes = number
            if ended.wait(pause):
                return

    thread = threading.Thread(target=change_on)
    thread.start()
    while changes < CHANGES or not counts[0]:
        try:
            call()
            counts[0] += 1
        except (IndexError, ValueError):
            counts[1] += 1
    ended.set()
    thread.join()
    return counts[0], counts[1]


def train(
    model: str, changed: str, other: int, *, rows: int = LENGTH, pause: float = 0.0005
) -> tuple[int, int]:
    """forward_backward, or distill, in micro-batches of so many rows."""
    from tinsmith import _core
    from tinsmith.models.registry import load_model

    core = load_model(Path(model), device="cpu", threads=1).core
    adapter = _core.Adapter(core, rank=2, step_tokens=rows)
    arrays = {
        "tokens": np.full(ROWS * LENGTH, 3, np.int32),
        "lengths": np.full(ROWS, LENGTH, np.int32),
        "targets": np.full(ROWS * LENGTH, 3, np.int32),
        "counts": np.ones(ROWS, np.int32),
        "weights": np.ones(ROWS * LENGTH, np.float32),
        "teacher_tokens": np.full(ROWS * (LENGTH + 9), 3, np.int32),
        "teacher_lengths": np.full(ROWS, LENGTH + 9, np.int32),
    }
    given = [arrays[name] for name in ("tokens", "lengths", "targets", "counts")]
    teacher = (arrays["teacher_tokens"], arrays["teacher_lengths"])
    weights = {"weights": arrays["weights"]}

    def call() -> None:
        if changed.startswith("teacher"):
            adapter.distill(*given, "generalized_jsd", weights, {}, *teacher)
        else:
            adapter.forward_backward(*given, "cross_entropy", weights, {})

    right = arrays[changed][0].item()
    return repeat(call, lambda number: arrays[changed].fill((right, other)[number % 2]), pause)


def train_tokens(model: str) -> tuple[int, int]:
    return train(model, "tokens", FAR)


def train_targets(model: str) -> tuple[int, int]:
    return train(model, "targets", FAR)


def train_lengths(model: str) -> tuple[int, int]:
    return train(model, "lengths", FAR)


def train_counts(model: str) -> tuple[int, int]:
    return train(model, "counts", FAR)


def train_weights(model: str) -> tuple[int, int]:
    """Rows whose weight is zero are sorted behind the others: each is looked at twice."""
    return train(model, "weights", 0, rows=ROWS * LENGTH, pause=0)


def distill_teacher_tokens(model: str) -> tuple[int, int]:
    return train(model, "teacher_tokens", FAR)


def distill_teacher_lengths(model: str) -> tuple[int, int]:
    return train(model, "teacher_lengths", FAR)


def gather_ids(model: str) -> tuple[int, int]:
    from tinsmith import _core

    rows, ids = np.zeros((20_000, 500), np.float32), np.zeros(20_000, np.int32)
    return repeat(
        lambda: _core.gather(rows, None, ids, 1, None, None, False, False),
        lambda number: ids.fill((0, FAR)[number % 2]),
    )


def jsd_keep(model: str) -> tuple[int, int]:
    """How many rows are kept is how many losses there are room for."""
    from tinsmith import _core

    rows, keep = np.zeros((100_000, 32), np.float32), np.zeros(100_000, np.uint8)
    how = (0.5, 1.0, float("inf"), 0, False, False)
    return repeat(
        lambda: _core.jsd(rows, None, rows, None, keep, None, how, False, False),
        lambda number: keep.fill(number % 2),
    )


def sample_targets(model: str) -> tuple[int, int]:
    """add() holds the GIL: what is read from a file changes without it."""
    from tinsmith import _core
    from tinsmith.models.registry import load_model

    core = load_model(Path(model), device="cpu", threads=1).core
    sampler, ids = _core.Sampler(core, tokens=64), np.zeros(1 << 22, np.int32)
    starts = np.array([0, 1 << 21, 1 << 22], np.int32)

    def call() -> None:
        asked = {"max_tokens": 1, "targets": ids, "target_starts": starts}
        sampler.add(0, np.ones(3, np.int32), **asked)
        while not sampler.step()[1]:
            pass
        sampler.take(0)

    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(np.where(np.arange(1 << 22) < 4_000_000, 0, FAR).astype(np.int32).tobytes())

        def change(number: int) -> None:
            if number % 2:
                file.seek(0)
                file.readinto(memoryview(ids).cast("B"))
            else:
                ids.fill(0)

        return repeat(call, change, pause=0)


CASES = (
    train_tokens, train_targets, train_lengths, train_counts, train_weights,
    distill_teacher_tokens, distill_teacher_lengths, gather_ids, jsd_keep, sample_targets,
)  # fmt: skip


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_what_changes_under_a_call_is_not_looked_up(case: str) -> None:
    from support.tiny_models import folder

    script = f"import test_changed_arrays as own; print(*own.{case}({str(folder('qwen3'))!r}))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, timeout=300, capture_output=True, text=True, **beside(__file__))
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    finished, _ = map(int, done.stdout.split())
    assert finished > 0, done.stdout
