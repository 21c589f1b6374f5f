"""gpu.py's comparison of the CUDA device with torch, transformers and PEFT on the same GPU.

Wall seconds, median, both sides in turn in one run. Training is one forward_backward of `datums`
packed sequences; its percentage counts the products alone, against what a big bf16 product reaches.
Decoding is held to the time in which memory is read: the weights and, at half length, the cache."""

import argparse
import gc
from collections.abc import Callable

import numpy as np
import torch
from ops import op_devices
from ours import random_core
from peers import RANK, SHAPES, flops, hf_model, interleave
from sample import generate_side, prompt_source, sampler_side
from tinsmith import _core
from train import peft_side


def here(device: str) -> str:
    """Where torch's side runs: the GPU, or the CPU beside the emulated one."""
    return "cuda" if device == "cuda" else "cpu"


def finished(call: Callable[[], object], device: str) -> Callable[[], None]:
    """The call, until torch's GPU has done all of it."""

    def run() -> None:
        call()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def used_gib(device: str) -> float:
    """GiB of the GPU's memory that are taken, by anyone; NaN without a GPU."""
    if device != "cuda":
        return float("nan")
    free, everything = torch.cuda.mem_get_info()
    return (everything - free) / 2**30


def train(args: argparse.Namespace, shape: str, core: _core.Model, model: torch.nn.Module) -> None:
    """Tokens a second of forward_backward, percentage of the peak, and memory at its highest."""
    rng, total = np.random.default_rng(0), args.datums * args.length
    vocab = SHAPES[shape]["vocab_size"]
    tokens, targets = rng.integers(0, vocab, (2, args.datums, args.length)).astype(np.int32)
    lengths, ones = np.full(args.datums, args.length, np.int32), np.ones(args.datums, np.int32)
    before = used_gib(args.device)
    adapter = _core.Adapter(core, rank=RANK)

    def ours() -> None:
        adapter.forward_backward(
            tokens.ravel(), lengths, targets.ravel(), ones, "cross_entropy", {}, {}
        )
        adapter.clear_gradients()

    ours()
    memory = {"tinsmith": core.weight_bytes / 2**30 + used_gib(args.device) - before}
    sides = {"tinsmith": ours}
    theirs = finished(peft_side(model, tokens, targets, here(args.device)), args.device)
    try:
        theirs()
        sides["PEFT"] = theirs
    except torch.OutOfMemoryError:
        print(f"{shape:5} train  PEFT runs out of memory")
    if args.device == "cuda":
        memory["PEFT"] = torch.cuda.max_memory_allocated() / 2**30
    seconds = interleave(sides, args.rounds, clock="wall")
    work = flops(shape, total, args.length) / 1e12
    for name, value in seconds.items():
        print(
            f"{shape:5} train  {args.datums} x {args.length}  {name:8} {total / value:10.1f} "
            f"tokens/s {100 * work / value / args.tflops:6.2f} % of {args.tflops:.0f} TFLOP/s "
            f"{memory.get(name, float('nan')):6.1f} GiB"
        )
    if "PEFT" in seconds:
        print(f"{shape:5} train  ratio {seconds['PEFT'] / seconds['tinsmith']:.2f}", flush=True)


def decode(args: argparse.Namespace, shape: str, core: _core.Model, model: torch.nn.Module) -> None:
    """New tokens a second at each batch size, and the share of what the memory allows."""
    s = SHAPES[shape]
    cache = 4 * s["num_hidden_layers"] * s["num_key_value_heads"] * s["head_dim"]  # a token's
    for batch in args.batches:
        source = (s["vocab_size"], batch, args.prompt)
        theirs = generate_side(model, prompt_source(*source), args.new, here(args.device))
        sides = {
            "tinsmith": sampler_side(core, prompt_source(*source), args.new),
            "HF": finished(theirs, args.device),
        }
        seconds = interleave(sides, args.rounds, clock="wall")
        read = core.weight_bytes + batch * cache * (args.prompt + args.new / 2)
        limit = batch * args.bandwidth * 1e9 / read
        for name, value in seconds.items():
            rate = batch * args.new / value
            print(
                f"{shape:5} decode batch {batch:3}  {name:8} {rate:10.1f} tokens/s "
                f"{100 * rate / limit:6.2f} % of the bandwidth's {limit:.0f}"
            )
        print(f"{shape:5} decode ratio {seconds['HF'] / seconds['tinsmith']:.2f}", flush=True)


