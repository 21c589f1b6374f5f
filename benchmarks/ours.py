"""The engine's side alone: random models made on the card, a training step, and decoding.

What programs for a GPU's first minutes share. It imports neither torch nor transformers, and makes
nothing large on the host: one block of random numbers is uploaded, and the card's own copies of it
fill every matrix (_core.Model.fill).

Decoding is timed step by step at one length of context. All prompts are run once, in a session,
whose pages serve every later request: with or without an adapter, at any batch. So their prefill is
paid once, and no time of it counts."""

import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from peers import RANK, SHAPES, hf_config
from tinsmith import _core
from tinsmith.models import registry
from tinsmith.system.steps import finish

# 64 MiB of bf16, in pieces of 16 bytes; no width of a matrix divides it, so that no rows repeat.
BLOCK = (64 << 20) // 2 - 104
SPREAD = 0.02  # of the weights, as transformers initialises them
ADAM = {
    "learning_rate": 1e-5, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}  # fmt: skip
PAGE = 64  # tokens of a page of the cache
FIRST_STEPS = 4  # of decoding, that are not counted: the graph is recorded
MOST_AHEAD = 512  # tokens that a sequence draws before the last one begins
SESSION = 1


def random_block(count: int, spread: float = SPREAD) -> NDArray[np.uint16]:
    """Normal random numbers as bf16's bits, cut and not rounded."""
    numbers = np.random.default_rng(0).standard_normal(count, np.float32)
    numbers *= spread
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


def random_core(shape: str, device: str) -> _core.Model:
    """A model of this shape with random matrices, made on the card; its vectors are ones."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(hf_config(shape)))
        config, inv_freq = registry.read_config(folder)
    core = _core.Model(config, inv_freq, device=device)
    for slot, layer, index, rows, cols in core.slots:
        if rows == 1:
            core.load(slot, layer, np.ones(cols, np.float32), index)
    core.fill(random_block(min(BLOCK, core.weight_bytes // 2)))
    core.seal()
    return core


def random_adapter(core: _core.Model, rank: int = RANK) -> _core.Adapter:
    """LoRA on every matrix, whose B is not zero."""
    adapter = _core.Adapter(core, rank=rank)
    few = np.random.default_rng(0).standard_normal(min(adapter.size, 1 << 20), np.float32)
    adapter.write("weights", np.resize(few * np.float32(SPREAD), adapter.size))
    return adapter


@dataclass
class Training:
    """A call of random packed datums, and what it was found to be."""

    core: _core.Model
    adapter: _core.Adapter
    data: tuple[np.ndarray, ...]
    micro_batches: int = 1
    loss: float = float("nan")  # a token's

    def forward_backward(self) -> None:
        steps = self.adapter.forward_backward(*self.data, "cross_entropy", {}, {}, stepwise=True)
        _, loss = finish(steps, self._told)
        self.loss = loss / len(self.data[0])

    def _told(self, done: int, total: int) -> None:
        self.micro_batches = total

    def optim_step(self) -> None:
        self.adapter.optim_step(**ADAM, normalization="num_loss_tokens")

    def step(self) -> None:
        """One step of training, as a user takes it."""
        self.forward_backward()
        self.optim_step()

    def timed(self) -> tuple[float, float]:
        """Wall seconds of the two calls of a step."""
        start = time.perf_counter()
        self.forward_backward()
        middle = time.perf_counter()
        self.optim_step()
        return middle - start, time.perf_counter() - middle


def training(core: _core.Model, shape: str, datums: int, length: int) -> Training:
    """A training call of so many random datums of one length."""
    rng, total = np.random.default_rng(0), datums * length
    tokens, targets = rng.integers(0, SHAPES[shape]["vocab_size"], (2, total)).astype(np.int32)
    data = tokens, np.full(datums, length, np.int32), targets, np.ones(datums, np.int32)
    return Training(core, random_adapter(core), data)


@dataclass
class Decoded:
    """What was measured of decoding at one batch."""

    seconds: list[float] = field(default_factory=list)  # of each step
    tokens: int = 0
    replayed: int = 0  # steps that were a replayed graph
    context: float = 0.0  # tokens of a sequence in the middle of it


class Decoding:
    """A sampler with random prompts in its cache."""

    def __init__(self, core: _core.Model, shape: str, most: int, prompt: int, new: int, **options):
        self.new = new + FIRST_STEPS
        vocab = SHAPES[shape]["vocab_size"]
        ids = np.random.default_rng(1).integers(0, vocab, (most, prompt))
        self.prompts = ids.astype(np.int32)
        # Pages of prompts must stay while those that were decoded come and go.
        room = most * (prompt + 3 * (self.new + PAGE)) + 4 * PAGE
        self.sampler = _core.Sampler(core, tokens=room, **options)

    def prefill(self) -> float:
        """Wall seconds in which all prompts are run."""
        start = time.perf_counter()
        for number, prompt in enumerate(self.prompts):
            self.sampler.add(number, prompt, max_tokens=1, session=SESSION)
        while self.sampler.active:
            self.sampler.step()
        seconds = time.perf_counter() - start
        for number in range(len(self.prompts)):
            self.sampler.take(number)
        return seconds

    def begin(self, batch: int, adapter: _core.Adapter | None) -> float:
        """Runs steps until so many sequences decode; how many tokens each has then drawn, on
        average."""
        for number, prompt in enumerate(self.prompts[:batch]):
            self.sampler.add(number, prompt, adapter, seed=number, session=SESSION)
        begun: dict[int, int] = {}
        after = 0
        while after < FIRST_STEPS:
            drawn = self.sampler.step()[0]
            after += len(begun) == batch
            for request, *_ in drawn:
                begun[request] = begun.get(request, 0) + 1
            if max(begun.values(), default=0) > MOST_AHEAD:
                raise RuntimeError(f"only {len(begun)} of {batch} sequences have room in the cache")
        return sum(begun.values()) / batch

    def run(self, steps: int, result: Decoded) -> None:
        """So many steps of all sequences that decode."""
        for _ in range(steps):
            start = time.perf_counter()
            drawn = self.sampler.step()[0]
            result.seconds.append(time.perf_counter() - start)
            result.tokens += len(drawn)

    def end(self, batch: int) -> None:
        """Forgets the sequences, but for their pages."""
        for number in range(batch):
            self.sampler.cancel(number)

    def measured(self, batch: int, adapter: _core.Adapter | None, steps: int) -> Decoded:
        """`steps` steps of `batch` sequences."""
        result = Decoded()
        before = self.begin(batch, adapter)
        result.context = self.prompts.shape[1] + before + steps / 2
        replays = self.sampler.replays[1]
        self.run(steps, result)
        result.replayed = self.sampler.replays[1] - replays
        self.end(batch)
        return result
