"""Peak memory of forward_backward beside transformers + PEFT, and what it costs to keep less.

    python benchmarks/memory.py tokens --shape small        # against the tokens of a batch
    python benchmarks/memory.py vocab                       # against the vocabulary
    python benchmarks/memory.py length --shape small        # against the tokens of one datum
    python benchmarks/memory.py keep --shape small --tokens 4096  # everything kept, and less
    python benchmarks/memory.py start --shape 0.6b --tokens 1024  # from the first import on

LoRA rank 32 on every linear layer and the head, cross_entropy on every token, one thread. Each
figure is from a process of its own: the largest resident set (VmHWM) during one forward_backward
above what is resident when the model, its adapter and a call of one token are there; and beside it
what tinsmith's plan says of the step. Seconds are of CPU, of a second such call."""

import argparse
import functools
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from peers import DTYPES, SHAPES, checkpoint, hf_model

RANK, MIB = 32, 1 << 20
SIDES = ("tinsmith", "HF + PEFT")
TOKENS = (256, 512, 1024, 2048, 4096, 8192)
VOCABULARIES = (4096, 16384, 65536, 151936)
VOCABULARY = 512  # the ids that are drawn from: every shape has them
DATUM = 256  # tokens, where a batch has many

Cases = list[tuple[str, dict[str, tuple[float, ...]]]]  # a case, and each side's figures


# ---- one side, as a child ----


def resident_mib(field: str) -> float:
    """A size of this process: VmRSS, or VmHWM, the largest since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


def forget_peak() -> None:
    """VmHWM counts from here on."""
    Path("/proc/self/clear_refs").write_text("5")


def ours(args: argparse.Namespace) -> tuple[Callable[[int, int], object], float]:
    """A call of forward_backward on datums × length tokens, and the plan's MiB."""
    from tinsmith import _core, families

    core = families.load_model(args.folder, dtype=DTYPES[args.dtype], threads=1).core
    options = {"rank": RANK, "step_bytes": args.step_bytes}
    adapter = _core.Adapter(core, **options)
    plan = core.plan(RANK, 0, args.step_bytes)
    rows = max(args.length, min(args.datums * args.length, plan["step_tokens"]))
    planned = core.plan(RANK, rows, args.step_bytes)["step"] / MIB
    return lambda datums, length: train(adapter, datums, length), planned


def train(adapter: Any, datums: int, length: int) -> None:
    """Ours on the same tokens each time."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, datums * length).astype(np.int32)
    lengths, ones = np.full(datums, length, np.int32), np.ones(datums, np.int32)
    adapter.forward_backward(tokens, lengths, tokens, ones, "cross_entropy", {}, {})
    adapter.clear_gradients()


def peft(args: argparse.Namespace) -> tuple[Callable[[int, int], object], float]:
    """The same with transformers and PEFT, all datums in one batch; it has no plan."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    model = AutoModelForCausalLM.from_pretrained(args.folder)
    lora = LoraConfig(r=RANK, lora_alpha=32, target_modules=names)
    model = get_peft_model(model, lora, autocast_adapter_dtype=False)

    def call(datums: int, length: int) -> None:
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, (datums, length))
        logits = model(input_ids=torch.from_numpy(tokens), use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(tokens).flatten(), reduction="sum"
        )
        loss.backward()

    return call, math.nan


def child(args: argparse.Namespace) -> None:
    """One side's figures as JSON: MiB above the loaded model, the plan's, CPU seconds; seconds and
    MiB from the first import to the first token."""
    start = time.perf_counter()
    call, planned = (ours if args.side == SIDES[0] else peft)(args)
    call(1, 1)
    ready, loaded = time.perf_counter() - start, resident_mib("VmRSS")
    forget_peak()
    call(args.datums, args.length)
    peak, begin = resident_mib("VmHWM"), time.process_time()
    call(args.datums, args.length)
    seconds = time.process_time() - begin
    print(json.dumps([peak - loaded, planned, seconds, ready, loaded]))