def head(args: argparse.Namespace) -> None:
    """Log-probabilities of one target a row, and the K best, of T rows, a chunk at a time."""
    T, D, V = args.head
    rng, device = np.random.default_rng(0), op_devices.Device(args.device)
    K, rows = args.topk, max(1, min(T, device.c.chunk_bytes // (4 * V)))
    x, w = rng.standard_normal((rows, D)), rng.standard_normal((V, D)) / D**0.5
    ids, start = rng.integers(0, V, rows), np.arange(rows + 1)
    logits, lse = (device.put(np.zeros((rows, n)), "float") for n in (V, 2))
    sizes = {"T": rows, "V": V}
    product = device.prepared("head", logits=logits, x=x, w=op_devices.Frozen(w), D=D, **sizes)
    logp = device.prepared(
        "logprob", lse=lse, logp=(rows,), logits=logits, ids=ids, start=start, **sizes
    )
    best = device.prepared(
        "topk_logprob", ids=(rows, K), logp=(rows, K), logits=logits, lse=lse, K=K, **sizes
    )
    place = here(args.device)
    tx, tw = (torch.from_numpy(a).to(place, torch.bfloat16) for a in (x, w))
    index = torch.from_numpy(ids).to(place)[:, None]

    def ours(*steps: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(0, T, rows):
                for step in steps:
                    step()
            device.check(device.c.sync(device.pointer))

        return run

    def torchs(topk: bool) -> Callable[[], None]:
        @torch.no_grad()
        def run() -> None:
            for _ in range(0, T, rows):
                out = torch.nn.functional.linear(tx, tw).float()
                norm = torch.logsumexp(out, 1, keepdim=True)
                (out.topk(K, dim=1).values if topk else out.gather(1, index)) - norm

        return finished(run, args.device)

    for what, side in (
        ("logprob", (ours(product, logp), torchs(False))),
        (f"top {K}", (ours(product, logp, best), torchs(True))),
    ):
        seconds = interleave(
            dict(zip(("tinsmith", "torch"), side, strict=True)),
            args.rounds,
            clock="wall",
        )
        percent = 100 * 2e-12 * T * D * V / seconds["tinsmith"] / args.tflops
        print(
            f"head  {T} x {D} x {V}  {what:8} tinsmith {1e3 * seconds['tinsmith']:9.2f} ms "
            f"({percent:.2f} % of peak), torch {1e3 * seconds['torch']:9.2f} ms, "
            f"ratio {seconds['torch'] / seconds['tinsmith']:.2f}",
            flush=True,
        )


def whole_models(args: argparse.Namespace, shape: str) -> None:
    """Training and decoding of one shape. Each side makes random weights of its own on the card:
    what they are changes no time."""
    model = hf_model(shape, "bf16", here(args.device))
    if args.device == "cuda":
        torch.cuda.empty_cache()  # it was made in f32
    core = random_core(shape, args.device)
    if "decode" in args.parts:
        decode(args, shape, core, model)
    if "train" in args.parts:
        train(args, shape, core, model)
    for note in core.notes:
        print(note)
    del model, core
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def run(args: argparse.Namespace) -> int:
    """A row for each part, shape and side."""
    if "head" in args.parts:
        head(args)
    for shape in args.shapes if {"decode", "train"} & set(args.parts) else []:
        whole_models(args, shape)
    return 0
