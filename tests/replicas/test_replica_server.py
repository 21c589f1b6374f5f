"""A server with replicas over the SDK: its replies are those of one process."""

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from support.waiting import until
from tinsmith.cli.console import Status
from tinsmith.server.backend import Backend
from tinsmith.server.service.config import ServerConfig


def get(url: str) -> str:
    return httpx.get(url).raise_for_status().text


def counted(url: str, name: str) -> float:
    """A number of /metrics."""
    _, found, rest = get(f"{url}/metrics").partition(f"\n{name} ")
    return float(rest.partition("\n")[0]) if found else 0.0


def serve(model: Path, folder: Path, replicas: int) -> Backend:
    return Backend(
        ServerConfig(
            {"tiny": model},
            checkpoints=folder,
            device="cpu",
            threads=replicas,
            replicas=replicas,
        )
    )


def replies(backend: Backend, lose: Callable[[], None] | None = None) -> list[Any]:
    """What a client gets: samples of a base model, of a run's weights, and of a checkpoint. `lose`
    is called while some are drawn."""
    import tinker
    from conftest import logprobs, make_datum

    found: list[Any] = []
    with backend.service_client() as service:
        client = service.create_lora_training_client("tiny", rank=4, seed=1).result()
        tokens = list(range(3, 103))
        for _ in range(2):
            data = [make_datum(tokens, [*tokens[1:], n], weights=[1.0] * 100) for n in range(40)]
            trained = client.forward_backward(data, "cross_entropy").result()
            found.append([row.tolist() for row in logprobs(trained)])
            client.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
        samplers = [
            service.create_sampling_client(base_model="tiny").result(),
            client.save_weights_and_get_sampling_client().result(),
            service.create_sampling_client(
                model_path=client.save_weights_for_sampler("kept").result().path
            ).result(),
        ]
        params = tinker.SamplingParams(max_tokens=60, seed=4)
        for turn in range(3):
            futures = [
                sampler.sample(tinker.ModelInput.from_ints([n, 5, 6]), 3, params)
                for sampler in samplers
                for n in range(4)
            ]
            if lose is not None and turn == 1:
                lose()
            for future in futures:
                rows = future.result().sequences
                found.append([(row.tokens, row.logprobs, row.stop_reason) for row in rows])
    return found


def kill(backend: Backend) -> None:
    """Ends a replica's process."""
    until(lambda: backend.crew.all[0].alive.process)
    os.kill(backend.crew.all[0].alive.process, signal.SIGKILL)


def test_replies_are_the_same_with_replicas_and_with_one_lost(tiny_model_dir, tmp_path) -> None:
    with serve(tiny_model_dir, tmp_path / "1", 1) as backend:
        expected = replies(backend)
    with serve(tiny_model_dir, tmp_path / "3", 3) as backend:
        assert replies(backend) == expected
        assert all(one.weights_bytes for one in backend.crew.all)
        assert any(one.parts for one in backend.crew.all)
        assert replies(backend, partial(kill, backend)) == expected
        until(lambda: len(backend.crew.replicas) == 2)  # it was started again
        until(lambda: backend.crew.all[1].alive.memory)
        text, told = get(f"{backend.url}/metrics"), get(f"{backend.url}/page/data/machine")
        status = Status(backend.worker, lambda: None).line()
        pulled = 'tinsmith_replica_weights_pulled_bytes_total{replica="replica 3"}'
        assert counted(backend.url, pulled) > 0
    assert 'tinsmith_replicas{state="owner"} 1.0' in text
    assert 'tinsmith_replicas{state="same bits"} 2.0' in text
    rows = json.loads(told)["replicas"]
    assert [row["state"] for row in rows] == ["owner", "same bits", "same bits"]
    assert [row["place"] for row in rows] == ["cpu, 1 thread"] * 3
    assert rows[0]["drawn"] > 0 and rows[2]["memory"] > 0
    assert "3 of 3 replicas" in status
