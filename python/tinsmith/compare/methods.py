"""The methods, a row of METHODS each: its settings, and how a batch of questions becomes datums.

All take the same questions in the same order, one answer to each, and AdamW with the cookbook's
betas. They differ in whose tokens are trained on, and in what their targets are. Where there is a
teacher, it is the base model that has read the answer, in the prompt of the cookbook's SDFT recipe.
"""

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tinsmith.compare.data import Record

if TYPE_CHECKING:
    import tinker

    from tinsmith.compare.prompts import Prompts

Value = int | float


@dataclass(frozen=True)
class Setting:
    """A number that a method has of its own: its default, its bounds (allowed themselves), and what
    it is. A default without a point wants a whole number."""

    default: Value
    least: Value
    most: Value
    help: str

    def read(self, text: str) -> Value:
        """The value that a text gives. ValueError with the end of a sentence if it is none."""
        kind = "number" if isinstance(self.default, float) else "whole number"
        try:
            value = type(self.default)(text)
        except ValueError:
            value = None
        if value is None or not self.least <= value <= self.most:
            raise ValueError(
                f"it should be a {kind} from {self.least:g} to {self.most:g}; {text!r:.60} came"
            )
        return value


@dataclass(frozen=True)
class Student:
    """What a method works with in a step: the student's sampler and the teacher's (the base
    model's), prompts, the longest answer in tokens, and a text that is the run's seed and step."""

    sampler: "tinker.SamplingClient"
    base: "tinker.SamplingClient"
    prompts: "Prompts"
    max_tokens: int
    draw: str

    def answers(self, records: Sequence[Record], temperature: float) -> list[list[int]]:
        """An answer to each question, its tokens, all asked at once."""
        futures = [
            self.sampler.sample(
                self.prompts.student(record),
                1,
                self.prompts.sampling(
                    self.max_tokens, temperature=temperature, seed=seed_of(self.draw, index)
                ),
            )
            for index, record in enumerate(records)
        ]
        return [list(future.result().sequences[0].tokens) for future in futures]


@dataclass(frozen=True)
class Batch:
    """What goes to forward_backward. Without datums there is no step."""

    data: "list[tinker.Datum]"
    loss_fn: str = "cross_entropy"
    loss_fn_config: dict[str, Any] | None = None
    grad_clip_norm: float = 0.0


Settings = Mapping[str, Value]


@dataclass(frozen=True)
class Method:
    """A row of METHODS. on_policy: whether it trains on answers that the student draws."""

    title: str
    help: str
    on_policy: bool
    batch: Callable[[Student, Settings, Sequence[Record]], Batch]
    settings: Mapping[str, Setting]


def seed_of(*parts: object) -> int:
    """A seed for a request, which is the same wherever and whenever it is asked."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1


def with_settings(names: Sequence[str], changes: Sequence[str]) -> dict[str, dict[str, Value]]:
    """Each method's settings: its defaults, and the changes, METHOD.SETTING=VALUE each.

    Raises ValueError with a sentence for a change that is none.

        with_settings(["sdft"], ["sdft.topk=50"])["sdft"]["topk"]
    """
    found = {
        name: {key: setting.default for key, setting in METHODS[name].settings.items()}
        for name in names
    }
    for change in changes:
        target, equals, text = change.partition("=")
        name, _, key = target.partition(".")
        if not equals or name not in found or key not in METHODS[name].settings:
            known = [f"{name}.{key}" for name in found for key in METHODS[name].settings]
            has = f"these methods have {', '.join(known)}" if known else "these methods have none"
            raise ValueError(f"--set {change!r:.80} names no setting: {has}")
        try:
            found[name][key] = METHODS[name].settings[key].read(text)
        except ValueError as error:
            raise ValueError(f"--set {target}: {error}") from None
    return found


# ---- the methods ----


def _sft(student: Student, settings: Settings, records: Sequence[Record]) -> Batch:
    """The file's answers; each example's weights sum to 1, as in the cookbook."""
    return Batch([student.prompts.supervised_datum(record) for record in records])


def _sdft(student: Student, settings: Settings, records: Sequence[Record]) -> Batch:
    """Cross-entropy to the teacher's likeliest tokens, at each token of the student's answers, by
    the cookbook's own function. It puts no loss on the first tokens of an answer."""
    from tinker_cookbook.distillation.sdft import build_topk_distillation_datums

    pairs = _answered(student, records, settings["temperature"])
    rollouts = [_rollout(student.prompts.student(record), answer) for record, answer in pairs]
    if not rollouts:
        return Batch([])
    data, _ = asyncio.run(
        build_topk_distillation_datums(
            rollouts,
            [{"group_idx": index} for index in range(len(rollouts))],
            student.base,
            [student.prompts.teacher(record) for record, _ in pairs],
            topk=int(settings["topk"]),
            skip_first_n_tokens=int(settings["skip_first_tokens"]),
        )
    )
    return Batch(data)


