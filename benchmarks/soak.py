"""Two clients train and two sample at once, for minutes: every result must be what the same calls
give when they are made alone, bit for bit.

    python benchmarks/soak.py --minutes 10

Each client repeats a round of calls: a trainer makes an adapter, trains it with several losses on
data of its own, saves it, goes on from the checkpoint, and samples from a snapshot; a sampler draws
with many settings at once, from the base model or from a saved adapter. A round's calls and seeds
are always the same. Printed: rounds, calls, differences, and the process's memory on the way.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import tinsmith
from tinsmith.demo import demo

NAME = "model"
IDS = 250  # ids below this are in the demo model's vocabulary
STEPS = 5
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "gspo")


@dataclass
class Round:
    """What one round of calls gave, in order."""

    results: list[Any] = field(default_factory=list)

    def add(self, *values: Any) -> None:
        """Keeps results; arrays as their bytes."""
        for value in values:
            self.results.append(value.tobytes() if isinstance(value, np.ndarray) else value)


def make_data(rng: np.random.Generator, loss: str) -> list[tinker.Datum]:
    """A few datums of random lengths with what the loss needs."""
    data = []
    for length in rng.integers(1, 90, size=5):
        inputs = {"target_tokens": rng.integers(0, IDS, length)}
        if loss == "cross_entropy":
            inputs["weights"] = rng.uniform(-1, 2, length).astype(np.float32)
        else:
            inputs["logprobs"] = -rng.uniform(4, 6, length).astype(np.float32)
            inputs["advantages"] = rng.normal(size=length).astype(np.float32)
        prompt = tinker.ModelInput.from_ints(rng.integers(0, IDS, length).tolist())
        data.append(tinker.Datum(model_input=prompt, loss_fn_inputs=inputs))
    return data


def train(client: tinker.TrainingClient, rng: np.random.Generator, kept: Round) -> None:
    """Steps with every loss; two calls' gradients add up before each step."""
    for step in range(STEPS):
        loss = LOSSES[step % len(LOSSES)]
        calls = [client.forward_backward(make_data(rng, loss), loss) for _ in range(2)]
        ended = client.optim_step(tinker.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0))
        for call in calls:
            output = call.result()
            kept.add(output.metrics["loss:sum"])
            kept.add(*(item["logprobs"].to_numpy() for item in output.loss_fn_outputs))
        kept.add(ended.result().metrics["grad_norm"])


def train_round(service: tinker.ServiceClient, seed: int, rank: int) -> Round:
    """See the file's header."""
    rng, kept = np.random.default_rng(seed), Round()
    client = service.create_lora_training_client(NAME, rank=rank, seed=seed).result()
    train(client, rng, kept)
    path = client.save_state("middle").result().path
    client = service.create_training_client_from_state_with_optimizer(path).result()
    train(client, rng, kept)
    sampler = client.save_weights_and_get_sampling_client().result()
    draw(sampler, rng, kept, requests=4)
    return kept


def draw(
    client: tinker.SamplingClient, rng: np.random.Generator, kept: Round, requests: int
) -> None:
    """Requests of many kinds, all under way at once."""
    waiting = []
    for number in range(requests):
        params = tinker.SamplingParams(
            max_tokens=int(rng.integers(1, 60)),
            seed=int(rng.integers(1 << 40)),
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_k=int(rng.choice([-1, 20])),
            top_p=float(rng.choice([1.0, 0.9])),
            stop=[int(rng.integers(IDS))] if number % 2 else [],
        )
        prompt = tinker.ModelInput.from_ints(rng.integers(0, IDS, rng.integers(1, 120)).tolist())
        scored = number % 3 == 0
        options = {"include_prompt_logprobs": scored, "topk_prompt_logprobs": 5 * scored}
        waiting.append(client.sample(prompt, int(rng.integers(1, 5)), params, **options))
    for reply in [item.result() for item in waiting]:
        for sequence in reply.sequences:
            kept.add(list(sequence.tokens), list(sequence.logprobs), sequence.stop_reason)
        kept.add(reply.prompt_logprobs, reply.topk_prompt_logprobs)


def sample_round(service: tinker.ServiceClient, seed: int, path: str | None) -> Round:
    """See the file's header."""
    rng, kept = np.random.default_rng(seed), Round()
    where = {"base_model": NAME} if path is None else {"model_path": path}
    draw(service.create_sampling_client(**where).result(), rng, kept, requests=12)
    return kept


@dataclass
class Report:
    """What a soak found."""

    rounds: dict[str, int] = field(default_factory=dict)
    results: int = 0
    differences: list[str] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)  # MiB, ten times in all


def soak(folder: Path, seconds: float, model: Path = demo.MODEL) -> Report:
    """Runs each client's round alone, then all together for some time."""
    report, lock = Report(), threading.Lock()
    with tinsmith.serve({NAME: model}, device="cpu", checkpoints=folder, threads=1) as backend:
        with backend.service_client() as service:
            tuned = service.create_lora_training_client(NAME, rank=8, seed=9).result()
            train(tuned, np.random.default_rng(9), Round())
            path = tuned.save_weights_for_sampler("tuned").result().path
        rounds: dict[str, Callable[[tinker.ServiceClient], Round]] = {
            "trainer of rank 8": lambda service: train_round(service, 1, 8),
            "trainer of rank 3": lambda service: train_round(service, 2, 3),
            "sampler of the base": lambda service: sample_round(service, 3, None),
            "sampler of a checkpoint": lambda service: sample_round(service, 4, path),
        }

        def play(name: str) -> Round:
            with backend.service_client() as service:
                return rounds[name](service)

        alone = {name: play(name) for name in rounds}
        end = time.monotonic() + seconds

        def repeat(name: str) -> None:
            while name not in report.rounds or time.monotonic() < end:  # once in any case
                try:
                    found = play(name).results
                except Exception as error:
                    found = [f"{type(error).__name__}: {error}"]
                wanted = alone[name].results
                with lock:
                    report.rounds[name] = report.rounds.get(name, 0) + 1
                    report.results += len(found)
                    if found != wanted:
                        pairs = enumerate(zip(found, wanted, strict=False))
                        place = next((n for n, (a, b) in pairs if a != b), len(found))
                        shown = repr(found[place])[:200] if place < len(found) else "nothing"
                        report.differences.append(f"{name}, result {place}: {shown}")

        threads = [threading.Thread(target=repeat, args=(name,)) for name in rounds]
        for thread in threads:
            thread.start()
        for _ in range(10):
            time.sleep(max(0.0, min(seconds / 10, end - time.monotonic())))
            report.resident.append(resident())
        for thread in threads:
            thread.join()
    return report


def resident() -> int:
    """This process's memory, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def main() -> int:
    """Soaks, and prints what it found; 1 where anything differed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = soak(Path(folder), 60 * options.minutes)
    for name, count in report.rounds.items():
        print(f"{name}: {count} rounds")
    print(f"{report.results} results, {len(report.differences)} of them different")
    print(f"resident: {', '.join(map(str, report.resident))} MiB")
    for line in report.differences[:20]:
        print(line)
    return 1 if report.differences else 0


if __name__ == "__main__":
    sys.exit(main())
