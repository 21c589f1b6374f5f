"""Reward on stale data: stable_reinforce beside importance_sampling.

    python benchmarks/off_policy.py --plot off_policy.svg

An asynchronous run, as the cookbook's with max_steps_off_policy: a step trains on the groups that
were sampled so many optimizer steps ago, always. The reward of an answer is 1 where it is the right
call, and 0.5 where it names the right tool; an advantage is the reward less its group's mean. Both
losses see the same questions, learning rate and seeds. A row has what the answers that the weights
of that step sample lack of a reward of 1, and the divergence of the weights that are trained from
those that had sampled the step's data: the mean over tokens of Schulman's estimator k3. Where a
step's result is not finite it is refused, and the weights stay; the last lines say how often, and
what each seed misses over the last quarter.

Rounds are seeds, and a row is their mean, of some steps together. Two CPU minutes with three
rounds."""

import argparse
import random
import statistics
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import tinsmith
from peers import parse, parser
from report import Report
from tinsmith.demo import data, demo, trainings

OURS = "stable_reinforce"
LOSSES = (OURS, "importance_sampling")


def reward_of(text: str, golden: str) -> float:
    """1 for the golden call, 0.5 for another one of its tool."""
    call, wanted = data.parse_answer(text), data.parse_answer(golden)
    if call is None or wanted is None:
        return 0.0
    return 1.0 if call == wanted else 0.5 * (call[0] == wanted[0])


def datum_of(prompt: tinker.ModelInput, sequence: Any, advantage: float) -> tinker.Datum:
    """An answer as the cookbook's rl_loop makes a datum of it."""
    before, count, name = prompt.length - 1, len(sequence.tokens), sequence.sequence_id
    inputs = {
        "target_tokens": np.asarray([0] * before + sequence.tokens, np.int64),
        "logprobs": np.asarray([0.0] * before + sequence.logprobs, np.float32),
        "advantages": np.asarray([0.0] * before + [advantage] * count, np.float32),
    }
    chunk = tinker.EncodedTextChunk(tokens=sequence.tokens[:-1])
    datum = tinker.Datum(model_input=prompt.append(chunk), loss_fn_inputs=inputs)
    return datum.with_provenance(
        model_input=[
            tinker.PromptProvenanceSpan(sequence_id=name, length=before + 1),
            tinker.SampledProvenanceSpan(sequence_id=name, length=count - 1),
        ],
        loss_fn_inputs=[
            tinker.PromptProvenanceSpan(sequence_id=name, offset=1, length=before),
            tinker.SampledProvenanceSpan(sequence_id=name, length=count),
        ],
    )


class Task:
    """Questions of the demonstration, and what an answer to them is worth."""

    def __init__(self) -> None:
        from tinker_cookbook.renderers import get_renderer
        from tinker_cookbook.tokenizer_utils import get_tokenizer

        self.tokenizer = get_tokenizer(str(demo.MODEL))
        self.renderer = get_renderer(demo.RENDERER, self.tokenizer)

    def groups(
        self, sampler: Any, examples: Sequence[data.Example], args: argparse.Namespace, seed: int
    ) -> tuple[list[tinker.Datum], float]:
        """The datums of a step's groups, and the mean reward."""
        params = tinker.SamplingParams(
            max_tokens=trainings.MAX_TOKENS + 8, seed=seed, stop=self.renderer.get_stop_sequences()
        )
        asked = []
        for example in examples:
            message = {"role": "user", "content": example.question}
            prompt = self.renderer.build_generation_prompt([message])
            asked.append((example, prompt, sampler.sample(prompt, args.group_size, params)))
        datums, rewards = [], []
        for example, prompt, future in asked:
            sequences = future.result().sequences
            texts = self.tokenizer.batch_decode(
                [sequence.tokens for sequence in sequences], skip_special_tokens=True
            )
            values = [reward_of(text, example.answer) for text in texts]
            mean = statistics.mean(values)
            rewards += values
            for sequence, value in zip(sequences, values, strict=True):
                if value != mean and len(sequence.tokens) > 1:
                    datums.append(datum_of(prompt, sequence, value - mean))
        return datums, statistics.mean(rewards)