def _opsd(student: Student, settings: Settings, records: Sequence[Record]) -> Batch:
    """The generalized Jensen-Shannon divergence from the teacher over the whole vocabulary, which
    the server computes: a mean over the tokens of the batch's answers."""
    from tinsmith.recipes.opsd_data import make_datum

    pairs = _answered(student, records, settings["temperature"])
    total = sum(len(answer) for _, answer in pairs)
    prompts = student.prompts
    data = [
        make_datum(
            prompts.student(record).to_ints(),
            prompts.teacher(record).to_ints(),
            answer,
            weight=1 / total,
        )
        for record, answer in pairs
    ]
    config = {
        "teacher": "base",
        "beta": settings["beta"],
        "top_k": int(settings["top_k_loss"]),
        "temperature": settings["temperature_loss"],
    }
    return Batch(data, "generalized_jsd", config, settings["grad_clip_norm"])


def _answered(
    student: Student, records: Sequence[Record], temperature: Value
) -> list[tuple[Record, list[int]]]:
    """The questions with the student's answers, less the empty answers."""
    answers = student.answers(records, float(temperature))
    return [pair for pair in zip(records, answers, strict=True) if pair[1]]


def _rollout(prompt: "tinker.ModelInput", answer: Sequence[int]) -> "tinker.Datum":
    """An answer after its prompt, in the form that the cookbook's function takes: the mask marks
    the answer's tokens among the targets."""
    import tinker

    tokens = [*prompt.to_ints(), *answer]
    mask = np.zeros(len(tokens) - 1, np.float32)
    mask[prompt.length - 1 :] = 1
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.asarray(tokens[1:], np.int64), "mask": mask},
    )


_TEMPERATURE = Setting(1.0, 0.0, 10.0, "of the student's answers")

METHODS = {
    "sft": Method("SFT", "cross-entropy to the file's answers", False, _sft, {}),
    "sdft": Method(
        "SDFT",
        "cross-entropy to the likeliest tokens of a teacher that has read the answer, on the "
        "student's own answers",
        True,
        _sdft,
        {
            "topk": Setting(20, 1, 1000, "of the teacher's tokens that are targets"),
            "skip_first_tokens": Setting(3, 0, 1000, "of an answer, without loss"),
            "temperature": _TEMPERATURE,
        },
    ),
    "opsd": Method(
        "OPSD",
        "divergence from that teacher over the whole vocabulary, on the student's own answers",
        True,
        _opsd,
        {
            "beta": Setting(0.5, 0.0, 1.0, "0: KL(teacher‖student), 1: KL(student‖teacher)"),
            "top_k_loss": Setting(0, 0, 1_000_000, "of the teacher's tokens; 0: all"),
            "temperature_loss": Setting(1.0, 0.01, 100.0, "of both distributions in the loss"),
            "grad_clip_norm": Setting(1.0, 0.0, 1e6, "0: none"),
            "temperature": _TEMPERATURE,
        },
    ),
}
