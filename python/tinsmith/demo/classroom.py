"""The lessons of `tinsmith demo --images`: a model that sees, held-out pictures that it is asked
about, and trainings of LoRA on its text layers with pictures and names.

Its tower stays as it is: a picture's rows are computed once, in the first epoch.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tinsmith.demo.fashion import NAMES, NEW, Pictures

if TYPE_CHECKING:
    import tinsmith

MODEL = Path(__file__).parent / "seeing_model"
BATCH, RANK, MAX_TOKENS = 48, 16, 24
CHECKED = 64  # answers whose log-probabilities are compared
# The question and the answer of the cookbook's vlm_classifier.
QUESTION = "What is the name of the subject in this photo?"
ANSWER = "The subject in this photo is: "


def prompt_texts(question: str) -> tuple[str, str]:
    """A prompt's text before and after its picture, as the renderer qwen3_5_disable_thinking and
    the model's chat template write it."""
    after = f"{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    return "<|im_start|>user\n<|vision_start|>", f"<|vision_end|>{after}"


def answer_text(name: str) -> str:
    """The right answer for a class."""
    return f"{ANSWER}{name}<|im_end|>"


@dataclass(frozen=True)
class Answers:
    """What a model says of pictures: a class's name, or any other text."""

    said: Sequence[str]
    names: Sequence[str]

    def share(self, classes: Sequence[str]) -> float:
        """The share of right answers to pictures of some classes."""
        right = [
            said == name
            for said, name in zip(self.said, self.names, strict=True)
            if name in classes
        ]
        return sum(right) / len(right)

    def dealt(self, seed: int) -> "Answers":
        """The same answers, each to another picture."""
        order = list(range(len(self.said)))
        random.Random(f"dealt-{seed}").shuffle(order)
        return Answers([self.said[place] for place in order], self.names)


@dataclass(frozen=True)
class Lesson:
    """A training: the loss of each step in nats a picture, the share of the new classes' held-out
    pictures that was named right after each epoch, what was said of all held-out pictures at the
    end, and how many pictures went through the tower in each epoch."""

    adapter: "tinsmith.Adapter"
    losses: Sequence[float]
    shares: Sequence[float]
    answers: Answers
    seen: Sequence[int]


class Classroom:
    """The model, its tokenizer, and the pictures as the model takes them."""

    def __init__(self, model: "tinsmith.Model", train: Pictures, test: Pictures):
        self.model, self.train, self.test = model, train, test
        self.before, self.after = (
            model.tokenizer.encode(text, add_special_tokens=False)
            for text in prompt_texts(QUESTION)
        )
        self.train_prompts, self.test_prompts = self._prompts(train), self._prompts(test)

    def _prompts(self, pictures: Pictures) -> list[list[Any]]:
        return [[*self.before, self.model.image(file), *self.after] for file in pictures.files()]

    def _rows(self, prompt: Sequence[Any]) -> int:
        """How many rows a prompt has; its picture has several."""
        return len(prompt) - 1 + len(prompt[len(self.before)])

    def ask(self, adapter: "tinsmith.Adapter | None", among: Sequence[str]) -> Answers:
        """What a model says of the held-out pictures of some classes, greedily."""
        places = [place for place, name in enumerate(self.test.names) if name in among]
        drawn = self.model.sampler().sample(
            [self.test_prompts[place] for place in places],
            adapter=adapter,
            max_tokens=MAX_TOKENS,
            temperature=0.0,
        )
        texts = [self.model.tokenizer.decode(one.tokens) for [one] in drawn]
        said = [text.removeprefix(ANSWER).removesuffix("<|im_end|>") for text in texts]
        return Answers(said, [self.test.names[place] for place in places])

    def datum(self, place: int, name: str) -> tuple[list[Any], np.ndarray, np.ndarray]:
        """Tokens, targets and weights of a training picture and its name."""
        answer = self.model.tokenizer.encode(answer_text(name), add_special_tokens=False)
        prompt = self.train_prompts[place]
        rows = self._rows(prompt)
        targets = np.zeros(rows + len(answer) - 1, np.int32)  # 0 at rows without a weight
        targets[rows - 1 :] = answer
        weights = np.zeros(len(targets), np.float32)
        weights[rows - 1 :] = 1
        return [*prompt, *answer[:-1]], targets, weights

    def teach(self, names: Sequence[str], steps: int, rate: float, seed: int) -> Lesson:
        """Trains a new adapter on the training pictures with these names, epoch by epoch."""
        adapter = self.model.lora(rank=RANK, seed=seed)
        rng, order = random.Random(f"order-{seed}"), list[int]()
        losses: list[float] = []
        shares = [self.ask(None, NEW).share(NEW)]
        seen, count = list[int](), self.model.core.tower_images
        for step in range(steps):
            if len(order) < BATCH:  # an epoch's end
                order = rng.sample(range(len(names)), len(names))
            chosen, order = order[:BATCH], order[BATCH:]
            tokens, targets, weights = zip(
                *(self.datum(place, names[place]) for place in chosen), strict=True
            )
            share = 1 / len(chosen)
            out = adapter.forward_backward(
                list(tokens), list(targets), [share * one for one in weights]
            )
            # The rate falls to a tenth: the last steps settle what the first have found.
            adapter.optim_step(learning_rate=rate * (1 - 0.9 * step / steps))
            losses.append(out.loss)
            if len(order) < BATCH or step + 1 == steps:
                seen.append(self.model.core.tower_images - count)
                shares.append(self.ask(adapter, NEW).share(NEW))
                count = self.model.core.tower_images
        return Lesson(adapter, losses, shares, self.ask(adapter, NAMES), seen)

    def difference(self, adapter: "tinsmith.Adapter", seed: int) -> tuple[float, int]:
        """The largest difference between a sampled token's log-probability and the trainer's, over
        answers to held-out pictures, and how many tokens these have."""
        prompts = self.test_prompts[:: max(1, len(self.test_prompts) // CHECKED)]
        drawn = self.model.sampler().sample(
            prompts, adapter=adapter, max_tokens=MAX_TOKENS, seed=seed
        )
        found = []
        for prompt, [one] in zip(prompts, drawn, strict=True):
            rows = self._rows(prompt)
            targets = np.concatenate([np.zeros(rows - 1, np.int32), one.tokens])
            scored = adapter.forward([*prompt, *one.tokens[:-1]], targets, keep=False)
            found.append(scored[rows - 1 :] - one.logprobs)
        differences = np.abs(np.concatenate(found))
        return float(differences.max()), len(differences)
