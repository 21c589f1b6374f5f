"""Start-up time and peak memory, each side in a process of its own, beside transformers + PEFT.

    python benchmarks/memory.py --shape 0.6b

Start-up: from the first import until the model has answered one token's log-probability. Peak: the
largest resident set over one forward_backward of datums × length tokens (getrusage)."""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from peers import DTYPES, SHAPES, checkpoint, hf_model

RANK = 32


def ours(folder: Path, tokens: np.ndarray, dtype: str) -> None:
    """Loads, then one forward_backward; prints its figures as JSON."""
    start = time.perf_counter()
    from tinsmith import _core, families

    loaded = families.load_model(folder, dtype=DTYPES[dtype], threads=1)
    adapter = _core.Adapter(loaded.core, rank=RANK)
    one = np.ones(1, np.int32)
    adapter.forward_backward(one, one, one, one, "cross_entropy", {}, {}, backward=False)
    ready = time.perf_counter() - start
    lengths, counts = (
        np.full(len(tokens), tokens.shape[1], np.int32),
        np.ones(len(tokens), np.int32),
    )
    adapter.forward_backward(
        tokens.ravel(), lengths, tokens.ravel(), counts, "cross_entropy", {}, {}
    )
    report(ready)


def peft(folder: Path, tokens: np.ndarray, dtype: str) -> None:
    """The same with transformers and PEFT."""
    start = time.perf_counter()
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype={"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    )
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=32, target_modules=names))
    with torch.no_grad():
        model(input_ids=torch.ones(1, 1, dtype=torch.long))
    ready = time.perf_counter() - start
    ids = torch.from_numpy(tokens).long()
    logits = model(input_ids=ids, use_cache=False).logits.float()
    torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), ids.flatten(), reduction="sum"
    ).backward()
    report(ready)


def report(ready: float) -> None:
    """One line of JSON: seconds until ready, peak MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"ready_s": ready, "peak_mib": peak}))


def main() -> None:
    """Runs both sides as children and prints them beside one another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--datums", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--dtype", choices=DTYPES, default="f32", help="of the model")
    parser.add_argument("--side", choices=("tinsmith", "peft"), help="one side, as a child")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    vocab = SHAPES[args.shape]["vocab_size"]
    tokens = (
        np.random.default_rng(0).integers(0, vocab, (args.datums, args.length)).astype(np.int32)
    )
    if args.side:
        (ours if args.side == "tinsmith" else peft)(args.folder, tokens, args.dtype)
        return
    with checkpoint(hf_model(args.shape, args.dtype)) as folder:
        for side in ("tinsmith", "peft"):
            child = ["--side", side, "--folder", str(folder)]
            command = [sys.executable, __file__, *sys.argv[1:], *child]
            answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found = json.loads(answer.splitlines()[-1])
            peak = found["peak_mib"] / 1024
            print(f"{side:9} ready after {found['ready_s']:6.2f} s, peak {peak:6.2f} GiB")


if __name__ == "__main__":
    main()
