"""What the benchmarks share: shapes, random checkpoints, and timing of both sides in one run.

Both sides run interleaved in one process on the same number of threads, and what is compared is CPU
seconds of the process: on a shared machine wall time measures the neighbours. Every table prints
the median and the ratio."""

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
DTYPES = {"f32": "float32", "bf16": "auto"}  # what a model of each type is computed in
SHAPES["small-qwen"] = SHAPES["small"] | {"vocab_size": SHAPES["0.6b"]["vocab_size"]}
UNTIED = {"8b"}  # shapes whose head is a matrix of its own
# One core of the machine in RESULTS.md (Zen 5) at multiply-adds in registers.
PEAK_GFLOPS = {"f32": 235.0, "bf16": 469.0}


def hf_model(shape: str, dtype: str, device: str = "cpu") -> Any:
    """A random Qwen3 of this shape, as transformers has it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tied = shape not in UNTIED
    config = Qwen3Config(**SHAPES[shape], max_position_embeddings=4096, tie_word_embeddings=tied)
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
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


def seconds_of(call: Callable[[], object], clock: Callable[[], float]) -> float:
    """Seconds that one call takes."""
    start = clock()
    call()
    return clock() - start


def interleave(
    sides: dict[str, Callable[[], object]],
    rounds: int,
    warm_up: bool = True,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, float]:
    """Median seconds of each side, run in turn: CPU seconds of the process, on all its threads, or
    what another clock says."""
    if warm_up:
        for call in sides.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, call in sides.items():
            seconds[name].append(seconds_of(call, clock))
    return {name: statistics.median(values) for name, values in seconds.items()}
