"""The methods, each a row of METHODS: its settings, and how a batch of questions becomes datums.

All use the same questions in the same order, and AdamW with the cookbook's betas. They differ in
whose tokens are trained on, and in the targets. A teacher is the same model with more in its
prompt. For SDFT and OPSD this is the file's answer, in the words of the cookbook's SDFT recipe. For
SDPO it is a right answer of the student's own, and the feedback on the wrong one: that teacher
never sees the file's answer, which only tells right from wrong.
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
# (text, question) → its score, and the feedback on it ("" for none).
Judge = Callable[[str, Record], tuple[float, str]]


@dataclass(frozen=True)
class Option:
    """A number that is a method's own setting: its default, its inclusive bounds (with `open`, the
    upper is exclusive), and its description. An int default needs whole numbers. ids: whether it
    counts ids of the vocabulary."""

    default: Value
    least: Value
    most: Value
    help: str
    open: bool = False
    ids: bool = False

    def read(self, text: str) -> Value:
        """The value of a text; ValueError with the end of a sentence if it is invalid."""
        kind = "number" if isinstance(self.default, float) else "whole number"
        try:
            value = type(self.default)(text)
        except ValueError:
            value = None
        inside = value is not None and self.least <= value <= self.most
        if value is None or not inside or (self.open and value == self.most):
            to = "to below" if self.open else "to"
            raise ValueError(
                f"it should be a {kind} from {self.least:g} {to} {self.most:g}; {text!r:.60} came"
            )
        return value


@dataclass(frozen=True)
class Student:
    """What a method uses in a step: the student's sampler and the base model's, prompts, the
    longest answer and the model's context in tokens, a judge of answers, and a text with the run's
    seed and step."""

    sampler: "tinker.SamplingClient"
    base: "tinker.SamplingClient"
    prompts: "Prompts"
    max_tokens: int
    context: int
    judge: Judge
    draw: str

    def answers(
        self, records: Sequence[Record], temperature: float, count: int = 1
    ) -> list[list[list[int]]]:
        """`count` answers to each question, as tokens, all requested at once."""
        futures = [
            self.sampler.sample(
                self.prompts.student(record),
                count,
                self.prompts.sampling(
                    self.max_tokens, temperature=temperature, seed=seed_of(self.draw, index)
                ),
            )
            for index, record in enumerate(records)
        ]
        return [[list(one.tokens) for one in future.result().sequences] for future in futures]


@dataclass(frozen=True)
class TrainingBatch:
    """The input of forward_backward. Without datums there is no step."""

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
    batch: Callable[[Student, Settings, Sequence[Record]], TrainingBatch]
    settings: Mapping[str, Option]


def seed_of(*parts: object) -> int:
    """A seed for a request, the same on every machine and at any time."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1


def with_settings(names: Sequence[str], changes: Sequence[str]) -> dict[str, dict[str, Value]]:
    """Each method's settings: its defaults, and the changes, METHOD.SETTING=VALUE each.

    Raises ValueError with a sentence for an invalid change.

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


def check_vocabulary(methods: Mapping[str, Mapping[str, Value]], vocabulary: int) -> None:
    """Raises ValueError if a method's setting needs more ids than the vocabulary has.

    check_vocabulary(with_settings(["sdft"], []), 151936)
    """
    for name, settings in methods.items():
        for key, value in settings.items():
            if METHODS[name].settings[key].ids and value > vocabulary:
                raise ValueError(
                    f"{name}.{key} is {value}, and the model's vocabulary has {vocabulary:,} ids: "
                    f"--set {name}.{key}=N with a smaller number"
                )


def check_skipped(methods: Mapping[str, Mapping[str, Value]], max_tokens: int) -> None:
    """Raises ValueError if a method would not train on any token of an answer.

    check_skipped(with_settings(["sdft"], []), 64)
    """
    for name, settings in methods.items():
        skipped = settings.get("skip_first_tokens", 0)
        if skipped >= max_tokens:
            raise ValueError(
                f"{name}.skip_first_tokens is {skipped}, and --max-tokens {max_tokens}: no token "
                "of an answer would be trained on"
            )


# ---- the methods ----


def _sft(student: Student, settings: Settings, records: Sequence[Record]) -> TrainingBatch:
    """The file's answers; each example's weights sum to 1, as in the cookbook."""
    return TrainingBatch([student.prompts.supervised_datum(record) for record in records])


def _sdft(student: Student, settings: Settings, records: Sequence[Record]) -> TrainingBatch:
    """Cross-entropy to the teacher's likeliest tokens, at each token of the student's answers, by
    the cookbook's own function. The first tokens of an answer have no loss."""
    from tinker_cookbook.distillation.sdft import build_topk_distillation_datums

    pairs = _answered(student, records, settings["temperature"])
    rollouts = [_rollout(student.prompts.student(record), answer) for record, answer in pairs]
    if not rollouts:
        return TrainingBatch([])
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
    return TrainingBatch(data)


def _opsd(student: Student, settings: Settings, records: Sequence[Record]) -> TrainingBatch:
    """The generalized Jensen-Shannon divergence from the teacher over the whole vocabulary."""
    pairs = _answered(student, records, settings["temperature"])
    taught = [(record, student.prompts.teacher(record), answer) for record, answer in pairs]
    return _divergence(student, settings, taught, {"teacher": "base"})


