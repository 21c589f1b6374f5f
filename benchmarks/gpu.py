"""The CUDA device on one GPU: training, decoding and the head, beside torch or alone.

    python benchmarks/gpu.py --shapes 0.6b 1.7b 4b 8b
    python benchmarks/gpu.py --alone

Random bf16 weights of Qwen3's shapes, LoRA of rank 32 on every linear layer and the head. Beside
torch + transformers + PEFT (beside.py) both sides run in turn, and a line of text is printed for
each. With --alone (alone.py) nothing of these is imported, weights are made on the card, and every
figure is a line of JSON; sequences that decode have 1,024 tokens then.
With --device cuda-emulated everything runs on the CPU, to see that it runs: no figure counts."""

import argparse
import sys

from peers import SHAPES
from tinsmith import _core

# What an option is where it isn't given, beside torch and alone.
DEFAULTS = {
    "parts": (["head", "decode", "train"], ["train", "decode"]),
    "shapes": (["0.6b", "1.7b", "4b", "8b"], ["8b", "0.6b"]),
    "prompt": (64, 1024),
    "new": (128, 64),
    "rounds": (5, 3),
    "tflops": (790.0, 0.0),
    "bandwidth": (3350.0, 0.0),
}


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    add("--device", choices=("cuda", "cuda-emulated"), default="cuda")
    add("--alone", action="store_true", help="our side alone, in lines of JSON")
    add("--parts", nargs="+", choices=("head", "decode", "train"), help="head: not with --alone")
    add("--shapes", choices=SHAPES, nargs="+")
    add("--datums", type=int, default=4)
    add("--length", type=int, default=2048)
    add("--batches", type=int, nargs="+", default=[1, 32, 128])
    add("--prompt", "--context", type=int, help="tokens before decoding; 64, and 1024 alone")
    add("--new", type=int, help="tokens that are decoded; 128, and 64 alone")
    add("--head", type=int, nargs=3, default=[8192, 4096, 151936])
    add("--topk", type=int, default=32)
    add("--rounds", type=int, help="5, and 3 alone")
    add("--tflops", type=float, help="of a big bf16 product; 790, and measured alone")
    add("--bandwidth", type=float, help="GB/s of the card; 3350, and a copy's as measured alone")
    return options


def main() -> int:
    """Prints a row for each part, shape and side."""
    options = parser()
    args = options.parse_args()
    for name, values in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, values[args.alone])
    if args.alone and "head" in args.parts:
        options.error("--parts head is a comparison with torch: it isn't there with --alone")
    if args.device == "cuda-emulated":
        import cuda_ops

        cuda_ops.op_devices.emulated_library()
    reason = _core.devices(args.device)[args.device]
    if reason:
        options.exit(1, f"{reason}\n")
    if args.alone:
        import alone as side
    else:
        import beside as side
    return side.run(args)


if __name__ == "__main__":
    sys.exit(main())
