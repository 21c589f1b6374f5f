"""What races.sh runs under the thread sanitizer: calls of the engine and of a server from four
threads at once, each model on four threads.

    python tests/cpu/races.py [ROUNDS]

Every thread does the same as each other does, and must get the same bits: what one thread gets that
has the process for itself. Whether threads raced is the sanitizer's to say. There is no torch here:
it is not built for the sanitizer.
"""

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import tinsmith
from tinsmith import _core, ops
from tinsmith.demo.demo import MODEL
from tinsmith.models.registry import load_model
from tinsmith.server.backend import Backend
from tinsmith.server.service.config import ServerConfig

from tools.attack.served import datum

THREADS = 4
IDS = np.arange(7, 107, dtype=np.int32)
LOGITS = np.random.default_rng(0).standard_normal((64, 4096)).astype(np.float32)


def together(work: Callable[[int], Any], expected: Any) -> None:
    """Does some work in THREADS threads at once; each must find what is expected."""
    found: list[Any] = [None] * THREADS

    def one(number: int) -> None:
        found[number] = work(number)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, result in enumerate(found):
        if result != expected:
            raise SystemExit(f"thread {number} of {work.__qualname__} found something else")


def arrays(_: int) -> list[bytes]:
    """One's own arrays."""
    values, _ids = ops.topk_logprobs(LOGITS, 8)
    ids = np.arange(len(LOGITS))
    hidden, weight = LOGITS[:, :32].copy(), LOGITS[:, 32:].reshape(-1, 32).copy()
    return [values.tobytes(), ops.gather_logprobs(hidden, ids, weight=weight).tobytes()]


def trained(model: tinsmith.Model) -> list[Any]:
    """A new adapter's steps, its samples, and its scores."""
    adapter = model.lora(rank=4, seed=1)
    found: list[Any] = []
    for _ in range(3):
        out = adapter.forward_backward(IDS, IDS[::-1].copy(), np.ones(len(IDS), np.float32))
        adapter.optim_step(learning_rate=1e-3)
        found += [out.loss, out.logprobs.tobytes()]
    drawn = model.sampler().sample(IDS, adapter=adapter, num_samples=3, max_tokens=8, seed=5)
    found += [one.tokens.tolist() for one in drawn]
    return [*found, model.logprobs(IDS, adapter=adapter).tobytes()]


def seeing() -> _core.Model:
    """A model that sees by a tower of random numbers."""
    core = load_model(MODEL, device="cpu", threads=1).core
    sizes = {"depth": 3, "width": 48, "heads": 2, "ffn": 60, "grid": 7, "patch": 16, "merge": 2}
    colours = {"rescale": 1 / 255, "mean": [0.5] * 3, "std": [0.5] * 3}
    config = sizes | colours | {"frames": 2, "deep": [1], "out": core.config["width"]}
    core.tower_open(config, "f32", memory=1)
    rng = np.random.default_rng(1)
    for slot, index, rows, cols in core.tower_slots:
        array = rng.standard_normal((rows, cols), np.float32) / 8
        core.tower_load(slot, index, array[0] if rows == 1 else array)
    core.tower_seal()
    return core


def seen(core: _core.Model) -> list[Any]:
    """Features, samples and scores behind images that come and go, each thread's own."""
    found: list[Any] = []
    for seed in range(6):
        pixels = np.random.default_rng(seed % 3).integers(0, 256, 6 * 32 * 32 * 3, np.uint8)
        image = _core.Image(pixels, 2, 3)
        again = _core.Image(pixels, 2, 3, image.first)
        found.append(core.tower_features(image).tobytes())
        ids = [5, *range(image.first, image.first - 6, -1), 7, 8]
        sampler = _core.Sampler(core, tokens=256)
        sampler.add(0, np.asarray(ids, np.int32), max_tokens=4, seed=3, prompt_logprobs=True)
        del image, again
        while 0 not in sampler.step()[1]:
            pass
        done = sampler.take(0)
        found += [done["prompt_logprobs"].tobytes(), done["samples"][0]["tokens"].tolist()]
    return found


def asked(backend: Backend, name: str) -> list[Any]:
    """What a client of the server gets."""
    service = backend.service_client(api_key=f"tml-{name}")
    client = service.create_lora_training_client("m", rank=4, seed=1).result()
    found: list[Any] = []
    for _ in range(2):
        data = [datum(40, seed=5), datum(30, seed=6)]
        ahead = client.forward_backward(data, "cross_entropy")
        step = client.optim_step(tinker.AdamParams(learning_rate=1e-3))
        found += [one["logprobs"].tolist() for one in ahead.result().loss_fn_outputs]
        step.result()
    state = client.save_state("state").result().path
    again = service.create_training_client_from_state(state).result()
    sampler = again.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=6, seed=3, stop=[])
    prompt = tinker.ModelInput.from_ints([5, 6, 7, 8])
    drawn = [sampler.sample(prompt, 2, params) for _ in range(3)]
    for one in drawn:
        found += [list(sequence.tokens) for sequence in one.result().sequences]
    found.append(sampler.compute_logprobs(prompt).result())
    service.close("success").result()
    return found


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = [
            tinsmith.Model(MODEL, device="cpu", threads=count)
            for count in (1, THREADS, THREADS, 2, 3)
        ]
        alone, core = (arrays(0), trained(models[0])), seeing()
        features = seen(core)
        for _ in range(rounds):
            together(arrays, alone[0])
            together(lambda number: trained(models[1 + number]), alone[1])
            together(lambda number: trained(models[1]), alone[1])  # in turns
            together(lambda _: seen(core), features)
        options: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
        served = {"m": MODEL}
        with Backend(
            ServerConfig(served, checkpoints=folder / "one", threads=1, **options)
        ) as backend:
            expected = asked(backend, "alone")
        with Backend(
            ServerConfig(served, checkpoints=folder / "many", threads=THREADS, **options)
        ) as backend:
            for turn in range(rounds):
                together(lambda number, turn=turn: asked(backend, f"{turn}-{number}"), expected)
    print(f"{rounds} rounds: all threads found the same")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