def _sdpo(student: Student, settings: Settings, records: Sequence[Record]) -> TrainingBatch:
    """The same divergence. The teacher is an average of the student's own weights. Its prompt has
    another attempt that was right, and the feedback on this attempt if it was wrong. An attempt
    with neither is not trained on."""
    groups = student.answers(records, float(settings["temperature"]), int(settings["group_size"]))
    taught = []
    for record, group in zip(records, groups, strict=True):
        texts = [student.prompts.text(answer) for answer in group]
        expected = student.prompts.expected(record)
        judged = [student.judge(text, expected, record) for text in texts]
        right = [index for index, (score, _) in enumerate(judged) if score >= settings["success"]]
        for index, answer in enumerate(group):
            example = next((texts[other] for other in right if other != index), "")
            said = "" if index in right else judged[index][1]
            if answer and (example or said):
                question = retry_prompt(record.question, example, texts[index], said)
                taught.append((record, student.prompts.after(record, question), answer))
    average = {"teacher": "ema", "teacher_ema": settings["teacher_ema"]}
    return _divergence(student, settings, taught, average)


def retry_prompt(question: str, example: str, attempt: str, said: str) -> str:
    """The user message for SDPO's teacher; without feedback, SDFT's."""
    parts = [question]
    if said:
        parts.append(f"An earlier answer of yours was:\n{attempt}")
        parts.append(f"It was not right:\n{said}")
    if example:
        parts.append(f"This is an example for a response to the question:\n{example}")
    parts.append("Now answer with a response of your own, including the thinking process.")
    return "\n\n".join(parts)


def _divergence(
    student: Student,
    settings: Settings,
    taught: "Sequence[tuple[Record, tinker.ModelInput, list[int]]]",
    teacher: dict[str, Any],
) -> TrainingBatch:
    """Answers with the teacher's prompts for generalized_jsd: a mean over all their tokens. An
    answer that doesn't fit the context after the teacher's prompt is left out."""
    from tinsmith.recipes.opsd_data import make_datum

    fitting = [row for row in taught if row[1].length + len(row[2]) <= student.context]
    total = sum(len(answer) for _, _, answer in fitting)
    data = [
        make_datum(
            student.prompts.student(record).to_ints(), prompt.to_ints(), answer, weight=1 / total
        )
        for record, prompt, answer in fitting
    ]
    config = teacher | {
        "beta": settings["beta"],
        "top_k": int(settings["top_k_loss"]),
        "temperature": settings["temperature_loss"],
    }
    return TrainingBatch(data, "generalized_jsd", config, settings["grad_clip_norm"])


def _answered(
    student: Student, records: Sequence[Record], temperature: Value
) -> list[tuple[Record, list[int]]]:
    """The questions with the student's answers, without empty answers."""
    answers = student.answers(records, float(temperature))
    return [(record, one) for record, (one,) in zip(records, answers, strict=True) if one]


def _rollout(prompt: "tinker.ModelInput", answer: Sequence[int]) -> "tinker.Datum":
    """An answer after its prompt, in the form of the cookbook's function: the mask marks the
    answer's tokens among the targets."""
    import tinker

    tokens = [*prompt.to_ints(), *answer]
    mask = np.zeros(len(tokens) - 1, np.float32)
    mask[prompt.length - 1 :] = 1
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.asarray(tokens[1:], np.int64), "mask": mask},
    )


_TEMPERATURE = Option(1.0, 0.0, 10.0, "of the student's answers")
_DIVERGENCE = {
    "beta": Option(0.5, 0.0, 1.0, "of the divergence; 0: KL(teacher‖student), 1: the reverse"),
    "top_k_loss": Option(
        0, 0, 1_000_000, "of the teacher's tokens that it is over; 0: all", ids=True
    ),
    "temperature_loss": Option(1.0, 0.01, 100.0, "of both distributions in it"),
    "grad_clip_norm": Option(1.0, 0.0, 1e6, "of the gradients; 0: none"),
    "temperature": _TEMPERATURE,
}

METHODS = {
    "sft": Method("SFT", "cross-entropy to the file's answers", False, _sft, {}),
    "sdft": Method(
        "SDFT",
        "cross-entropy to the likeliest tokens of a teacher that has read the answer, on the "
        "student's own answers",
        True,
        _sdft,
        {
            "topk": Option(20, 1, 1000, "of the teacher's tokens that are targets", ids=True),
            "skip_first_tokens": Option(3, 0, 1000, "of an answer, which have no loss"),
            "temperature": _TEMPERATURE,
        },
    ),
    "opsd": Method(
        "OPSD",
        "divergence from that teacher over the whole vocabulary, on the student's own answers",
        True,
        _opsd,
        _DIVERGENCE,
    ),
    "sdpo": Method(
        "SDPO",
        "the same divergence from a teacher that has read a right answer of the student's own, "
        "and what the scorer says of a wrong one",
        True,
        _sdpo,
        {
            "group_size": Option(8, 2, 64, "answers to a question"),
            "success": Option(1.0, -1e6, 1e6, "the score from which an answer is right"),
            "teacher_ema": Option(
                0.95, 0.0, 1.0, "decay of the teacher's average of weights", open=True
            ),
            **_DIVERGENCE,
        },
    ),
}
