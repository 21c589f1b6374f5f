"""The OPSD recipe, end to end on the model that ships with the package: what each option sends to
the server, steps, log, resuming from a checkpoint; and what it makes of files of problems and
prompts."""

import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chz
import pytest
import tinker
import tinsmith
from support import ROOT
from tinsmith.demo import data, demo
from tinsmith.recipes import opsd, opsd_config, opsd_data
from tinsmith.recipes.opsd_data import Problem


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    with tinsmith.serve(demo.MODEL, device="cpu", checkpoints=checkpoints, seed=0) as running:
        yield running


def write_problems(path: Path, examples: Sequence[data.Example]) -> None:
    """Questions in the OPSD recipe's format."""
    rows = ({"problem": one.question, "solution": one.answer} for one in examples)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("problems")
    write_problems(folder / "train.jsonl", data.sdft_examples(64, seed=0))
    write_problems(folder / "test.jsonl", data.held_out_examples(2, seed=0))
    return {"data_path": str(folder / "train.jsonl"), "test_path": str(folder / "test.jsonl")}


@dataclass
class Sent:
    """What a run sent: each forward_backward's datums, loss and configuration, and each
    optim_step's parameters."""

    data: list[list[tinker.Datum]] = field(default_factory=list)
    configs: list[dict[str, Any]] = field(default_factory=list)
    adam: list[tinker.AdamParams] = field(default_factory=list)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    seen = Sent()
    forward_backward = tinker.TrainingClient.forward_backward
    optim_step = tinker.TrainingClient.optim_step

    def spied(self: Any, data: Any, loss_fn: Any, loss_fn_config: Any) -> Any:
        assert loss_fn == "generalized_jsd"
        seen.data.append(data)
        seen.configs.append(loss_fn_config)
        return forward_backward(self, data, loss_fn, loss_fn_config)

    def spied_step(self: Any, params: tinker.AdamParams) -> Any:
        seen.adam.append(params)
        return optim_step(self, params)

    monkeypatch.setattr(tinker.TrainingClient, "forward_backward", spied)
    monkeypatch.setattr(tinker.TrainingClient, "optim_step", spied_step)
    return seen


OLD = {
    "defaults": "february-2026", "bare_student": False, "student_thinking": False,
    "teacher_thinking": False,
}  # fmt: skip
NO_TEMPLATE = {**OLD, "bare_student": True, "student_thinking": None}
AUTHORS = {  # nothing but what there is no default for
    "defaults": "march-2026", "bare_student": None, "student_thinking": None,
    "teacher_thinking": None, "learning_rate": None, "prompts": None, "max_steps": 1,
}  # fmt: skip


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
            "base_url": backend.url, **OLD, **changes,
        }
    )  # fmt: skip


def rows_of(log: Path, count: int | None = None) -> list[dict[str, Any]]:
    lines = (log / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[:count]]


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
    options = {**NO_TEMPLATE, "teacher": "current", "beta": 0.0, "top_k_loss": 50}
    options |= {"token_clip": 0.05, "temperature_loss": 1.1, "max_steps": 1}
    opsd.run(config(backend, files, tmp_path / "log", monkeypatch, **options))
    (row,) = rows_of(tmp_path / "log")
    assert row["loss:sum"] > 0 and row["grad_norm"] > 0


