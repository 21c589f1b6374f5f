"""Peak memory of forward_backward beside transformers + PEFT, and what it costs to keep less.

    python benchmarks/memory.py tokens length --plot memory.svg  # of a batch, and of one datum
    python benchmarks/memory.py vocab                            # against the vocabulary
    python benchmarks/memory.py keep --tokens 4096 --rounds 3    # everything kept, and less
    python benchmarks/memory.py start --shape 0.6b --tokens 1024 # from the first import on

LoRA rank 32 on every linear layer and the head, cross_entropy on every token. Each figure is from a
process of its own: the largest resident set (VmHWM) during one forward_backward above what is
resident when the model, its adapter and a call of one token are there; and beside it what
tinsmith's plan says of the step. Seconds are of a second such call. `start` is the largest resident
set in all, loading included, and the seconds up to the end of the call of one token.

At the small shape a minute and a half for `tokens --tokens 4096`."""

import argparse
import functools
import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from peers import (
    CLOCKS,
    DTYPES,
    SHAPES,
    alternate,
    checkpoint,
    hf_model,
    parse,
    parser,
    resident_gib,
    seconds_and_peak,
    seconds_of,
)
from report import Report, Table

RANK, MIB = 32, 1 << 20
TOKENS = (256, 512, 1024, 2048, 4096, 8192)
LONGEST = 4096  # tokens of a datum: the context of these models
VOCABULARIES = (4096, 16384, 65536, 151936)
VOCABULARY = 512  # the ids that are drawn from: every shape has them
DATUM = 256  # tokens, where a batch has many
PEAK = "MiB above the model"


# ---- one side, as a child ----


def ours(args: argparse.Namespace) -> tuple[Callable[[int, int], object], float]:
    """A call of forward_backward on datums × length tokens, and the plan's MiB."""
    from tinsmith import _core
    from tinsmith.models import registry

    core = registry.load_model(args.folder, dtype=DTYPES[args.dtype], threads=args.threads).core
    adapter = _core.Adapter(core, rank=RANK, step_bytes=args.step_bytes)
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

    torch.set_num_threads(args.threads)
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


SIDES = {"tinsmith": ours, "HF + PEFT": peft}
OURS = next(iter(SIDES))


def child(args: argparse.Namespace) -> list[float]:
    """One side's figures: MiB of a step above the loaded model, the plan's, seconds of a step;
    seconds from the first import to the first token, GiB in all."""
    clock = CLOCKS[args.clock][1]
    begin = clock()
    call, planned = SIDES[args.side](args)
    call(1, 1)
    ready, loaded, loading = clock() - begin, resident_gib(), resident_gib("VmHWM")
    step = functools.partial(call, args.datums, args.length)
    _, peak = seconds_and_peak(step, args.clock)
    return [1024 * peak, planned, seconds_of(step, clock), ready, max(loading, loaded + peak)]


def ask(
    folder: Path, datums: int, length: int, side: str = OURS, step_bytes: int = 0
) -> list[float]:
    """The figures of a child; NaN where it was killed for want of memory."""
    options = {"side": side, "folder": folder, "datums": datums, "length": length}
    words = [str(w) for name, value in options.items() for w in (f"--{name}", value)]
    command = [sys.executable, __file__, *sys.argv[1:], *words, "--step-bytes", str(step_bytes)]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode == 0:
        return json.loads(answer.stdout.splitlines()[-1])
    if answer.returncode != -signal.SIGKILL:
        raise RuntimeError(answer.stderr)
    return [math.nan] * 5


def medians(calls: dict[str, Callable[[], list[float]]], rounds: int) -> dict[str, list[float]]:
    """Each child's figures, NaN where it was killed in a round."""
    found = alternate(calls, rounds, lambda call: call(), warm_up=False)
    return {name: np.median(rows, axis=0).tolist() for name, rows in found.items()}


# ---- what is measured ----


def table_of(report: Report, what: str, case: str) -> Table:
    """A table of peaks."""
    args = report.args
    columns = {PEAK: ".0f", "MiB planned": ".0f", args.unit: ".2f"}
    return report.table(f"{what}, {args.shape} {args.dtype}", case, columns, plot=PEAK)


