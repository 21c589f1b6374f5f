"""The data of `tinsmith compare`: every form of a line, and what a line is refused for."""

import json
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from tinsmith.compare import data
from tinsmith.compare.data import Record, read_records

USER = {"role": "user", "content": "why?"}
ANSWER = {"role": "assistant", "content": "so."}
SYSTEM = {"role": "system", "content": "be kind"}


def write(path: Path, *lines: Any) -> Path:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("\n".join(texts) + "\n")
    return path


@pytest.mark.parametrize(
    ("row", "messages", "answer"),
    [
        ({"messages": [SYSTEM, USER, ANSWER]}, [SYSTEM, USER], "so."),
        ({"messages": [USER, ANSWER, USER, ANSWER]}, [USER, ANSWER, USER], "so."),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "why?"}]}, ANSWER]},
            [USER],
            "so.",
        ),
        ({"messages": [USER | {"tool_calls": None}, ANSWER]}, [USER], "so."),
        ({"messages": [SYSTEM, USER], "output_text": "so."}, [SYSTEM, USER], "so."),
        ({"problem": "why?", "solution": "so.", "level": 3}, [USER], "so."),
        ({"problem": "why?", "answer": "so."}, [USER], "so."),
        ({"problem": "why?", "solution": "so.", "answer": "no"}, [USER], "so."),
        ({"prompt": "why?", "golden_response": "so."}, [USER], "so."),
        ({"prompt": "why?", "golden_response": ["a", "b"]}, [USER], "a\nb"),
        ({"prompt": [SYSTEM, USER], "answer": "B"}, [SYSTEM, USER], "B"),
        ({"prompt": "why?", "completion": "so."}, [USER], "so."),
        ({"question": "why?", "answer": "so."}, [USER], "so."),
        ({"question": "why?", "final_answer": "so."}, [USER], "so."),
        ({"instruction": "why?", "output": "so."}, [USER], "so."),
    ],
)
def test_every_form_is_read(
    row: dict[str, Any], messages: list[Any], answer: str, tmp_path: Path
) -> None:
    (record,) = read_records(write(tmp_path / "one.jsonl", row))
    assert record == Record(tuple(messages), answer, 1, row)
    assert record.question == "why?"


def test_a_question_with_choices_has_the_recipes_words(tmp_path: Path) -> None:
    row = {"question": "which?", "choices": {"label": ["A", "B"], "text": ["one", "two"]}}
    (record,) = read_records(write(tmp_path / "one.jsonl", row | {"answerKey": "B"}))
    assert record.question.startswith("which?\n\nA: one\nB: two\nPlease reason step by step")
    assert record.answer == "B"


def test_the_forms_are_all_walked_here_and_in_the_docs() -> None:
    """A new row of FORMS needs a line above, and one in docs/compare.md."""
    assert len(data.FORMS) == 12
    lines = (ROOT / "docs" / "compare.md").read_text().splitlines()
    for form in data.FORMS:
        columns = " and ".join(f"`{column}`" for column in form.columns)
        assert f"| {columns} | {form.where} |" in lines


def test_a_plain_text_is_an_answer_to_nothing_where_texts_may_be(tmp_path: Path) -> None:
    rows = ({"text": "It rained."}, GOOD, {"text": "too", "problem": "a", "solution": "b"})
    path = write(tmp_path / "old.jsonl", *rows)
    found = read_records(path, texts=True)
    assert found[0] == Record((), "It rained.", 1, rows[0])
    assert [bool(record.messages) for record in found] == [False, True, True]
    with pytest.raises(ValueError, match="line 1: a plain text has no question: only --retain"):
        read_records(path)
    with pytest.raises(ValueError, match="line 1: text is empty"):
        read_records(write(path, {"text": " "}), texts=True)
    with pytest.raises(ValueError, match=r"it needs one of: messages .*; text$"):
        read_records(write(path, {"no": "form"}), texts=True)


