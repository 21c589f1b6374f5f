"""The OPSD recipe, end to end on the model that ships with the package: steps, log, resuming from a
checkpoint, teachers; and what it makes of a data file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinsmith
from tinsmith.demo import compare, data, demo
from tinsmith.recipes import opsd, opsd_data
from tinsmith.recipes.opsd_data import Problem


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    with tinsmith.serve(demo.MODEL, device="cpu", checkpoints=checkpoints, seed=0) as running:
        yield running


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("problems")
    compare.write_problems(folder / "train.jsonl", data.sdft_examples(64, seed=0))
    compare.write_problems(folder / "test.jsonl", data.held_out_examples(2, seed=0))
    return {"data_path": str(folder / "train.jsonl"), "test_path": str(folder / "test.jsonl")}


def config(
    backend: Any, files: dict[str, str], log: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> opsd.Config:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    return opsd.Config(
        **{
            "model_name": str(demo.MODEL), "renderer_name": demo.RENDERER, "lora_rank": 8, **files,
            "prompts": "demonstration", "groups_per_batch": 4, "max_tokens": 24,
            "learning_rate": 1e-3, "max_steps": 2, "eval_every": 0, "save_every": 0, "top_p": 1.0,
            "top_k": -1, "log_path": str(log), "behavior_if_log_dir_exists": "delete",
            "base_url": backend.url, **changes,
        }
    )  # fmt: skip


def rows_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def test_two_steps_and_their_log(
    backend: Any, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opsd.run(config(backend, files, tmp_path / "log", monkeypatch, eval_every=1, group_size=2))
    first, second = rows_of(tmp_path / "log")
    for row in (first, second):
        assert row["opsd/num_datums"] == 8 and row["opsd/left_out"] == 0
        assert row["loss:sum"] > 0 and row["grad_norm"] > 0
        assert row["loss_tokens"] == row["jsd_tokens:sum"] > 8
        assert 0 <= row["test/correct"] <= 1 and row["test/jsd"] > 0
    assert second["final/test/jsd"] < first["test/jsd"]
    saved = (tmp_path / "log" / "checkpoints.jsonl").read_text().splitlines()
    (record,) = [json.loads(line) for line in saved]
    assert (
        record["name"] == "final"
        and record["state_path"].startswith("tinker://")
        and record["batch"] == 2
    )


def test_a_run_that_is_resumed_goes_on_where_it_was(
    backend: Any, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    options = {"teacher": "ema", "teacher_ema": 0.5, "save_every": 1}
    opsd.run(config(backend, files, log, monkeypatch, **options))
    more = {**options, "max_steps": 3, "behavior_if_log_dir_exists": "resume"}
    opsd.run(config(backend, files, log, monkeypatch, **more))
    assert [row["progress/batch"] for row in rows_of(log)] == [0, 1, 2]
    assert all(row["loss:sum"] > 0 for row in rows_of(log))


def test_a_teacher_that_is_the_student_and_the_papers_bare_prompt(
    backend: Any, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"teacher": "current", "bare_student": True, "beta": 0.0, "top_k_loss": 50}
    options |= {"token_clip": 0.05, "temperature_loss": 1.1, "max_steps": 1}
    opsd.run(config(backend, files, tmp_path / "log", monkeypatch, **options))
    (row,) = rows_of(tmp_path / "log")
    assert row["loss:sum"] > 0 and row["grad_norm"] > 0


def test_answers_that_the_teacher_has_no_room_for_are_cut_or_left_out(
    backend: Any, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = config(backend, files, tmp_path, monkeypatch, max_context_length=40)
    recipe = opsd.Recipe(made, demo.RENDERER, str(tmp_path))
    row = recipe.problems[0]
    taught = len(recipe.prompts_of(row)[1])
    assert recipe.datums([row], [[[5] * 30]]) == [] or taught < 40
    made = config(backend, files, tmp_path, monkeypatch, max_context_length=taught + 3)
    recipe = opsd.Recipe(made, demo.RENDERER, str(tmp_path))
    (datum,) = recipe.datums([row], [[[5] * 30]])
    assert len(datum.loss_fn_inputs["teacher_tokens"].data) == taught + 3
    assert sum(datum.loss_fn_inputs["weights"].data) == pytest.approx(1)


def test_a_setting_that_is_none_is_refused(
    backend: Any, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"prompts must be one of \['demonstration', 'math'\]"):
        opsd.run(config(backend, files, tmp_path / "log", monkeypatch, prompts="poem"))


def test_the_demo_shows_both_recipes_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "PER_SKILL", 2)
    arguments = ["--steps", "2", "--out", str(tmp_path), "--device", "cpu"]
    assert compare.main(arguments) == 0
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    for words in ("SDFT, top 20", "OPSD, whole vocabulary", "after steps", "0%"):
        assert words in shown
    for name in ("sdft", "opsd"):
        saved = (tmp_path / name / "checkpoints.jsonl").read_text().splitlines()
        assert {json.loads(line)["batch"] for line in saved} == {1, 2}


# ---- data ----


def test_batches_are_epochs_that_do_not_depend_on_where_one_begins() -> None:
    problems = [Problem(str(index), "") for index in range(10)]
    batches = [opsd_data.batch_of(problems, index, 4, seed=3) for index in range(5)]
    seen = [row.problem for batch in batches for row in batch]
    for epoch in (seen[:10], seen[10:]):
        assert sorted(epoch) == sorted(row.problem for row in problems)
    assert seen[:10] != seen[10:]
    assert opsd_data.batch_of(problems, 3, 4, seed=3) == batches[3]


def test_a_file_that_is_no_list_of_problems_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    for text, sentence in (
        ('{"problem": "a", "solution": "b"}\n{"problem": "a"}\n', "line 2 needs solution as text"),
        ('{"problem": 1, "solution": "b"}', r"line 1 needs problem as text; found \['problem'"),
        ("[1]", "line 1 needs problem as text; found list"),
        ("\nproblem", "line 2 is not JSON"),
        ("\n\n", "has no rows"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=sentence):
            opsd_data.read_problems(path)
    path.write_text('{"problem": "a{x}", "solution": "b", "level": 3}\n\n')
    (row,) = opsd_data.read_problems(path)
    student, teacher = opsd_data.PROMPTS["math"].of(row)
    assert "a{x}" in student and student.endswith("\\boxed{}.") and "solution:\nb\n" in teacher


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{1} or \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{ 7 }", "7"),
        ("\\boxed{7", "7"),
        (" Action: get ", "Action: get"),
    ],
)
def test_the_answer_of_a_solution(text: str, answer: str) -> None:
    assert opsd_data.answer_of(text) == answer
    assert opsd_data.is_correct(text, Problem("", f"\\boxed{{{answer}}}"))
    assert not opsd_data.is_correct(text, Problem("", "\\boxed{other}"))


def test_demonstrations_are_the_sdft_recipes_prompts() -> None:
    from tinker_cookbook.distillation.sdft import DEFAULT_DEMO_TEMPLATE

    student, teacher = opsd_data.PROMPTS["demonstration"].of(Problem("why?", "so."))
    assert student == "why?"
    assert teacher == DEFAULT_DEMO_TEMPLATE.format(question="why?", golden_answer="so.")
