"""Decoding beside transformers' generate: new tokens per CPU second at batch 1, 8, 32, in one run.

    python benchmarks/sample.py --shape 0.6b --batches 1 8 32 --rounds 3

64 prompt tokens and 64 new ones at temperature 1 from the whole vocabulary; the prompt's forward is
in the time."""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from peers import DTYPES, SHAPES, checkpoint, hf_model, interleave
from tinsmith import _core, families


def generate_side(
    model: Any, prompts: np.ndarray, new: int, device: str = "cpu"
) -> Callable[[], None]:
    """A call that samples `new` tokens for each row of prompts with transformers."""
    ids = torch.from_numpy(prompts).long().to(device)

    options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}

    def run() -> None:
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, min_new_tokens=new, max_new_tokens=new, **options)

    return run


def sampler_side(core: _core.Model, prompts: np.ndarray, new: int) -> Callable[[], None]:
    """The same with the engine: one request a row."""
    sampler = _core.Sampler(core, tokens=2 * len(prompts) * (prompts.shape[1] + new))

    def run() -> None:
        for number, prompt in enumerate(prompts):
            sampler.add(number, prompt, max_tokens=new, seed=number)
        while sampler.active:
            sampler.step()
        for number in range(len(prompts)):
            sampler.take(number)

    return run


def main() -> None:
    """Prints one row a batch size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32", help="of the model")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rng = np.random.default_rng(0)
    model = hf_model(args.shape, args.dtype).eval()
    with checkpoint(model) as folder:
        loaded = families.load_model(folder, dtype=DTYPES[args.dtype], threads=args.threads)
    setting = (
        f"{args.shape} {args.dtype}, {args.threads} thread(s), {args.prompt} + {args.new} tokens"
    )
    print(f"{setting}, median of {args.rounds}")
    for batch in args.batches:
        prompts = rng.integers(0, SHAPES[args.shape]["vocab_size"], (batch, args.prompt)).astype(
            np.int32
        )
        sides = {
            "tinsmith": sampler_side(loaded.core, prompts, args.new),
            "HF": generate_side(model, prompts, args.new),
        }
        seconds = interleave(sides, args.rounds)
        rates = {name: batch * args.new / value for name, value in seconds.items()}
        ours, theirs = rates["tinsmith"], rates["HF"]
        shown = f"tinsmith {ours:9.1f} tokens/cpu-s, HF {theirs:9.1f}, ratio {ours / theirs:.2f}"
        print(f"batch {batch:3}: {shown}")


if __name__ == "__main__":
    main()
