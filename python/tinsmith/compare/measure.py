"""Evaluates a model: its greedy answers to a file's questions, and the likelihood of the file's.

Four measures, each a mean over the file. `exact`: the answer equals the file's, character by
character (of the last \\boxed{…}, if any). `score`: your scorer's number. `logprob`: the
log-probability of a token of the file's answers, in nats. `text`: the same for the file's plain
texts, which have no question.
"""

import importlib
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinsmith.checkpoints.meta import is_text
from tinsmith.compare.data import Record

if TYPE_CHECKING:
    import tinker

    from tinsmith.compare.prompts import Prompts

MEASURES = ("score", "exact", "logprob", "text")  # the one that counts comes first
Scorer = Callable[[str, str, Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Measured:
    """The measures of a file, by name, and a row for each question: its line, the answer, and its
    scores."""

    measures: dict[str, float]
    rows: list[dict[str, Any]]


def find_scorer(name: str) -> Scorer:
    """The function `module:function`. It is called with the model's answer, the file's, and the
    line's object. It returns a number (True is 1), or a number and a text: feedback on the answer,
    which SDPO's teacher reads. The working directory is searched too.

    Raises ValueError with a sentence if there is none.

        find_scorer("my_scorers:same_number")
    """
    module, colon, function = name.partition(":")
    if not module or not colon or not function:
        raise ValueError(f"--scorer should be module:function; {name!r:.80} came")
    sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), function, None)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"--scorer: module {module!r:.80} can't be imported: {type(error).__name__}: {error}"
        ) from None
    finally:
        sys.path.remove("")
    if not callable(found):
        raise ValueError(f"--scorer: module {module!r:.80} has no function {function!r:.80}")
    return found


def measure(
    sampler: "tinker.SamplingClient",
    prompts: "Prompts",
    records: Sequence[Record],
    *,
    max_tokens: int,
    scorer: Scorer | None,
) -> Measured:
    """All measures of a model on a file's records, requested at once.

    Raises ValueError if a scorer fails or does not return a number.

        measure(sampler, prompts, records, max_tokens=64, scorer=None).measures["exact"]
    """
    params = prompts.sampling(max_tokens, temperature=0.0)
    asked = [
        sampler.sample(prompts.student(record), 1, params) if record.messages else None
        for record in records
    ]
    examples = [prompts.supervised(record) for record in records]
    scored = [sampler.compute_logprobs(tokens) for tokens, _ in examples]
    rows: list[dict[str, Any]] = []
    for record, answer, example, scores in zip(records, asked, examples, scored, strict=True):
        marked = _marked(scores.result(), example[1])
        row = {"line": record.line, "logprob": sum(marked), "tokens": len(marked)}
        if answer is not None:
            text = prompts.text(list(answer.result().sequences[0].tokens))
            expected = prompts.expected(record)
            row |= {"answer": text, "exact": is_exact(text, expected)}
            if scorer is not None:
                row["score"], row["said"] = judge(scorer, text, expected, record)
        rows.append(row)
    return Measured(_measures(rows), rows)


def _measures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The means of a file's rows: the ones with an answer, and the plain texts."""
    answered = [row for row in rows if "answer" in row]
    texts = [row for row in rows if "answer" not in row]
    named = [name for name in ("exact", "score") if answered and name in answered[0]]
    found = {name: _mean(answered, name) for name in named}
    for name, some in (("logprob", answered), ("text", texts)):
        if tokens := sum(row["tokens"] for row in some):
            found[name] = sum(row["logprob"] for row in some) / tokens
    return found


def is_exact(answer: str, expected: str) -> bool:
    """Whether an answer, or its last \\boxed{…}, equals the file's."""
    from tinsmith.recipes.opsd_data import answer_of

    return answer_of(answer) == answer_of(expected)


def _marked(logprobs: Sequence[float | None], marks: Sequence[bool]) -> list[float]:
    """The log-probabilities of the marked tokens; the very first token has none."""
    pairs = zip(logprobs, marks, strict=True)
    return [logprob for logprob, mark in pairs if mark and logprob is not None]


def judge(scorer: Scorer | None, text: str, expected: str, record: Record) -> tuple[float, str]:
    """A scorer's number for an answer, and its feedback; without a scorer 1 or 0, and "".

    Raises ValueError if the scorer returns anything else, or raises an exception.

        judge(None, "2", "2", record)  # (1.0, "")
    """
    if scorer is None:
        return float(is_exact(text, expected)), ""
    try:
        value = scorer(text, expected, record.row)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"the scorer failed on the answer to line {record.line}: {_raised(error)}"
        ) from None
    score, said = value if isinstance(value, tuple) and len(value) == 2 else (value, "")
    try:
        number = float(score)
    except Exception:  # an int that is too large, or an exception of the scorer's own class
        number = math.nan
    if not math.isfinite(number) or not is_text(said):
        raise ValueError(
            "the scorer should return a number, or a number and a text; for the answer to line "
            f"{record.line} it returned {_shown(value)}"
        )
    return number, said


def _raised(error: BaseException) -> str:
    """A scorer's exception in one line, with the place in its files where it was raised."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    places = traceback.extract_tb(error.__traceback__)[1:]  # the first is the call here
    return f"{text:.300}" + (f" ({places[-1].filename}:{places[-1].lineno})" if places else "")


def _shown(value: object) -> str:
    """The beginning of a value's repr; the type's name if Python can't print it."""
    try:
        return f"{value!r:.80}"
    except Exception:  # an int with more digits than Python prints, for example
        return f"{type(value).__name__} that can't be shown"


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(float(row[key]) for row in rows) / len(rows)
