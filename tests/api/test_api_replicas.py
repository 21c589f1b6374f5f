"""tinsmith.Model(replicas=…): the results of one process, also when a replica is lost or Ctrl-C
comes."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tinsmith
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
