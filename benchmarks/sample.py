"""Prefill and decoding beside transformers' generate and llama.cpp: tokens per CPU second.

    python benchmarks/sample.py --shape 0.6b --dtype bf16 --rounds 3 --llama-python PYTHON

Decoding: 64 prompt tokens and 64 new ones at temperature 1 from the whole vocabulary, at batch 1, 8
and 32; what counts are the tokens after each sequence's first. Prefill: a prompt of 512 tokens up
to its first token. Prompts are new in every round, so that no side finds them in a cache. llama.cpp
runs the same weights (GGUF) in a process of its own, in turn with the others; "llama.cpp" is its
decoding alone, "+ sampler" includes its sampler's draw from the whole vocabulary, as the other
sides do. PYTHON is an interpreter that has llama-cpp-python and gguf.

The roofline is the weights and the cache read once a step, or the products' flops.

Half a minute at the small shape; at 0.6b ten minutes and 6 GiB."""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import llama
import numpy as np
import torch
from ours import random_adapter
from peers import (
    CACHED,
    CLOCKS,
    DTYPES,
    SHAPES,
    alternate,
    attending,
    checkpoint,
    fed,
    hf_model,
    matrices,
    medians,
    parse,
    parser,
    state_numbers,
)
from report import Report
from tinsmith import _core
from tinsmith.models import registry
from tinsmith.models.weight_dtypes import WEIGHTS

# Bytes of a number in the layers' matrices, and in the head's.
WEIGHT_BYTES = {"int8": (34 / 32, 34 / 32), "int4": (18 / 32, 34 / 32)}
Times = tuple[float, ...]  # seconds of the prompts, of the tokens after the first, of the sampler


def prompt_source(vocab: int, batch: int, length: int) -> Iterator[np.ndarray]:
    """Random prompts (batch, length) without end, the same ones for every side."""
    rng = np.random.default_rng(0)
    while True:
        yield rng.integers(0, vocab, (batch, length)).astype(np.int32)


