"""Data for all methods: JSONL with a question and its answer on each line, in one of several forms.

FORMS is the table of the forms. A line has the first form whose columns it has; other columns are
ignored, but a scorer of yours sees them. A file is read whole and checked before anything starts.
An error is one sentence with the file and the line's number.
"""

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith.checkpoints.meta import check_text
from tinsmith.formats.config import CONFIG_FILE
from tinsmith.formats.safetensors_io import unique_keys
from tinsmith.formats.tensor_files import open_tensors

TextMessage = dict[str, str]  # role and content
ROLES = ("system", "user", "assistant", "tool")
SHOWN_MAX = 200  # characters of a value that an error shows
SAMPLE = 4096  # bytes of a tensor that are hashed
HELD_OUT_MAX = 100  # rows, if no file of held-out questions is given


@dataclass(frozen=True)
class Record:
    """A question and its answer, from one line of a file.

    messages: the conversation up to the question, which is its last message and a user's; empty for
    a plain text, which answers nothing.
    answer: what the assistant should say next. line: the line's number in its file, from 1.
    row: the line's object as it is in the file.

        Record(({"role": "user", "content": "1 + 1?"},), "2", 1, {"problem": "1 + 1?", ...})
    """

    messages: tuple[TextMessage, ...]
    answer: str
    line: int
    row: Mapping[str, Any]

    @property
    def question(self) -> str:
        """The last user's message."""
        return self.messages[-1]["content"]


@dataclass(frozen=True)
class Form:
    """A row of FORMS: the columns that a line of this form has, and how they are read. The
    functions get the line's object; ValueError with the end of a sentence if it is invalid."""

    columns: tuple[str, ...]
    messages: Callable[[Mapping[str, Any]], tuple[TextMessage, ...]]
    answer: Callable[[Mapping[str, Any]], str]
    where: str  # who uses this form


