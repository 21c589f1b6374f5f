"""forward_backward beside transformers + PEFT: tokens per CPU second on the same data, in one run.

    python benchmarks/train.py --shape 0.6b --dtype bf16 --rounds 3
    python benchmarks/train.py --shape 0.6b --dtype bf16 --rounds 3 --custom
    python benchmarks/train.py --shape 1.7b-2 --dtype bf16 --weights int4 --bitsandbytes

LoRA rank 32 on every linear layer and the head, cross_entropy on every token. PEFT's side is the
plain loss over full logits, its fastest on a CPU. The roofline counts the frozen products and
attention. --custom compares the engine's share of forward_backward_custom instead: a forward that
is kept and the backward from it, and a forward and a forward_backward. With --weights of fewer bits
the same step on the weights as stored is a side too. With --bitsandbytes QLoRA is: PEFT on a model
that transformers loads in bitsandbytes' NF4, computing in the model's type. tinsmith reads it too.

Ten seconds at the small shape; at 0.6b ten minutes and 13 GiB in bf16, twice as long and 18 GiB in
f32."""

import argparse
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import (
    DTYPES,
    RANK,
    SHAPES,
    checkpoint,
    flops,
    hf_model,
    interleave,
    parse,
    parser,
)
from report import Report
from tinsmith import _core
from tinsmith.models import registry
from tinsmith.models.weight_dtypes import WEIGHTS


def peft_side(model: Any, tokens: np.ndarray, targets: np.ndarray, device: str = "cpu") -> Any:
    """A call that runs forward and backward of the PEFT model on (datums, length) tokens."""
    from peft import LoraConfig, get_peft_model

    warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
    experts = "num_experts" in model.config.to_dict()
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    names += ["in_proj_qkv", "in_proj_z", "out_proj"]
    lora = get_peft_model(
        model,
        LoraConfig(
            r=RANK,
            lora_alpha=32,
            target_modules=names,
            target_parameters=["experts.gate_up_proj", "experts.down_proj"] if experts else None,
        ),
        autocast_adapter_dtype=device != "cpu",  # on a GPU matrices in f32, as PEFT trains them
    )
    ids, labels = (torch.from_numpy(array).long().to(device) for array in (tokens, targets))

    def run() -> None:
        lora.zero_grad(set_to_none=True)
        logits = lora(input_ids=ids, use_cache=False).logits.float()
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum"
        ).backward()

    return run


def qlora_model(folder: Path, dtype: torch.dtype) -> Any:
    """The folder's model in bitsandbytes' NF4, all linear layers but the head, as QLoRA has it."""
    import logging

    import transformers

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # that it has no faster kernels here
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=how, dtype=dtype
    )


def adapter_of(folder: Path, args: argparse.Namespace, weights: str) -> _core.Adapter:
    """LoRA on the folder's model, whose matrices are kept in so many bits."""
    loaded = registry.load_model(
        folder, dtype=DTYPES[args.dtype], weights=weights, threads=args.threads, weights_copy=False
    )
    return _core.Adapter(loaded.core, rank=RANK)


def custom_sides(adapter: _core.Adapter, data: tuple[np.ndarray, ...]) -> dict[str, Any]:
    """The two ways of forward_backward_custom."""
    rng = np.random.default_rng(0)
    gradient = rng.normal(size=len(data[2])).astype(np.float32)

    def two() -> None:
        adapter.forward(*data)
        adapter.forward_backward(*data, "cross_entropy", {"weights": -gradient}, {})

    def one() -> None:
        adapter.forward(*data, keep=True)
        adapter.backward(gradient)

    return {"one forward": one, "two forwards": two}


def main() -> None:
    """One case, a row a side."""
    options = parser(__doc__, shape="small", dtype="f32")
    options.add_argument("--datums", type=int, default=4)
    options.add_argument("--length", type=int, default=512)
    options.add_argument(
        "--weights", choices=WEIGHTS, default="stored", help="what tinsmith keeps them in"
    )
    options.add_argument("--custom", action="store_true", help="forward_backward_custom")
    options.add_argument("--bitsandbytes", action="store_true", help="QLoRA beside it")
    args = parse(options)
    if args.custom and args.bitsandbytes:
        options.error("--custom compares tinsmith alone: it has no side for --bitsandbytes")
    rng = np.random.default_rng(0)
    vocab = SHAPES[args.shape]["vocab_size"]
    tokens, targets = rng.integers(0, vocab, (2, args.datums, args.length)).astype(np.int32)
    model = hf_model(args.shape, args.dtype)
    kinds = {"tinsmith": args.weights}
    if args.weights != "stored" and not args.custom:
        kinds["tinsmith, as stored"] = "stored"
    with checkpoint(model) as folder:
        adapters = {side: adapter_of(folder, args, kept) for side, kept in kinds.items()}
        quantised = qlora_model(folder, model.dtype) if args.bitsandbytes else None
    if quantised is not None:
        with checkpoint(quantised) as folder:
            adapters["tinsmith, NF4"] = adapter_of(folder, args, "stored")
    lengths = np.full(args.datums, args.length, np.int32)
    ones = np.ones(args.datums, np.int32)

    data = (tokens.ravel(), lengths, targets.ravel(), ones)

    def ours(adapter: _core.Adapter) -> None:
        adapter.forward_backward(*data, "cross_entropy", {}, {})
        adapter.clear_gradients()

    if args.custom:
        sides = custom_sides(adapters["tinsmith"], data)
    else:
        sides = {side: partial(ours, adapter) for side, adapter in adapters.items()}
        sides["HF + PEFT"] = peft_side(model, tokens, targets)
        if quantised is not None:
            sides["QLoRA"] = peft_side(quantised, tokens, targets)
    total = args.datums * args.length
    with Report(args, __doc__) as report:
        what = "forward_backward_custom" if args.custom else "forward_backward, LoRA rank 32"
        rate = f"tokens/{args.unit}"
        columns = {args.unit: ".3f", rate: ".1f"}
        table = report.table(f"{what}, {args.shape} {args.dtype}", "batch", columns, plot=rate)
        seconds = interleave(sides, args.rounds, clock=args.clock)
        work = flops(args.shape, total, args.length)
        table.add(
            f"{args.datums}×{args.length}",
            {name: (value, total / value) for name, value in seconds.items()},
            None if args.custom else report.floor(flops=work, dtype=args.dtype),
        )


if __name__ == "__main__":
    main()