GOOD = {"problem": "a", "solution": "b"}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("problem", "line 3 is not JSON: Expecting value"),
        ([1], r"line 3: it should be an object; \[1\] came"),
        ({"problem": "a"}, r"line 3: it has the columns \['problem'\]; it needs one of: messages"),
        ({"problem": 1, "solution": "b"}, "line 3: problem should be text; 1 came"),
        ({"problem": " ", "solution": "b"}, "line 3: problem is empty"),
        ({"problem": "a", "solution": ""}, "line 3: solution is empty"),
        ({"prompt": "a", "golden_response": []}, "line 3: the answer is empty"),
        ({"prompt": "a", "golden_response": [1]}, r"line 3: golden_response should be text; \[1\]"),
        ({"messages": []}, r"line 3: messages should be a list of messages; \[\] came"),
        ({"messages": [USER]}, "line 3: the last message should be the assistant's answer, not"),
        ({"messages": [ANSWER]}, "line 3: there is no question before the assistant's answer"),
        ({"messages": [SYSTEM, ANSWER]}, "line 3: the message before the answer should be the us"),
        ({"messages": ["hi", ANSWER]}, 'line 3: message 1 should be an object; "hi" came'),
        ({"messages": [{"role": "bot"}, ANSWER]}, "line 3: the role of message 1 should be one of"),
        ({"messages": [{"role": "user"}, ANSWER]}, "line 3: the content of message 1 should be te"),
        (
            {"messages": [USER, ANSWER | {"tool_calls": [{}]}]},
            "line 3: message 2 has 'tool_calls', which is not supported",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]},
            'line 3: the content of message 1 has a part that is not text: {"type": "image"}',
        ),
        (
            {"question": "a", "choices": {"label": ["A"], "text": []}, "answerKey": "A"},
            "line 3: choices should have as many of label as of text",
        ),
        ({"question": "a", "choices": 3, "answerKey": "A"}, "line 3: choices should have as many"),
        ("[" * 100_000, "line 3 is nested too deeply"),
        (
            '{"problem": "a", "solution": "b", "problem": "c"}',
            "line 3: the key 'problem' is there twice",
        ),
        (
            '{"problem": "a", "solution": "b", "more": [{"x": 1, "x": 1}]}',
            "line 3: the key 'x' is there twice",
        ),
        (
            '{"problem": "a\\ud800", "solution": "b"}',
            "line 3: the text 'a.* is no Unicode: half of a surrogate pair, .* at character 1",
        ),
        (
            '{"problem": "a", "solution": "b", "more": [{"\\udc00": 1}]}',
            "line 3: the text .* is no Unicode",
        ),
    ],
)
def test_a_bad_line_is_refused_with_its_number(line: Any, sentence: str, tmp_path: Path) -> None:
    path = write(tmp_path / "questions.jsonl", GOOD, "", line, GOOD)
    with pytest.raises(ValueError, match=f"^{path}, {sentence}"):
        read_records(path)


def test_a_file_that_is_no_text_or_empty_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\n")
    with pytest.raises(ValueError, match="line 2 is not UTF-8"):
        read_records(path)
    with pytest.raises(ValueError, match="has no rows"):
        read_records(write(path, "", " "))
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD, ensure_ascii=False).encode())
    assert len(read_records(path)) == 1


def test_a_line_separator_inside_a_text_does_not_end_the_line(tmp_path: Path) -> None:
    row = {"problem": "a\u2028b", "solution": "c"}
    (record,) = read_records(write(tmp_path / "one.jsonl", json.dumps(row, ensure_ascii=False)))
    assert record.question == "a\u2028b"


def records(count: int) -> list[Record]:
    return [asks(str(number), number) for number in range(1, count + 1)]


def asks(question: str, line: int) -> Record:
    return Record(({"role": "user", "content": question},), "yes", line, {})


def test_a_question_on_several_lines_is_on_one_side() -> None:
    every = [asks(str(number % 20), number) for number in range(1, 61)]
    train, test = data.hold_out(every, 7)
    assert sorted([*train, *test], key=lambda record: record.line) == every
    assert len(test) == 9  # three questions
    assert not {data.asked(one) for one in train} & {data.asked(one) for one in test}
    alike = [asks("the same", number) for number in range(1, 6)]
    with pytest.raises(ValueError, match="the 5 rows have 1 different questions, and none would"):
        data.hold_out(alike, 1)


def test_a_question_to_measure_with_is_not_trained_on() -> None:
    train, test = records(5), [asks("9", 1), asks("4", 2)]
    data.refuse_known(Path("test.jsonl"), test[:1], Path("data.jsonl"), train)
    with pytest.raises(ValueError, match=r"test.jsonl, line 2 asks what line 4 of data.jsonl does"):
        data.refuse_known(Path("test.jsonl"), test, Path("data.jsonl"), train)


def test_what_is_held_out_is_the_same_each_time_and_in_no_batch() -> None:
    every = records(50)
    train, test = data.hold_out(every, None)
    assert (len(train), len(test)) == (40, 10)
    assert sorted([*train, *test], key=lambda record: record.line) == every
    assert data.hold_out(every, None) == (train, test)
    assert len(data.hold_out(every, 7)[1]) == 7
    assert len(data.hold_out(records(2000), None)[1]) == data.HELD_OUT_MAX
    with pytest.raises(ValueError, match="50 rows can't be held out of 50: none would be left"):
        data.hold_out(every, 50)