def read_records(path: Path, *, texts: bool = False) -> list[Record]:
    """A file's records, in order; empty lines are skipped. texts: whether a line may be a plain
    text, without a question.

    Raises ValueError with the file, the line's number and the error; OSError if the file can't be
    read.

        read_records(Path("questions.jsonl"))[0].answer
    """
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            if text:
                records.append(_record(_object(text), number, texts))
        except UnicodeDecodeError:
            raise ValueError(f"{path}, line {number} is not UTF-8") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
        except RecursionError:
            raise ValueError(f"{path}, line {number} is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not records:
        raise ValueError(f"{path} has no rows")
    return records


def digest(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def model_digest(folder: Path) -> str:
    """The SHA-256 of a model's config.json and of the beginning of each of its tensors."""
    found = hashlib.sha256((folder / CONFIG_FILE).read_bytes())
    with open_tensors(folder) as tensors:
        for name in sorted(tensors):
            for entry in tensors.sources(name):
                bits = tensors.bits(entry)[entry.begin : entry.begin + min(entry.size, SAMPLE)]
                found.update(repr((name, entry.dtype, entry.shape, bits)).encode())
    return found.hexdigest()


def hold_out(records: Sequence[Record], count: int | None) -> tuple[list[Record], list[Record]]:
    """Records for training, and `count` others for evaluation (None: a fifth, at most
    HELD_OUT_MAX), both in the file's order. Every method and seed gets the same. All rows of a
    question are on one side, so there may be a few more than `count`.

    Raises ValueError if one side would be empty.

        train, test = hold_out(records, 50)
    """
    if count is None:
        count = min(HELD_OUT_MAX, max(1, len(records) // 5))
    if count >= len(records):
        raise ValueError(f"{count} rows can't be held out of {len(records)}: none would be left")
    questions: dict[str, list[int]] = {}
    for index, record in enumerate(records):
        questions.setdefault(asked(record), []).append(index)
    several, picked = list(questions.values()), set[int]()
    for number in random.Random("hold-out").sample(range(len(several)), min(count, len(several))):
        if len(picked) < count:
            picked.update(several[number])
    if len(picked) == len(records):
        raise ValueError(
            f"{count} rows can't be held out: the {len(records)} rows have {len(several)} "
            "different questions, and none would be left"
        )
    sides = ([r for i, r in enumerate(records) if (i in picked) == side] for side in (False, True))
    train, test = sides
    return train, test


def refuse_known(path: Path, test: Sequence[Record], data: Path, train: Sequence[Record]) -> None:
    """Raises ValueError with both lines if an evaluation question is also trained on."""
    lines = {asked(record): record.line for record in reversed(train)}
    for record in test:
        if (line := lines.get(asked(record))) is not None:
            raise ValueError(
                f"{path}, line {record.line} asks what line {line} of {data} does: a question that "
                "is trained on says nothing of others; leave it out of one of the two"
            )


def asked(record: Record) -> str:
    """A record's conversation, for comparing."""
    return json.dumps(record.messages, sort_keys=True)


# ---- a line ----


def _object(text: str) -> Any:
    """A line's JSON. ValueError for a duplicate key, and for text that is not Unicode, which no
    tokenizer accepts."""
    found = json.loads(text, object_pairs_hook=unique_keys)
    if "\\u" in text:  # the form of half a surrogate pair in JSON
        _check_texts(found)
    return found


def _check_texts(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _check_texts(key)
            _check_texts(item)
    elif isinstance(value, list):
        for item in value:
            _check_texts(item)
    elif isinstance(value, str):
        check_text(value, f"the text {value!a:.{SHOWN_MAX}}")


def _record(row: Any, line: int, texts: bool) -> Record:
    if not isinstance(row, dict):
        raise ValueError(f"it should be an object; {_shown(row)} came")
    for form in FORMS if texts else FORMS[:-1]:
        if all(column in row for column in form.columns):
            messages, answer = form.messages(row), form.answer(row)
            break
    else:
        if row.keys() & set(FORMS[-1].columns):
            raise ValueError("a plain text has no question: only --retain takes it")
        known = "; ".join(" and ".join(form.columns) for form in FORMS[: None if texts else -1])
        raise ValueError(f"it has the columns {sorted(row)}; it needs one of: {known}")
    if messages and messages[-1]["role"] != "user":
        role = messages[-1]["role"]
        raise ValueError(f"the message before the answer should be the user's, not role {role!r}")
    if not answer.strip():
        raise ValueError("the answer is empty")
    return Record(messages, answer, line, row)


def _shown(value: Any) -> str:
    return f"{json.dumps(value, ensure_ascii=False):.{SHOWN_MAX}}"


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise ValueError(f"{column} should be text; {_shown(value)} came")
    if not value.strip():
        raise ValueError(f"{column} is empty")
    return value


def _lines(row: Mapping[str, Any], column: str) -> str:
    """Text, or a list of texts that are concatenated as lines."""
    value = row[column]
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    return _text(row, column)


def _content(value: Any, where: str) -> str:
    """A message's content: text, or a list of parts that are all text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"the content of {where} should be text; {_shown(value)} came")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"the content of {where} has a part that is not text: {_shown(part)}")
        texts.append(part["text"])
    return "".join(texts)


def _chat(row: Mapping[str, Any], column: str) -> tuple[TextMessage, ...]:
    """A column's conversation."""
    value = row[column]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{column} should be a list of messages; {_shown(value)} came")
    messages = []
    for number, message in enumerate(value, 1):
        where = f"message {number}"
        if not isinstance(message, dict):
            raise ValueError(f"{where} should be an object; {_shown(message)} came")
        if message.get("role") not in ROLES:
            roles = ", ".join(ROLES)
            raise ValueError(
                f"the role of {where} should be one of {roles}; {_shown(message.get('role'))} came"
            )
        # Empty keys (null, an empty list) are ignored: hub data sets have many.
        more = sorted(key for key in message.keys() - {"role", "content"} if message[key])
        if more:
            raise ValueError(f"{where} has {more[0]!r}, which is not supported: say it in content")
        content = _content(message.get("content"), where)
        messages.append({"role": message["role"], "content": content})
    return tuple(messages)


def _conversation(row: Mapping[str, Any]) -> tuple[TextMessage, ...]:
    """All of `messages` except the last, which is the answer."""
    messages = _chat(row, "messages")
    if messages[-1]["role"] != "assistant":
        role = messages[-1]["role"]
        raise ValueError(f"the last message should be the assistant's answer, not role {role!r}")
    if len(messages) == 1:
        raise ValueError("there is no question before the assistant's answer")
    return messages[:-1]


def _prompt(row: Mapping[str, Any]) -> tuple[TextMessage, ...]:
    """`prompt`: text or a conversation."""
    return _chat(row, "prompt") if isinstance(row["prompt"], list) else _asked(row, "prompt")


def _asked(row: Mapping[str, Any], column: str) -> tuple[TextMessage, ...]:
    return ({"role": "user", "content": _text(row, column)},)


def _choices(row: Mapping[str, Any]) -> tuple[TextMessage, ...]:
    """A question with its choices, in the words of the cookbook's SDFT recipe."""
    choices = row["choices"]
    parts = [choices.get(key) for key in ("label", "text")] if isinstance(choices, dict) else [0]
    if not all(isinstance(part, list) for part in parts) or len({len(p) for p in parts}) != 1:
        raise ValueError(f"choices should have as many of label as of text; {_shown(choices)} came")
    lines = "\n".join(f"{label}: {text}" for label, text in zip(*parts, strict=True))
    content = (
        f"{_text(row, 'question')}\n\n{lines}\n"
        "Please reason step by step, then give your answer as <answer>X</answer> "
        "where X is the letter of the correct option."
    )
    return ({"role": "user", "content": content},)


def _pair(question: str, answer: str, where: str) -> Form:
    return Form(
        (question, answer), lambda row: _asked(row, question), lambda row: _text(row, answer), where
    )


FORMS = (
    Form(
        ("messages", "output_text"),
        lambda row: _chat(row, "messages"),
        lambda row: _text(row, "output_text"),
        "the SDFT paper's science questions",
    ),
    Form(
        ("messages",),
        _conversation,
        lambda row: _chat(row, "messages")[-1]["content"],
        "chats; the cookbook's conversation files",
    ),
    Form(
        ("prompt", "golden_response"),
        _prompt,
        lambda row: _lines(row, "golden_response"),
        "the cookbook's SDFT recipe, tool use",
    ),
    Form(("prompt", "answer"), _prompt, lambda row: _text(row, "answer"), "the same, to measure"),
    Form(("prompt", "completion"), _prompt, lambda row: _text(row, "completion"), "TRL"),
    _pair("problem", "solution", "the OPSD recipe"),
    _pair("problem", "answer", "the cookbook's math recipes"),
    Form(
        ("question", "choices", "answerKey"),
        _choices,
        lambda row: _text(row, "answerKey"),
        "the cookbook's SDFT recipe, SciKnowEval",
    ),
    _pair("question", "answer", "GSM8K"),
    _pair("question", "final_answer", "the cookbook's math recipes, DeepMath"),
    _pair("instruction", "output", "the cookbook's SDFT recipe, ToolAlpaca"),
    Form(("text",), lambda row: (), lambda row: _text(row, "text"), "plain text; --retain only"),
)