def test_answers_that_the_teacher_has_no_room_for_are_cut_or_left_out(
    backend: Any, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = config(backend, files, tmp_path, monkeypatch, max_context_length=40)
    recipe = opsd.Recipe(made, demo.RENDERER)
    row = recipe.problems[0]
    taught = len(recipe.prompts_of(row)[1])
    assert recipe.datums([row], [[[5] * 30]]) == [] or taught < 40
    made = config(backend, files, tmp_path, monkeypatch, max_context_length=taught + 3)
    recipe = opsd.Recipe(made, demo.RENDERER)
    (datum,) = recipe.datums([row], [[[5] * 30]])
    assert len(datum.loss_fn_inputs["teacher_tokens"].data) == taught + 3
    assert sum(datum.loss_fn_inputs["weights"].data) == pytest.approx(1)


# ---- what the options send ----


def text_of(tokens: Any) -> str:
    return opsd.get_tokenizer(str(demo.MODEL)).decode(list(tokens))


def prompts_in(datum: tinker.Datum) -> tuple[str, str]:
    """What student and teacher have read before the answer."""
    weights = datum.loss_fn_inputs["weights"].data
    answer = sum(weight > 0 for weight in weights)
    student = datum.model_input.to_ints()[: len(weights) + 1 - answer]
    return text_of(student), text_of(datum.loss_fn_inputs["teacher_tokens"].data[:-answer])


NO_THOUGHT = "<think>\n\n</think>\n\n"


def test_defaults_are_the_authors_of_march_and_the_old_ones_by_name(
    backend: Any, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: Sent
) -> None:
    opsd.run(config(backend, files, tmp_path / "march", monkeypatch, **AUTHORS))
    old = {**AUTHORS, "defaults": "february-2026"}
    opsd.run(config(backend, files, tmp_path / "february", monkeypatch, **old))
    march, february = sent.configs
    assert march["beta"] == 0 and march["token_clip"] == 0.05 and march["teacher"] == "base"
    assert february["beta"] == 0.5 and "token_clip" not in february
    assert [(adam.learning_rate, adam.grad_clip_norm) for adam in sent.adam] == [
        (5e-6, 0.1),
        (2e-4, 1.0),
    ]
    student, teacher = prompts_in(sent.data[0][0])
    assert student.startswith("<|im_start|>user\nProblem: ") and student.endswith(NO_THOUGHT)
    assert teacher.endswith("<|im_start|>assistant\n") and "in your own words" in teacher
    student, teacher = prompts_in(sent.data[1][0])
    assert student.startswith("Problem: ") and student.endswith("\\boxed{}.")
    assert teacher.endswith("<|im_start|>assistant\n") and "steps of your own" in teacher
    logged = json.loads((tmp_path / "march" / "config.json").read_text())
    assert logged["learning_rate"] == 5e-6 and logged["beta"] == 0  # not None


def test_an_option_goes_before_the_defaults(
    backend: Any, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**AUTHORS, "beta": 0.25, "token_clip": 0.0}
    made = config(backend, files, tmp_path, monkeypatch, **given)
    assert opsd.loss_config(made)["beta"] == 0.25 and "token_clip" not in opsd.loss_config(made)
    assert made.learning_rate == 5e-6
    given = {**AUTHORS, "student_thinking": True, "teacher_thinking": False}
    recipe = opsd.Recipe(config(backend, files, tmp_path, monkeypatch, **given), "qwen3")
    student, teacher = map(text_of, recipe.prompts_of(recipe.problems[0]))
    assert student.endswith("assistant\n") and teacher.endswith("assistant\n" + NO_THOUGHT)


@pytest.mark.parametrize(
    ("options", "teacher"),
    [
        ({}, {"teacher": "base"}),
        ({"teacher": "current"}, {"teacher": "current"}),
        ({"teacher": "ema", "teacher_ema": 0.5}, {"teacher": "ema", "teacher_ema": 0.5}),
        ({"teacher": "tinker://run/weights/1"}, {"teacher": "tinker://run/weights/1"}),
        ({"teacher_model": "larger"}, {"teacher": "larger"}),
    ],
)
def test_each_teacher_goes_by_its_name(
    backend: Any, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any], teacher: dict[str, Any],
) -> None:  # fmt: skip
    sent = opsd.loss_config(config(backend, files, tmp_path, monkeypatch, **options))
    assert {key: sent[key] for key in sent if key.startswith("teacher")} == teacher


def test_the_learning_rate_of_each_step_follows_the_schedule(
    backend: Any, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: Sent
) -> None:
    options = {"lr_schedule": "linear", "lr_warmup_steps": 2, "max_steps": 4, "groups_per_batch": 1}
    opsd.run(config(backend, files, tmp_path / "log", monkeypatch, **options, max_tokens=4))
    rates = [adam.learning_rate for adam in sent.adam]
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3, 0.5e-3])
    assert [row["optim/lr"] for row in rows_of(tmp_path / "log")] == rates
    cosine = config(backend, files, tmp_path, monkeypatch, lr_schedule="cosine", max_steps=4)
    rates = [opsd.learning_rate_at(cosine, step) for step in range(4)]
    assert rates == pytest.approx([1e-3, 0.853553e-3, 0.5e-3, 0.146447e-3], rel=1e-5)


def test_a_periodic_teacher_is_the_student_of_every_n_steps_and_outlives_a_resume(
    backend: Any, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: Sent
) -> None:
    log = tmp_path / "log"
    options = {"teacher": "periodic:2", "save_every": 1, "groups_per_batch": 1, "max_tokens": 4}
    opsd.run(config(backend, files, log, monkeypatch, **options, max_steps=3))
    again = {**options, "behavior_if_log_dir_exists": "resume"}
    opsd.run(config(backend, files, log, monkeypatch, **again, max_steps=5))
    first, same, second, after, third = [made["teacher"] for made in sent.configs]
    assert first == same and second == after and len({first, second, third}) == 3
    service = tinker.ServiceClient(base_url=backend.url)
    prompt = tinker.ModelInput.from_ints(sent.data[0][0].model_input.to_ints())

    def scores(**model: str) -> list[float | None]:
        return service.create_sampling_client(**model).result().compute_logprobs(prompt).result()

    assert scores(model_path=first) == scores(base_model=str(demo.MODEL))
    assert scores(model_path=first) != scores(model_path=second) != scores(model_path=third)