def both(
    table: Table, case: int, args: argparse.Namespace, folder: Path, datums: int, length: int
) -> None:
    """A case of both sides, transformers' up to --peer-tokens alone."""
    sides = SIDES if datums * length <= args.peer_tokens else (OURS,)
    calls = {side: functools.partial(ask, folder, datums, length, side) for side in sides}
    table.add(case, {side: row[:3] for side, row in medians(calls, args.rounds).items()})


def tokens(report: Report) -> None:
    """Against the tokens of a batch of datums of 256."""
    args = report.args
    table = table_of(report, f"Peak of a batch of datums of {DATUM} tokens", "tokens")
    with checkpoint(hf_model(args.shape, args.dtype)) as folder:
        for count in TOKENS:
            if count <= args.tokens:
                both(table, count, args, folder, count // DATUM, DATUM)


def length(report: Report) -> None:
    """Against the tokens of one datum."""
    args = report.args
    table = table_of(report, "Peak of one datum", "tokens of the datum")
    with checkpoint(hf_model(args.shape, args.dtype)) as folder:
        for count in TOKENS:
            if count <= min(args.tokens, LONGEST):
                both(table, count, args, folder, 1, count)


def vocab(report: Report) -> None:
    """Against the vocabulary, at one width."""
    args = report.args
    total = min(args.tokens, 1024)
    table = table_of(report, f"Peak of {total} tokens", "vocabulary")
    for size in VOCABULARIES:
        SHAPES["one"] = SHAPES[args.shape] | {"vocab_size": size}
        with checkpoint(hf_model("one", args.dtype)) as folder:
            both(table, size, args, folder, total // DATUM, DATUM)


def keep(report: Report) -> None:
    """One datum with everything kept, with less, and with as little as can be."""
    from tinsmith.models import registry

    args = report.args
    count = min(args.tokens, LONGEST)
    table = table_of(report, "Layers kept whole / attention kept", "tokens of the datum")
    calls: dict[str, Callable[[], list[float]]] = {}
    with checkpoint(hf_model(args.shape, args.dtype)) as folder:
        core = registry.load_model(folder, dtype=DTYPES[args.dtype], threads=args.threads).core
        plan = functools.partial(core.plan, RANK, count)
        least, most = plan(1)["step"], plan(1 << 60)["step"]
        for part in (4, 3, 2, 1, 0):
            limit = least + (most - least) * part // 4
            kept = plan(limit)
            name = f"{kept['kept']} / {kept['attention_kept']}"
            calls[name] = functools.partial(ask, folder, 1, count, step_bytes=limit)
        del core, plan
        table.add(count, {name: row[:3] for name, row in medians(calls, args.rounds).items()})


def start(report: Report) -> None:
    """From the first import to the first token, and the largest resident set in all."""
    args = report.args
    count = min(args.tokens, LONGEST)
    columns = {"GiB in all": ".2f", f"{args.unit} to the first token": ".2f"}
    title = f"From the first import on, {args.shape} {args.dtype}"
    table = report.table(title, "tokens of the datum", columns, plot="GiB in all")
    with checkpoint(hf_model(args.shape, args.dtype)) as folder:
        calls = {side: functools.partial(ask, folder, 1, count, side) for side in SIDES}
        found = medians(calls, args.rounds)
        table.add(count, {side: (most, ready) for side, (*_, ready, most) in found.items()})


KINDS = {"tokens": tokens, "length": length, "vocab": vocab, "keep": keep, "start": start}


def main() -> None:
    """A table for each kind that is asked for."""
    options = parser(__doc__, rounds=1, shape="small", dtype="f32")
    add = options.add_argument
    add("kinds", nargs="+", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    add("--tokens", type=int, default=8192, help="at most, or of the one datum")
    add("--peer-tokens", type=int, default=8192, help="the most for transformers")
    kinds: dict[str, Any] = {"side": str, "folder": Path, "datums": int, "length": int}
    for name, kind in (kinds | {"step-bytes": int}).items():
        add(f"--{name}", type=kind, help=argparse.SUPPRESS)
    args = parse(options)
    if args.side:
        print(json.dumps(child(args)))
        return
    with Report(args, __doc__, roofline=False) as report:
        for kind in args.kinds:
            KINDS[kind](report)


if __name__ == "__main__":
    main()
