"""forward_backward beside transformers + PEFT: tokens per CPU second on the same data, in one run.

    python benchmarks/train.py --shape 0.6b --dtype bf16 --rounds 3
    python benchmarks/train.py --shape 0.6b --dtype bf16 --rounds 3 --custom

LoRA rank 32 on every linear layer and the head, cross_entropy on every token. PEFT's side is the
plain loss over full logits, its fastest on a CPU. The roofline counts the frozen products and
attention. --custom compares the engine's share of forward_backward_custom instead: a forward that
is kept and the backward from it, and a forward and a forward_backward.

Ten seconds at the small shape; at 0.6b ten minutes and 13 GiB in bf16, twice as long and 18 GiB in
f32."""

import warnings
from typing import Any

import numpy as np
import torch
from peers import (
    DTYPES,
    SHAPES,
    attending,
    checkpoint,
    hf_model,
    interleave,
    matrices,
    parse,
    parser,
    state_numbers,
)
from report import Report
from tinsmith import _core
from tinsmith.files import families
from tinsmith.files.kept import WEIGHTS

RANK = 32


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


def flops(shape: str, tokens: int, length: int) -> float:
    """Products of a LoRA step: forward, input gradients of the frozen weights, attention."""
    s = SHAPES[shape]
    attention = attending(shape) * s["num_attention_heads"] * s["head_dim"] * length / 2 * 7
    states = 3 * 3 * state_numbers(shape)  # read twice and written once, and each with a gradient
    return 2.0 * tokens * (2 * sum(matrices(shape)) + attention + states)


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
    args = parse(options)
    rng = np.random.default_rng(0)
    vocab = SHAPES[args.shape]["vocab_size"]
    tokens, targets = rng.integers(0, vocab, (2, args.datums, args.length)).astype(np.int32)
    model = hf_model(args.shape, args.dtype)
    with checkpoint(model) as folder:
        loaded = families.load_model(
            folder, dtype=DTYPES[args.dtype], weights=args.weights, threads=args.threads
        )
    adapter = _core.Adapter(loaded.core, rank=RANK)
    lengths = np.full(args.datums, args.length, np.int32)
    ones = np.ones(args.datums, np.int32)

    data = (tokens.ravel(), lengths, targets.ravel(), ones)

    def ours() -> None:
        adapter.forward_backward(*data, "cross_entropy", {}, {})
        adapter.clear_gradients()

    if args.custom:
        sides = custom_sides(adapter, data)
    else:
        sides = {"tinsmith": ours, "HF + PEFT": peft_side(model, tokens, targets)}
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
