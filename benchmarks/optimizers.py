"""Dimuon beside AdamW: the loss after some steps of SFT, over learning rates and ranks.

    python benchmarks/optimizers.py --rounds 3 --plot optimizers.svg

The demonstration's model learns the demonstration's answers (SFT), 8 of them a step. Then it
predicts answers to questions that were not among them: the loss is the mean over the answers'
tokens. The rates are some times 0.02 for Dimuon and 0.002 for AdamW, with Tinker's other defaults.
Rounds are seeds of the questions' order, and a row has the geometric mean of their losses. Five CPU
minutes with three rounds and two ranks."""

import random
import statistics

import tinsmith
from peers import parse, parser
from report import Report
from tinsmith.demo import data, demo
from tinsmith.demo.make_model import prompt_text

RATES = {"dimuon": 0.02, "adamw": 0.002}
BATCH, KNOWN, HELD = 8, 320, 80
Pair = tuple[list[int], list[int], list[float]]  # tokens, targets, weights


def pairs_of(model: tinsmith.Model) -> list[Pair]:
    """Questions with their answers; only these have weights."""
    found = []
    examples = data.sdft_examples(KNOWN + HELD, 3)
    columns = data.dataset_columns(examples)
    for question, answer in zip(columns["prompt"], columns["golden_response"], strict=True):
        prompt = list(model.tokenizer.encode(prompt_text(question)))
        reply = list(model.tokenizer.encode(f"{answer}<|im_end|>"))
        weights = [0.0] * (len(prompt) - 1) + [1.0] * len(reply)
        found.append(((prompt + reply)[:-1], (prompt + reply)[1:], weights))
    return found


def loss_of(adapter: tinsmith.Adapter, pairs: list[Pair]) -> float:
    """The loss of a token; gradients are added to those that are there."""
    tokens, targets, weights = (list(column) for column in zip(*pairs, strict=True))
    total = adapter.forward_backward(tokens, targets, weights=weights).loss
    return total / sum(map(sum, weights))


def held_loss(
    model: tinsmith.Model, pairs: list[Pair], optimizer: str, rate: float, rank: int, steps: int,
    seed: int,
) -> float:  # fmt: skip
    """What a run has learned."""
    adapter = model.lora(rank=rank, seed=seed, optimizer=optimizer)
    rng = random.Random(seed)
    for _ in range(steps):
        loss_of(adapter, rng.sample(pairs[:KNOWN], BATCH))
        adapter.optim_step(rate, grad_accumulation_normalization="num_loss_tokens")
    return loss_of(adapter, pairs[KNOWN:])


def main() -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--steps", type=int, default=30, help="30 if not given")
    options.add_argument("--ranks", type=int, nargs="+", default=[4, 32], help="4 32 if not given")
    options.add_argument("--times", type=float, nargs="+", default=[0.25, 0.5, 1, 2, 4])
    args = parse(options)
    args.said = f"means of {args.rounds} seeds"
    with (
        tinsmith.Model(demo.MODEL, device="cpu", threads=args.threads) as model,
        Report(args, __doc__, roofline=False) as report,
    ):
        pairs = pairs_of(model)
        first = loss_of(model.lora(rank=1), pairs[KNOWN:])
        report.note(f"before training: {first:.3f}")
        for rank in args.ranks:
            title = f"rank {rank}, {args.steps} steps"
            table = report.table(title, "times the rate", {"loss": ".4f"}, plot="loss")
            for times in args.times:
                sides = {}
                for optimizer, rate in RATES.items():
                    setting = optimizer, rate * times, rank, args.steps
                    losses = [
                        held_loss(model, pairs, *setting, seed) for seed in range(args.rounds)
                    ]
                    sides[optimizer] = statistics.geometric_mean(losses)
                table.add(times, sides)


if __name__ == "__main__":
    main()