def measure(
    args: argparse.Namespace,
    folder: Path,
    datums: int,
    length: int,
    side: str = SIDES[0],
    step_bytes: int = 0,
) -> list[float]:
    """The figures of a child; NaN where it was killed for want of memory."""
    options = {"side": side, "folder": folder, "datums": datums, "length": length}
    options |= {"step-bytes": step_bytes, "dtype": args.dtype}
    command = [sys.executable, __file__, "child"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode == 0:
        return json.loads(answer.stdout.splitlines()[-1])
    if answer.returncode != -signal.SIGKILL:
        raise RuntimeError(answer.stderr)
    return [math.nan] * 5


# ---- what is measured ----


def both(args: argparse.Namespace, folder: Path, datums: int, length: int) -> dict[str, Any]:
    """Both sides' figures; transformers' up to --peer-tokens alone."""
    run = SIDES if datums * length <= args.peer_tokens else SIDES[:1]
    return {side: tuple(measure(args, folder, datums, length, side)[:3]) for side in run}


def tokens(args: argparse.Namespace) -> Cases:
    """Against the tokens of a batch of datums of 256."""
    with checkpoint(hf_model(args.shape, args.dtype)) as folder:
        return [
            (f"{count} tokens", both(args, folder, count // DATUM, DATUM))
            for count in TOKENS
            if count <= args.tokens
        ]


def length(args: argparse.Namespace) -> Cases:
    """Against the tokens of one datum; a model's context bounds it."""
    with checkpoint(hf_model(args.shape, args.dtype)) as folder:
        return [
            (f"1 × {count}", both(args, folder, 1, count))
            for count in TOKENS
            if count <= min(args.tokens, 4096)
        ]


def vocab(args: argparse.Namespace) -> Cases:
    """Against the vocabulary, at one width."""
    found: Cases = []
    for size in VOCABULARIES:
        SHAPES["one"] = SHAPES[args.shape] | {"vocab_size": size}
        with checkpoint(hf_model("one", args.dtype)) as folder:
            found.append((f"{size} ids", both(args, folder, 1024 // DATUM, DATUM)))
    return found


def keep(args: argparse.Namespace) -> Cases:
    """One datum of --tokens with everything kept, with less, and with as little as can be; the
    median of rounds in which they take turns."""
    from tinsmith import families

    limits: dict[str, int] = {}
    with checkpoint(hf_model(args.shape, args.dtype)) as folder:
        core = families.load_model(folder, dtype=DTYPES[args.dtype], threads=1).core
        plan = functools.partial(core.plan, RANK, args.tokens)
        least, most = plan(1)["step"], plan(1 << 60)["step"]
        for part in (4, 3, 2, 1, 0):
            limit = least + (most - least) * part // 4
            kept = plan(limit)
            limits[f"{kept['kept']} layers, attention of {kept['attention_kept']}"] = limit
        del core, plan
        rounds = [
            [measure(args, folder, 1, args.tokens, step_bytes=limit) for limit in limits.values()]
            for _ in range(args.rounds)
        ]
    medians = np.median(rounds, axis=0)
    return [(name, {SIDES[0]: tuple(row[:3])}) for name, row in zip(limits, medians, strict=True)]


def start(args: argparse.Namespace) -> Cases:
    """From the first import to the first token, and the largest resident set in all."""
    with checkpoint(hf_model(args.shape, args.dtype)) as folder:
        found = {side: measure(args, folder, 1, args.tokens, side) for side in SIDES}
    return [
        (f"{side}: ready after {ready:.2f} s, peak {(peak + loaded) / 1024:.2f} GiB", {})
        for side, (peak, _, _, ready, loaded) in found.items()
    ]


def show(title: str, cases: Cases) -> None:
    """A table in Markdown: each case's sides, and how many times ours they take."""
    print(f"\n{title}\n")
    print("| case | side | peak above the model, MiB | plan, MiB | CPU s | ratio |")
    print("|---|---|---|---|---|---|")
    for case, sides in cases:
        for side, (peak, planned, seconds) in sides.items():
            plan = "" if math.isnan(planned) else f"{planned:.0f}"
            ratio = peak / sides[SIDES[0]][0]
            print(f"| {case} | {side} | {peak:.0f} | {plan} | {seconds:.2f} | {ratio:.2f} |")
        if not sides:
            print(f"| {case} | | | | | |")


def main() -> None:
    """Runs one of the measurements."""
    kinds = {"tokens": tokens, "vocab": vocab, "length": length, "keep": keep, "start": start}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=(*kinds, "child"))
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--dtype", choices=DTYPES, default="f32", help="of the model")
    parser.add_argument("--tokens", type=int, default=8192, help="at most, or of the one datum")
    parser.add_argument("--peer-tokens", type=int, default=8192, help="the most for transformers")
    parser.add_argument("--rounds", type=int, default=3)
    for name, kind in {"side": str, "folder": Path, "datums": int, "length": int}.items():
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--step-bytes", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kind == "child":
        child(args)
    else:
        show(f"{args.shape}, {args.dtype}: {args.kind}", kinds[args.kind](args))


if __name__ == "__main__":
    main()