def run(
    service: Any, task: Task, loss: str, seed: int, args: argparse.Namespace
) -> Iterator[tuple[float, float, bool]]:
    """Of each step: the reward, the divergence of what it trains on, and whether it was refused."""
    client = service.create_lora_training_client(
        str(demo.MODEL), rank=trainings.RANK, seed=seed
    ).result()
    questions = data.sdft_examples(args.steps * args.groups, seed)
    random.Random(seed).shuffle(questions)
    waiting: deque[list[tinker.Datum]] = deque()
    config = {"kl_coeff": args.kl_coeff} if args.kl_coeff is not None and loss == OURS else None
    adam = tinker.AdamParams(learning_rate=args.learning_rate, eps=1e-8)
    for step in range(args.steps):
        sampler = client.save_weights_and_get_sampling_client(record_stability_info=True).result()
        batch = questions[step * args.groups : (step + 1) * args.groups]
        datums, reward = task.groups(sampler, batch, args, seed * args.steps + step)
        waiting.append(datums)
        divergence, refused = 0.0, False
        if len(waiting) > args.stale and (due := waiting.popleft()):
            try:
                found = client.forward_backward(due, loss, config).result()
                client.optim_step(adam).result()
                divergence = off_policy(due, found)
            except tinker.RequestFailedError:
                refused = True
        yield reward, divergence, refused


def off_policy(datums: Sequence[tinker.Datum], found: Any) -> float:
    """The mean of exp(gap) - 1 - gap over all sampled tokens; gap: learner's less sampler's."""
    gaps = []
    for datum, output in zip(datums, found.loss_fn_outputs, strict=True):
        inputs = datum.loss_fn_inputs
        live = inputs["advantages"].to_numpy() != 0
        gap = output["logprobs"].to_numpy().astype(np.float64) - inputs["logprobs"].to_numpy()
        gaps.append(np.minimum(gap, 300)[live])
    flat = np.concatenate(gaps)
    return float(np.mean(np.expm1(flat) - flat))


def main() -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--steps", type=int, default=60, help="60 if not given")
    options.add_argument("--groups", type=int, default=8, help="of a step; 8 if not given")
    options.add_argument("--group-size", type=int, default=8, help="8 if not given")
    options.add_argument("--stale", type=int, default=8, help="steps; 8 if not given")
    options.add_argument("--learning-rate", type=float, default=4e-3, help="4e-3 if not given")
    options.add_argument("--kl-coeff", type=float, help="stable_reinforce's, if not its default")
    options.add_argument("--losses", nargs="+", choices=LOSSES, default=LOSSES)
    args = parse(options)
    args.said = f"means of {args.rounds} seeds"
    task, found = Task(), {loss: [] for loss in LOSSES}
    with tempfile.TemporaryDirectory() as folder, Report(args, __doc__, roofline=False) as report:
        title = f"{args.stale} steps stale, learning rate {args.learning_rate:g}"
        with tinsmith.serve(
            demo.MODEL, checkpoints=Path(folder), threads=args.threads, seed=0
        ) as backend:
            for seed in range(args.rounds):
                for loss in args.losses:
                    with backend.service_client() as service:
                        found[loss].append(list(run(service, task, loss, seed, args)))
        columns = {"missed reward": ".3f", "divergence": ".3g"}
        table = report.table(title, "step", columns, plot="missed reward")
        every = max(1, args.steps // 12)
        for step in range(0, args.steps, every):
            sides = {}
            for loss in args.losses:
                part = [row for rows in found[loss] for row in rows[step : step + every]]
                missed = 1 - statistics.mean(row[0] for row in part)
                sides[loss] = (missed, statistics.mean(row[1] for row in part))
            table.add(step, sides)
        for loss in args.losses:
            refused = sum(row[2] for rows in found[loss] for row in rows)
            ends = [
                1 - statistics.mean(row[0] for row in rows[-max(1, args.steps // 4) :])
                for rows in found[loss]
            ]
            report.note(
                f"{loss}: {refused} steps refused; over the last quarter the seeds miss "
                f"{', '.join(format(end, '.3f') for end in sorted(ends))}"
            )


if __name__ == "__main__":
    main()
