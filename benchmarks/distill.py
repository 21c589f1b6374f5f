"""An OPSD step beside transformers + PEFT with OPSD's loss: CPU seconds and memory, in one run.

    python benchmarks/distill.py --plot distill.svg

The step: the teacher (the base model) reads prompt, hint and completion, the student prompt and
completion, and the generalized Jensen-Shannon divergence over the whole vocabulary goes back
through LoRA of rank 32 on every linear layer and the head. torch's side is OPSD's loss
(tests/support/opsd_reference.py) on full logits, in eager mode. Seconds: both sides interleaved in
one process, the median. Memory: each side in a process of its own, its largest resident set less
that before the step.

A minute and 5 GiB at the shape and sizes it has by default."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from peers import (
    SHAPES,
    checkpoint,
    forget_peak,
    hf_model,
    interleave,
    parse,
    parser,
    resident_gib,
)
from report import Report

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support import opsd_reference

RANK, BETA = 32, 0.5


def sequences(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of student and teacher, (datums, N + 1) and (datums, M)."""
    rng, vocab = np.random.default_rng(0), SHAPES[args.shape]["vocab_size"]
    student = rng.integers(0, vocab, (args.datums, args.prompt + args.completion))
    hint = rng.integers(0, vocab, (args.datums, args.hint))
    return student.astype(np.int32), np.concatenate([hint, student], axis=1).astype(np.int32)


def ours(folder: Path, args: argparse.Namespace) -> Callable[[], float]:
    """A call that makes the step's gradient in the engine."""
    from tinsmith import _core
    from tinsmith.models import registry

    adapter = _core.Adapter(
        registry.load_model(folder, dtype="float32", threads=args.threads).core, rank=RANK
    )
    student, teacher = sequences(args)
    weights = np.zeros((args.datums, student.shape[1] - 1), np.float32)
    weights[:, args.prompt - 1 :] = 1 / (args.datums * args.completion)

    def run() -> float:
        _, _, loss = adapter.distill(
            student[:, :-1].ravel(),
            np.full(args.datums, student.shape[1] - 1, np.int32),
            student[:, 1:].ravel(),
            np.ones(args.datums, np.int32),
            "generalized_jsd",
            {"weights": weights.ravel()},
            {"beta": BETA},
            teacher.ravel(),
            np.full(args.datums, teacher.shape[1], np.int32),
        )
        adapter.clear_gradients()
        return loss

    return run


def torchs(folder: Path, args: argparse.Namespace) -> Callable[[], float]:
    """The same with transformers and PEFT; the teacher is the model without its adapter."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=32, target_modules=names))
    student, teacher = (torch.from_numpy(ids[:, :-1]).long() for ids in sequences(args))

    def run() -> float:
        model.zero_grad(set_to_none=True)
        logits = model(input_ids=student, use_cache=False).logits[:, args.prompt - 1 :]
        with torch.no_grad(), model.disable_adapter():
            taught = model(input_ids=teacher, use_cache=False).logits
        taught = taught[:, args.hint + args.prompt - 1 :].flatten(0, 1)
        loss = opsd_reference.generalized_jsd_loss(logits.flatten(0, 1), taught, beta=BETA)
        loss.backward()
        return float(loss.detach())

    return run


SIDES = {"tinsmith": ours, "torch": torchs}


def step_gib(run: Callable[[], float]) -> tuple[float, float]:
    """How far the resident set rises in a step, and the loss."""
    forget_peak()
    before = resident_gib()
    loss = run()
    return resident_gib("VmHWM") - before, loss


def child(name: str, folder: Path) -> list[float]:
    """A side's memory and loss in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:]]
    command += ["--side", name, "--folder", str(folder)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(answer.splitlines()[-1])


def main() -> None:
    """One case, a row a side."""
    options = parser(__doc__, rounds=3, shape="small-qwen")
    add = options.add_argument
    for name, default in (("datums", 4), ("prompt", 64), ("hint", 64), ("completion", 128)):
        add(f"--{name}", type=int, default=default)
    add("--side", choices=SIDES, help=argparse.SUPPRESS)
    add("--folder", type=Path, help=argparse.SUPPRESS)
    args = parse(options)
    if args.side:
        print(json.dumps(step_gib(SIDES[args.side](args.folder, args))))
        return
    with Report(args, __doc__, roofline=False) as report:
        title = f"An OPSD step, {args.shape} f32, hint {args.hint}"
        columns = {args.unit: ".2f", "GiB above the model": ".2f", "loss": ".6f"}
        table = report.table(title, "datums × (prompt + completion)", columns)
        with checkpoint(hf_model(args.shape, "f32")) as folder:
            calls = {name: side(folder, args) for name, side in SIDES.items()}
            seconds = interleave(calls, args.rounds, clock=args.clock)
            case = f"{args.datums} × ({args.prompt} + {args.completion})"
            table.add(case, {name: (seconds[name], *child(name, folder)) for name in SIDES})


if __name__ == "__main__":
    main()