def generate_side(
    model: Any,
    prompts: Iterator[np.ndarray],
    new: int,
    device: str = "cpu",
    clock: Callable[[], float] = time.process_time,
) -> Callable[[], Times]:
    """A call that samples `new` tokens for each of the next prompts with transformers."""
    options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}

    def run() -> Times:
        ids = torch.from_numpy(next(prompts)).long().to(device)
        ticks = [clock()]

        def tick(ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            ticks.append(clock())
            return torch.zeros(len(ids), dtype=torch.bool, device=device)

        mask = torch.ones_like(ids)
        model.generate(
            ids, attention_mask=mask, min_new_tokens=new, max_new_tokens=new,
            stopping_criteria=[tick], **options,
        )  # fmt: skip
        return ticks[1] - ticks[0], ticks[-1] - ticks[1]

    return run


def sampler_side(
    core: _core.Model,
    prompts: Iterator[np.ndarray],
    new: int,
    clock: Callable[[], float] = time.process_time,
    state: float = 0,
    adapter: _core.Adapter | None = None,
) -> Callable[[], Times]:
    """The same with the engine: one request a row, all with the adapter. Rows begin one after the
    other while prompts are run, so a new token's time is that of the steps in which all of them
    decode. A sequence's states take as much as `state` tokens."""
    samplers: list[_core.Sampler] = []

    def run() -> Times:
        rows = next(prompts)
        if not samplers:
            each = rows.shape[1] + new + 64 + 2 * int(state)
            samplers.append(_core.Sampler(core, tokens=2 * len(rows) * each))
        sampler, start = samplers[0], clock()
        for number, prompt in enumerate(rows):
            sampler.add(number, prompt, adapter, max_tokens=new, seed=number)
        begun: set[int] = set()
        while len(begun) < len(rows):
            begun |= {request for request, *_ in sampler.step()[0]}
        first, steps = clock(), 0
        while sampler.active == len(rows):
            sampler.step()
            steps += 1
        each = (clock() - first) / max(steps, 1)
        while sampler.active:
            sampler.step()
        for number in range(len(rows)):
            sampler.take(number)
        if new > 1 and not steps:
            raise ValueError(f"--new {new} is too small: a row ends before all decode")
        return first - start, each * (new - 1)

    return run


class Comparison:
    """The sides of one model, and what was measured of them."""

    def __init__(self, args: Any, report: Report) -> None:
        self.args, self.report = args, report
        self.shape = SHAPES[args.shape]
        self.model = hf_model(args.shape, args.dtype).eval()
        self.llama: llama.Llama | None = None
        with checkpoint(self.model) as folder:
            self.core = registry.load_model(
                folder,
                dtype=DTYPES[args.dtype],
                weights=args.weights,
                threads=args.threads,
                weights_copy=False,
            ).core
            self.adapter = random_adapter(self.core) if args.adapter else None
            try:
                self.llama = llama.Llama(
                    args.llama_python, folder, args.threads, args.clock, args.llama_type
                )
            except (RuntimeError, OSError) as error:
                report.note(str(error))
        if self.llama:
            report.note(f"{self.llama.version}: {self.agreement()}", drawn=True)

    def agreement(self) -> str:
        """How far the log-probabilities of 64 tokens lie apart, so that all run the same model."""
        ids = np.random.default_rng(1).integers(0, self.shape["vocab_size"], 65).astype(np.int32)
        sampler = _core.Sampler(self.core, tokens=256)
        sampler.add(0, ids, max_tokens=1, prompt_logprobs=True)
        while sampler.active:
            sampler.step()
        ours = sampler.take(0)["prompt_logprobs"][1:]
        with torch.no_grad():
            rows = self.model(input_ids=torch.from_numpy(ids).long()[None]).logits[0, :-1]
            table = torch.log_softmax(rows.double(), -1)
        hf = table.gather(1, torch.from_numpy(ids[1:]).long()[:, None])[:, 0].numpy()
        far = [float(np.abs(side - hf).max()) for side in (self.llama.logprobs(ids), ours)]
        spread = float(np.std(hf))
        return (
            f"log-probabilities of 64 tokens are at most {far[0]:.4f} from HF's (tinsmith's "
            f"{far[1]:.4f}), which spread by {spread:.2f}"
        )

    def times(self, batch: int, prompt: int, new: int) -> dict[str, Times]:
        """Each side's median times."""
        clock = CLOCKS[self.args.clock][1]

        def source() -> Iterator[np.ndarray]:
            return prompt_source(self.shape["vocab_size"], batch, prompt)

        s = self.shape
        keys = 2 * attending(self.args.shape) * s["num_key_value_heads"] * s["head_dim"]
        state = state_numbers(self.args.shape) / keys
        sides = {"tinsmith": sampler_side(self.core, source(), new, clock, state)}
        if self.adapter:
            side = sampler_side(self.core, source(), new, clock, state, self.adapter)
            sides["tinsmith + adapter"] = side
        if self.llama:
            sides["llama.cpp"] = llama.side(self.llama, source(), new)
        if "HF" not in self.args.without:
            sides["HF"] = generate_side(self.model, source(), new, clock=clock)
        return medians(alternate(sides, self.args.rounds, lambda call: call()))

    def prefill(self) -> None:
        """The table of prompts."""
        args = self.args
        rate = f"tokens/{args.unit}"
        title = f"Prefill, {args.shape} {args.dtype}"
        table = self.report.table(title, "tokens", {args.unit: ".3f", rate: ".1f"}, rate)
        layers, head = matrices(args.shape)
        heads = self.shape["num_attention_heads"] * self.shape["head_dim"]
        for length in args.prefill:
            times = self.times(1, length, 1)
            attention = 2 * length * heads * attending(args.shape)  # half of T×T, twice
            # The last layer's feed-forward part is needed for the last row alone.
            products = length * layers - (length - 1) * fed(args.shape) + head
            flops = 2 * products + length * attention
            table.add(
                str(length),
                {name: (seconds[0], length / seconds[0]) for name, seconds in times.items()},
                self.report.floor(flops=flops, dtype=args.dtype),
            )

    def decode(self) -> None:
        """The table of new tokens."""
        args = self.args
        each, rate = f"{args.unit[:-1]}ms/token", f"tokens/{args.unit}"
        title = f"Decoding after {args.prompt} tokens, {args.shape} {args.dtype}"
        table = self.report.table(title, "batch", {each: ".2f", rate: ".1f"}, rate)
        layers, head = matrices(args.shape)
        size = {"f32": 4, "bf16": 2}[args.dtype]
        layer_size, head_size = WEIGHT_BYTES.get(args.weights, (size, size))
        s = self.shape
        cache = 2 * attending(args.shape) * s["num_key_value_heads"] * s["head_dim"]
        for batch in args.batches:
            times = self.times(batch, args.prompt, args.new)
            tokens = batch * (args.new - 1)
            seconds = {}
            for name, (_, drawn, *sampler) in times.items():
                seconds[name] = drawn
                if sampler:
                    seconds[f"{name} + sampler"] = drawn + sampler[0]
            states = 4 * state_numbers(args.shape) / size  # in f32
            weights = layer_size * matrices(args.shape, batch)[0] + head_size * head
            read = weights + size * batch * (cache * (args.prompt + args.new / 2) + states)
            read = read if weights > CACHED else 0
            table.add(
                str(batch),
                {name: (1e3 * v / tokens, tokens / v) for name, v in seconds.items()},
                self.report.floor(
                    flops=2 * (layers + head),
                    bytes=read / batch,
                    dtype=args.dtype,
                    scale=1e3,
                ),
            )


def main() -> None:
    """Both tables."""
    options = parser(__doc__, shape="small", dtype="f32")
    add = options.add_argument
    add("--batches", type=int, nargs="*", default=[1, 8, 32])
    add("--prompt", type=int, default=64, help="tokens of a prompt before decoding")
    add("--new", type=int, default=64, help="tokens that are drawn")
    add("--prefill", type=int, nargs="*", default=[512], help="lengths of prompts")
    add("--llama-python", default=sys.executable, help="an interpreter that has llama.cpp")
    add("--llama-type", default="", help="of llama.cpp's matrices: Q4_0, Q8_0, Q4_K_M")
    add("--weights", choices=WEIGHTS, default="stored", help="what tinsmith keeps them in")
    add("--adapter", action="store_true", help="a side with LoRA of rank 32 on every matrix too")
    add("--without", nargs="*", default=[], choices=("HF",), help="sides to leave out")
    args = parse(options)
    with Report(args, __doc__) as report:
        comparison = Comparison(args, report)
        if args.prefill:
            comparison.prefill()
        if args.batches:
            comparison.decode()
        if comparison.llama:
            comparison.llama.close()


if __name__ == "__main__":
    main()