def test_a_step_that_is_taken_again_is_told_once(
    backend: Any, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    options = {"save_every": 2, "groups_per_batch": 1, "max_tokens": 4, "max_steps": 4}
    step = opsd.Recipe.step

    def cut_off(self: opsd.Recipe, index: int) -> dict[str, float]:
        if index == 3:
            raise KeyboardInterrupt
        return step(self, index)

    monkeypatch.setattr(opsd.Recipe, "step", cut_off)
    with pytest.raises(KeyboardInterrupt):
        opsd.run(config(backend, files, log, monkeypatch, **options))
    with (log / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "progr')  # as a full disk leaves it
    first = rows_of(log, 3)
    assert [row["step"] for row in first] == [0, 1, 2]
    monkeypatch.setattr(opsd.Recipe, "step", step)
    again = {**options, "behavior_if_log_dir_exists": "resume"}
    opsd.run(config(backend, files, log, monkeypatch, **again))
    rows = rows_of(log)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[:2] == first[:2] and rows[2]["time/train"] != first[2]["time/train"]


def test_prompts_of_ones_own_and_several_pairs_are_what_is_sent(
    backend: Any, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: Sent
) -> None:
    path = tmp_path / "pairs.jsonl"
    pairs = [
        {"student": f"{n} {{problem}}", "teacher": f"{n} {{{{x}}}} {{problem}} {{solution}}"}
        for n in (1, 2)
    ]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    options = {"prompts": str(path), "groups_per_batch": 16, "max_tokens": 2, "max_steps": 1}
    opsd.run(config(backend, files, tmp_path / "log", monkeypatch, **options))
    numbers = set()
    for datum in sent.data[0]:
        student, teacher = (text.removeprefix("<|im_start|>user\n") for text in prompts_in(datum))
        assert teacher.startswith(f"{student[0]} {{x}} ") and len(teacher) > len(student) + 4
        numbers.add(student[0])
    assert numbers == {"1", "2"}


# ---- what is refused, before the start ----


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"defaults": "2025"}, r"defaults must be one of \['february-2026', 'march-2026'\]"),
        ({"prompts": "poem"}, r"prompts must be one of \['demonstration', 'math', "),
        ({"prompts": "poem.json"}, r"prompts: there is no file 'poem.json'"),
        ({"teacher": "emma"}, "teacher must be fixed, ema, current, periodic:N .* not 'emma'"),
        ({"teacher": "periodic:0"}, "teacher must be .* not 'periodic:0'"),
        (
            {"teacher": "ema", "teacher_model": "x"},
            "teacher_model=x teaches instead of teacher=ema",
        ),
        ({"beta": 1.5}, "beta must be from 0 to 1, not 1.5"),
        ({"lr_schedule": "step"}, "lr_schedule must be constant, linear or cosine, not 'step'"),
        ({"groups_per_batch": 0}, "groups_per_batch must be at least 1, not 0"),
        ({"group_size": 0}, "group_size must be at least 1, not 0"),
        ({"max_steps": -3}, "max_steps must be at least 1, not -3"),
        ({"max_context_length": -5}, "max_context_length must be at least 2, not -5"),
        ({"top_p": 0.0}, "top_p must be more than 0 and at most 1, not 0.0"),
        ({"temperature": -1.0}, r"temperature must be 0 \(greedy\) or more, not -1.0"),
        ({"teacher_ema": 0.5}, "teacher_ema=0.5 is of teacher=ema, and teacher=fixed"),
        ({"lr_warmup_steps": 3}, r"lr_warmup_steps must be from 0 to max_steps \(2\), not 3"),
        ({"token_clip": -1.0}, r"token_clip must be 0 \(none\) or more, not -1.0"),
        ({"bare_student": True}, "bare_student=True leaves out the template that student_thinking"),
        ({"renderer_name": "role_colon"}, "student_thinking=False: the renderer 'role_colon' cann"),
        ({"data_path": "none.jsonl"}, "none.jsonl"),
    ],
)
def test_a_setting_that_is_none_is_refused_and_the_old_log_stays(
    backend: Any, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any], sentence: str,
) -> None:  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises((ValueError, FileNotFoundError), match=sentence):
        opsd.run(config(backend, files, tmp_path, monkeypatch, **changes))
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"


