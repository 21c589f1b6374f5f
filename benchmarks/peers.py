"""What the benchmarks share: shapes, random checkpoints, the command line, and both sides in turn.

Both sides run interleaved in one process on the same number of threads, and what is compared is CPU
seconds of the process: on a shared machine wall time measures the neighbours. report.py prints and
draws what was found."""

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 512,
    },
    "small": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "intermediate_size": 768,
        "vocab_size": 4096,
    },
    "0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
    },
    "1.7b": {
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 6144,
        "vocab_size": 151936,
    },
    "4b": {
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
        "vocab_size": 151936,
    },
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
    },
}
# Qwen3.5: one layer in four attends. The 0.8B's, four layers of the 4B's, and a small one.
DELTA = {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
SHAPES |= {
    "3.5-small": DELTA
    | {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 768,
        "vocab_size": 4096,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "3.5-0.8b": DELTA
    | {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 3584,
        "vocab_size": 248320,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
    },
    "3.5-4b-4": DELTA
    | {
        "hidden_size": 2560,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 9216,
        "vocab_size": 32768,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
}
# Mixtures of experts: two and four layers of Qwen3-30B-A3B's, and a small one.
SHAPES |= {
    "moe-small": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "intermediate_size": 768,
        "vocab_size": 4096,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 192,
        "norm_topk_prob": True,
    },
    "30b-a3b-2": {
        "hidden_size": 2048,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "vocab_size": 32768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
}
SHAPES["30b-a3b-4"] = SHAPES["30b-a3b-2"] | {"num_hidden_layers": 4}
# Two layers of the dense ones, under a head that is to them about what the whole one is to all.
SHAPES |= {
    f"{size}-2": SHAPES[size] | {"num_hidden_layers": 2, "vocab_size": 16384}
    for size in ("0.6b", "1.7b", "4b", "8b")
}
SHAPES["small-qwen"] = SHAPES["small"] | {"vocab_size": SHAPES["0.6b"]["vocab_size"]}
UNTIED = {"8b"}  # shapes whose head is a matrix of its own
ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
RANK = 32  # of LoRA, wherever no other is said
DTYPES = {"f32": "float32", "bf16": "auto"}  # what a model of each type is computed in
CACHED = 128 << 20  # bytes: smaller weights may be in a cache from one call to the next
CLOCKS: dict[str, tuple[str, Callable[[], float]]] = {
    "cpu": ("cpu-s", time.process_time),  # of the process, on all its threads
    "wall": ("s", time.perf_counter),
}

# ---- the command line ----


def parser(
    doc: str, *, rounds: int = 5, shape: str = "", dtype: str = ""
) -> argparse.ArgumentParser:
    """The options that every program has, and, where a default is given, --shape and --dtype."""
    options = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    if shape:
        add(
            "--shape",
            choices=SHAPES,
            default=shape,
            help=f"a Qwen3's, 3.5-… a Qwen3.5's, moe-… and 30b-a3b-… with experts; {shape} if none",
        )
    if dtype:
        add("--dtype", choices=DTYPES, default=dtype, help=f"of the model; {dtype} if not given")
    add("--rounds", type=int, default=rounds, help=f"of both sides; {rounds} if not given")
    add("--threads", type=int, default=1, help="and cores; 1 if not given")
    add("--clock", choices=CLOCKS, default="cpu", help="CPU seconds of the process, or wall time")
    add("--plot", type=Path, metavar="FILE.svg", help="draw the tables too")
    return options


def parse(options: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, with `unit`, the clock's unit, and `said`, the setting in words. The process is
    held to as many cores as there are threads, so that every library takes so many: it begins anew
    if it had more."""
    args = options.parse_args()
    if args.rounds < 1 or args.threads < 1:
        options.error("--rounds and --threads are at least 1")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        options.error("--plot needs matplotlib: pip install matplotlib")
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < args.threads:
            options.error(f"--threads {args.threads}: this process may use {len(cores)} core(s)")
        if len(cores) > args.threads:
            os.sched_setaffinity(0, cores[-args.threads :])
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(args.threads)
    args.unit = CLOCKS[args.clock][0]
    threads = f"{args.threads} thread{'s' if args.threads > 1 else ''}"
    rounds = f"{args.rounds} round{'s' if args.rounds > 1 else ''}"
    args.said = (
        f"medians of {rounds}, {threads}, {'CPU seconds' if args.clock == 'cpu' else 'wall time'}"
    )
    return args


# ---- models ----


def attending(shape: str) -> int:
    """Layers that attend; the others, of a Qwen3.5, keep a state."""
    layers = SHAPES[shape]["num_hidden_layers"]
    return layers // 4 if "linear_key_head_dim" in SHAPES[shape] else layers


def fed(shape: str, rows: int = 1) -> int:
    """Weights of one layer's feed-forward part. Of experts, those that so many rows choose."""
    s = SHAPES[shape]
    feed = float(3 * s["intermediate_size"])
    if experts := s.get("num_experts"):
        missed = 1 - s["num_experts_per_tok"] / experts
        feed = experts + 3 * s["moe_intermediate_size"] * experts * (1 - missed**rows)
    return s["hidden_size"] * round(feed)


def matrices(shape: str, rows: int = 1) -> tuple[int, int]:
    """Weights of all layers' matrices, and of the head. Of experts, those that so many rows choose:
    for one row what it multiplies, for several what is read, if each chooses at random."""
    s = SHAPES[shape]
    heads, kv = s["num_attention_heads"] * s["head_dim"], s["num_key_value_heads"] * s["head_dim"]
    delta = s["num_hidden_layers"] - attending(shape)
    outputs = 2 * heads + 2 * kv + (heads if delta else 0)  # q has a gate beside it
    total = attending(shape) * outputs
    if delta:
        key = s["linear_num_key_heads"] * s["linear_key_head_dim"]
        value = s["linear_num_value_heads"] * s["linear_value_head_dim"]
        total += delta * (2 * key + 3 * value + 2 * s["linear_num_value_heads"])
    layers = s["hidden_size"] * total + s["num_hidden_layers"] * fed(shape, rows)
    return layers, s["vocab_size"] * s["hidden_size"]


def state_numbers(shape: str) -> int:
    """Numbers of all layers' states that a sequence keeps and a token reads."""
    s = SHAPES[shape]
    if "linear_key_head_dim" not in s:
        return 0
    head = s["linear_key_head_dim"] * s["linear_value_head_dim"]
    return (s["num_hidden_layers"] - attending(shape)) * s["linear_num_value_heads"] * head


def flops(shape: str, tokens: int, length: int) -> float:
    """Products of a LoRA step: forward, input gradients of the frozen weights, attention."""
    s = SHAPES[shape]
    attention = attending(shape) * s["num_attention_heads"] * s["head_dim"] * length / 2 * 7
    states = 3 * 3 * state_numbers(shape)  # read twice and written once, and each with a gradient
    return 2.0 * tokens * (2 * sum(matrices(shape)) + attention + states)


def hf_config(shape: str) -> dict[str, Any]:
    """A shape's config.json: of a Qwen3, Qwen3.5 or Qwen3-MoE."""
    options = SHAPES[shape]
    kind = "qwen3_5_text" if "linear_key_head_dim" in options else "qwen3"
    kind = "qwen3_moe" if "num_experts" in options else kind
    return {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind]],
        **options,
        "tie_word_embeddings": shape not in UNTIED,
        "max_position_embeddings": 1 << 14,
    }


def hf_model(shape: str, dtype: str, device: str = "cpu") -> Any:
    """A random model of this shape, as transformers has it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = AutoConfig.for_model(**hf_config(shape))
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    return model.to({"f32": torch.float32, "bf16": torch.bfloat16}[dtype])


@contextmanager
def checkpoint(model: Any) -> Iterator[Path]:
    """The model in a folder that is gone afterwards, with a tokenizer file that names its ids."""
    folder = Path(tempfile.mkdtemp(prefix="tinsmith-bench-"))
    try:
        model.save_pretrained(folder)
        last = model.config.vocab_size - 1
        words = {"type": "WordLevel", "unk_token": "a", "vocab": {"a": last}}
        tokenizer = {"version": "1.0", "added_tokens": [], "model": words}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
        yield folder
    finally:
        shutil.rmtree(folder)


# ---- both sides in turn ----


def seconds_of(call: Callable[[], object], clock: Callable[[], float]) -> float:
    """Seconds that one call takes."""
    start = clock()
    call()
    return clock() - start


def alternate(
    sides: dict[str, Callable[[], object]],
    rounds: int,
    measure: Callable[[Callable[[], object]], T],
    warm_up: bool = True,
) -> dict[str, list[T]]:
    """What is measured of each side's call in each round, the sides run in turn."""
    if warm_up:
        for call in sides.values():
            call()
    found: dict[str, list[T]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, call in sides.items():
            found[name].append(measure(call))
    return found


def medians(found: dict[str, list[tuple[float, ...]]]) -> dict[str, tuple[float, ...]]:
    """Of what `alternate` found, each figure's median over the rounds."""
    return {
        name: tuple(map(statistics.median, zip(*runs, strict=True))) for name, runs in found.items()
    }


def interleave(
    sides: dict[str, Callable[[], object]],
    rounds: int,
    warm_up: bool = True,
    clock: str = "cpu",
) -> dict[str, float]:
    """Median seconds of each side, run in turn, by one of CLOCKS."""
    found = alternate(sides, rounds, lambda call: seconds_of(call, CLOCKS[clock][1]), warm_up)
    return {name: statistics.median(values) for name, values in found.items()}


def resident_gib(field: str = "VmRSS") -> float:
    """A size of this process in GiB: VmRSS, or VmHWM, the largest since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 2**20
    raise KeyError(field)


def forget_peak() -> None:
    """VmHWM counts from here on."""
    Path("/proc/self/clear_refs").write_text("5")


def seconds_and_peak(call: Callable[[], object], clock: str) -> tuple[float, float]:
    """Seconds of a call by one of CLOCKS, and by how many GiB the resident set grew at its peak."""
    forget_peak()
    before = resident_gib()
    return seconds_of(call, CLOCKS[clock][1]), resident_gib("VmHWM") - before
