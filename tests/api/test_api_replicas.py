"""tinsmith.Model(replicas=…): the results of one process, also when a replica is lost or Ctrl-C
comes."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinsmith
from support.emulated_card import emulated_cards
from support.op_devices import emulated_library
from support.waiting import until

LENGTHS = (9, 30, 70, 5, 100, 30, 1, 44) * 8


@pytest.fixture(scope="module")
def shared(tiny_model_dir) -> Iterator[tinsmith.Model]:
    with tinsmith.Model(tiny_model_dir, device="cpu", threads=3, replicas=3) as model:
        yield model


def crew(model: tinsmith.Model) -> Any:
    return model.engine._replicas._crew


def rows(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 200, length).astype(np.int32) for length in LENGTHS]


def trained(model: tinsmith.Model) -> list[Any]:
    """What calls on an adapter give, and what is sampled from it in between."""
    found: list[Any] = []
    tokens, targets = rows(0), rows(1)
    with model.lora(rank=4, seed=1) as adapter:
        for _ in range(2):
            out = adapter.forward_backward(tokens, targets)
            found += [out.loss, [row.tobytes() for row in out.logprobs]]
            adapter.optim_step(learning_rate=0.05)
            found.append(drawn(model, adapter))
        follow = [np.concatenate([row[1:], row[:1]]) for row in tokens]
        taught = adapter.generalized_jsd(
            tokens,
            follow,
            [np.ones(len(row), np.float32) for row in tokens],
            [np.concatenate([[7], row]).astype(np.int32) for row in follow],
        )
        found += [taught.loss, [row.tobytes() for row in taught.divergences]]
        found.append(adapter.core.read("gradients").tobytes())
    return found


def drawn(model: tinsmith.Model, adapter: tinsmith.Adapter | None = None) -> list[Any]:
    prompts = [[5, n] for n in range(20)]
    groups = model.sampler().sample(
        prompts, adapter=adapter, num_samples=17, max_tokens=6, seed=1, stop=[]
    )
    return [[(s.tokens.tolist(), s.logprobs.tolist()) for s in group] for group in groups]


def test_replicas_give_the_results_of_one_process(model, shared) -> None:
    assert trained(shared) == trained(model)
    assert all(one.parts and one.weights_bytes for one in crew(shared).all)


def test_a_lost_replica_changes_nothing(model, shared) -> None:
    """In a call, and while it samples."""
    expected, lost = trained(model), crew(shared).all[0]
    until(lambda: lost.alive.process)
    killer = threading.Timer(0.05, os.kill, (lost.alive.process, signal.SIGKILL))
    killer.start()
    assert trained(shared) == expected
    killer.join()
    until(lambda: lost.state == "lost")
    assert drawn(shared) == drawn(model)


def interrupt_when_asked(model: tinsmith.Model) -> threading.Thread:
    """Ctrl-C, once a replica has something to do."""

    def run() -> None:
        until(lambda: any(one._asked for one in crew(model).all))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    all_ready = lambda: sum(bool(one.bases) for one in crew(model).replicas) == 2  # noqa: E731
    until(lambda: all_ready() and not any(one._asked for one in crew(model).all))
    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_ctrl_c_ends_a_call_that_replicas_share(model, shared) -> None:
    tokens = rows(0) * 600
    with shared.lora(rank=4, seed=1) as adapter:
        thread = interrupt_when_asked(shared)
        with pytest.raises(KeyboardInterrupt):
            adapter.forward_backward(tokens, tokens)
        thread.join()
        assert not any(adapter.core.pending)
    thread = interrupt_when_asked(shared)
    with pytest.raises(KeyboardInterrupt):
        shared.sampler().sample([[5, 6]] * 50, num_samples=100, max_tokens=100, stop=[])
    thread.join()
    assert trained(shared) == trained(model)


def test_closing_ends_the_replicas(tiny_model_dir) -> None:
    model = tinsmith.Model(tiny_model_dir, device="cpu", threads=2, replicas=2)
    places = crew(model)._places
    model.close()
    assert [place.remote.state for place in places] == ["lost"]


def test_bad_numbers_of_replicas_are_refused(tiny_model_dir) -> None:
    with pytest.raises(ValueError, match="replicas are from 1 to 64, or auto"):
        tinsmith.Model(tiny_model_dir, device="cpu", replicas=0)


@pytest.fixture
def four_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with four emulated cards, for this process and its children."""
    library = emulated_library()
    (tmp_path / "sitecustomize.py").write_text(
        "import ctypes\n"
        "from tinsmith import _core\n"
        "core = ctypes.CDLL(_core.__file__)\n"
        "core.device_emulated.argtypes = [ctypes.c_char_p]\n"
        f"assert core.device_emulated({os.fsencode(library)!r}) == 0\n"
        f"ctypes.CDLL({str(library)!r}).cuda_emulated_cards(4)\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with emulated_cards(4):
        yield


def short(model: tinsmith.Model) -> list[Any]:
    """Two calls of several micro-batches, and samples from what they trained."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(3, 200, length).astype(np.int32) for length in LENGTHS[:8]]
    found: list[Any] = []
    with model.lora(rank=2, seed=1) as adapter:
        adapter.core.step_tokens = 64
        for _ in range(2):
            out = adapter.forward_backward(tokens, [np.roll(row, -1) for row in tokens])
            found += [out.loss, [row.tobytes() for row in out.logprobs]]
            adapter.optim_step(learning_rate=0.05)
        found.append(adapter.core.read("weights").tobytes())
        groups = model.sampler().sample(
            [row[:9] for row in tokens], adapter=adapter, max_tokens=5, seed=3
        )
        found.append([[one.logprobs.tolist() for one in group] for group in groups])
    return found


def test_replicas_on_cards_and_their_stages_give_the_results_of_one_card(
    tiny_model_dir: Path, four_cards: None
) -> None:
    with tinsmith.Model(tiny_model_dir, device="cuda-emulated") as model:
        wanted = short(model)
    for replicas, stages in ((4, 1), (2, 2)):
        with tinsmith.Model(
            tiny_model_dir, device="cuda-emulated", replicas=replicas, stages=stages
        ) as model:
            assert short(model) == wanted
            names = [one.place for one in crew(model).all]
            assert names[-1] == ("cuda-emulated:3", "cuda-emulated:2,cuda-emulated:3")[stages - 1]
            assert any(one.weights_bytes for one in crew(model).all)
    with pytest.raises(ValueError, match="3 replicas of 2 stages need 6 GPUs, and this machine"):
        tinsmith.Model(tiny_model_dir, device="cuda-emulated", replicas=3, stages=2)