def test_a_renderer_without_the_switch_is_left_as_it_is_unless_one_asks(
    backend: Any, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = config(backend, files, tmp_path, monkeypatch, **AUTHORS)
    assert opsd_config.renderer_names(made, "llama3") == ("llama3", "llama3")


@pytest.mark.parametrize(
    ("name", "off", "on"),
    [
        ("qwen3", "qwen3_disable_thinking", "qwen3"),
        ("qwen3_disable_thinking", "qwen3_disable_thinking", "qwen3"),
        ("qwen3_instruct", None, None),
        ("qwen3_vl_instruct", None, None),
        ("qwen3_5_preserve_thinking", "qwen3_5_disable_thinking", "qwen3_5_preserve_thinking"),
        ("qwen3_8_low_reasoning", "qwen3_8_disable_thinking", "qwen3_8_low_reasoning"),
        ("deepseekv3", "deepseekv3", "deepseekv3_thinking"),
        ("deepseekv4_1", "deepseekv4_1_disable_thinking", "deepseekv4_1"),
        ("nemotron3_low_thinking", "nemotron3_disable_thinking", "nemotron3_low_thinking"),
        ("nemotron3_ultra", "nemotron3_ultra_disable_thinking", "nemotron3_ultra"),
        ("kimi_k2", None, None),
        ("gpt_oss_low_reasoning", None, None),
    ],
)
def test_a_family_of_renderers_switches_thinking(
    name: str, off: str | None, on: str | None
) -> None:
    assert opsd_config.switched(name, thinking=False) == off
    assert opsd_config.switched(name, thinking=True) == on


def test_the_renderers_that_switch_are_the_cookbooks() -> None:
    known = set(inspect.getsource(opsd.renderers.get_renderer).split('"'))
    listed = {name for name in known if name.endswith(opsd_config.OFF)}
    assert len(listed) > 3 and listed <= set(opsd_config.THINKING)
    assert {opsd_config.switched(name, thinking=True) for name in listed} <= known - listed


def test_the_page_has_the_defaults() -> None:
    text = (ROOT / "docs" / "opsd.md").read_text(encoding="utf-8")
    march, february = opsd_config.DEFAULTS.values()
    for name in march:
        assert f"| `{name}` | `{march[name]}` | `{february[name]}` |" in text
    assert all(f"`{name}`" in text for name in opsd_data.PROMPTS)


def test_every_option_has_a_help_text() -> None:
    shown = chz.Blueprint(opsd.Config).get_help()
    for line in shown.split("Arguments:")[1].strip().splitlines():
        assert len(line.split("  ")[-1].strip()) > 10, line
    assert "(march-2026: 5e-06; february-2026: 0.0002)" in shown


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
    path.write_text(
        '{"problem": "a\u2028\x85b", "solution": "c"}\r\n{"problem": "d", "solution": ""}'
    )
    assert [row.problem for row in opsd_data.read_problems(path)] == ["a\u2028\x85b", "d"]
    path.write_text('{"problem": "a{x}", "solution": "b", "level": 3}\n\n')
    (row,) = opsd_data.read_problems(path)
    student, teacher = opsd_data.PROMPTS["math"].of(row)
    assert "a{x}" in student and student.endswith("\\boxed{}.") and "solution:\nb\n" in teacher


def test_a_file_of_prompts_that_is_none_is_refused_with_its_pair_and_key(tmp_path: Path) -> None:
    path = tmp_path / "pairs.json"
    for text, sentence in (
        ('{"student": "{problem}"}', r"pair 1 needs the keys student and teacher, .* \['student'"),
        ('[{"student": "{problem}", "teacher": "{problem} {solution}"}, 3]', "pair 2 needs .* int"),
        ('{"student": 1, "teacher": "{problem} {solution}"}', "student should be text, not int"),
        ('{"student": "{problem}", "teacher": "{problem}"}', r"teacher has no \{solution\}"),
        ('{"student": "x", "teacher": "{problem} {solution}"}', r"student has no \{problem\}"),
        (
            '{"student": "{problem} {solution}", "teacher": "{problem} {solution}"}',
            r"student may not have \{solution\}",
        ),
        ('{"student": "{problem} {0}", "teacher": "{problem} {solution}"}', r"may not have \{0\}"),
        ('{"student": "{problem} {", "teacher": "{problem} {solution}"}', "student: .* is written"),
        ('{"student": "{problem}", "teacher": "{problem} {solutoin}"}', r"not have \{solutoin\}"),
        ("student: x", "is neither JSON nor JSONL"),
        ("[]", "has no pairs of prompts"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"pairs.json.*{sentence}"):
            opsd_data.read_prompts(str(path))


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
