"""An OPSD step beside transformers + PEFT with OPSD's loss: CPU seconds and memory, in one run.

    python benchmarks/distill.py --shape small-qwen --datums 4 --completion 128

The step: the teacher (the base model) reads prompt, hint and completion, the student prompt and
completion, and the generalized Jensen-Shannon divergence over the whole vocabulary goes back
through LoRA of rank 32 on every linear layer and the head. torch's side is OPSD's loss on full
logits, in eager mode. Seconds: both sides interleaved in one process, the median. Memory: each side
in a process of its own, its largest resident set less that before the step."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from peers import SHAPES, checkpoint, hf_model, interleave

RANK, BETA = 32, 0.5


def parser() -> argparse.ArgumentParser:
    """The command line, of the run and of its children."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--shape", choices=SHAPES, default="small-qwen")
    options.add_argument("--datums", type=int, default=4)
    options.add_argument("--prompt", type=int, default=64)
    options.add_argument("--hint", type=int, default=64)
    options.add_argument("--completion", type=int, default=128)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--side", choices=("tinsmith", "torch"), help="one side, as a child")
    options.add_argument("--folder", type=Path)
    return options


def sequences(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of student and teacher, (datums, N + 1) and (datums, M)."""
    rng, vocab = np.random.default_rng(0), SHAPES[args.shape]["vocab_size"]
    student = rng.integers(0, vocab, (args.datums, args.prompt + args.completion))
    hint = rng.integers(0, vocab, (args.datums, args.hint))
    return student.astype(np.int32), np.concatenate([hint, student], axis=1).astype(np.int32)


def ours(folder: Path, args: argparse.Namespace) -> Callable[[], float]:
    """A call that makes the step's gradient in the engine."""
    from tinsmith import _core, families

    adapter = _core.Adapter(families.load_model(folder, threads=1).core, rank=RANK)
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


def generalized_jsd(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """OPSD's loss for 0 < beta < 1: the mean over rows."""
    p, q = torch.log_softmax(student, -1), torch.log_softmax(teacher, -1)
    beta = torch.tensor(BETA)
    mixture = torch.logsumexp(torch.stack([p + torch.log1p(-beta), q + torch.log(beta)]), dim=0)
    kl = torch.nn.functional.kl_div
    of_teacher = kl(mixture, q, reduction="none", log_target=True)
    of_student = kl(mixture, p, reduction="none", log_target=True)
    jsd = beta * of_teacher + (1 - beta) * of_student
    return jsd.sum() / (jsd.shape[0] * jsd.shape[1])


def torchs(folder: Path, args: argparse.Namespace) -> Callable[[], float]:
    """The same with transformers and PEFT; the teacher is the model without its adapter."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=32, target_modules=names))
    student, teacher = (torch.from_numpy(ids[:, :-1]).long() for ids in sequences(args))

    def run() -> float:
        model.zero_grad(set_to_none=True)
        logits = model(input_ids=student, use_cache=False).logits[:, args.prompt - 1 :]
        with torch.no_grad(), model.disable_adapter():
            taught = model(input_ids=teacher, use_cache=False).logits
        loss = generalized_jsd(logits, taught[:, args.hint + args.prompt - 1 :])
        loss.backward()
        return float(loss.detach())

    return run


SIDES = {"tinsmith": ours, "torch": torchs}


def step_mib(run: Callable[[], float]) -> tuple[float, float]:
    """How far the resident set rises in a step (its mark is set back first), and the loss."""

    def resident(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key))

    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    loss = run()
    return (resident("VmHWM") - before) / 1024, loss


def main() -> None:
    """Prints both sides' seconds, memory and loss, and the ratios."""
    args = parser().parse_args()
    if args.side:
        peak, loss = step_mib(SIDES[args.side](args.folder, args))
        print(json.dumps({"peak_mib": peak, "loss": loss}))
        return
    with checkpoint(hf_model(args.shape, "f32")) as folder:
        calls = {name: side(folder, args) for name, side in SIDES.items()}
        seconds = interleave(calls, args.rounds)
        found = {}
        for name in SIDES:
            child = ["--side", name, "--folder", str(folder)]
            command = [sys.executable, __file__, *sys.argv[1:], *child]
            answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[name] = json.loads(answer.splitlines()[-1])
    print(f"{args.shape}, {args.datums} x ({args.prompt} + {args.completion}), hint {args.hint}")
    for name in SIDES:
        one = found[name]
        memory = f"{one['peak_mib'] / 1024:6.2f} GiB above the model"
        print(f"{name:9} {seconds[name]:8.2f} cpu-s {memory}  loss {one['loss']:.6f}")
    time = seconds["torch"] / seconds["tinsmith"]
    memory = found["torch"]["peak_mib"] / found["tinsmith"]["peak_mib"]
    print(f"ratio {time:.2f} in time, {memory:.1f} in memory")


if __name__ == "__main__":
    main()
