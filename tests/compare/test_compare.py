"""`tinsmith compare`, end to end on the model that ships with the package: what it leaves, how it
goes on, what it refuses; and its methods' datums and measures against the SDK's own figures."""

import contextlib
import csv
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tinker
import tinsmith
from support import ROOT
from support.waiting import until
from tinsmith import launch
from tinsmith.cli import commands
from tinsmith.compare import command, example, measure, methods, plan, runner, training
from tinsmith.compare.data import Record, read_records
from tinsmith.compare.plan import Plan, PlannedRun
from tinsmith.compare.prompts import Prompts, renderer_of
from tinsmith.demo import data, demo
from tinsmith.formats import safetensors_io

SMALL = ("--steps", "2", "--batch", "3", "--rank", "2", "--max-tokens", "8", "--device", "cpu")
SCORER = """
def starts(answer, expected, row):
    assert row["messages"][-1]["content"] == expected
    return answer[:6] == expected[:6]
def words(answer, expected, row):
    return "many"
def telling(answer, expected, row):
    return answer == expected, "look again: " + answer
def failing(answer, expected, row):
    return row["no such column"]
def leaving(answer, expected, row):
    raise SystemExit("enough")
def huge(answer, expected, row):
    return 10 ** 400
def unwritable(answer, expected, row):
    return 10 ** 5000
def half_a_pair(answer, expected, row):
    return 0, "\\ud800"
number = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions, and scorers in a module beside them."""
    made = tmp_path_factory.mktemp("compare")
    files = {
        "new": data.sdft_examples(12, seed=0),
        "test": data.held_out_examples(1, seed=0),
        "old": data.known_examples(1, seed=0),
    }
    for name, examples in files.items():
        example.write_chats(made / f"{name}.jsonl", ((e.question, e.answer) for e in examples))
    (made / "scorers.py").write_text(SCORER)
    (made / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    return made


def arguments(out: Path | str, *more: str) -> list[str]:
    return [
        "compare", "--model", f"demo={demo.MODEL}", "--renderer", demo.RENDERER, "--data",
        "new.jsonl", "--test", "test.jsonl", "--retain", "old.jsonl", *SMALL, "--out", str(out),
        "--checkpoints", "checkpoints", *more,
    ]  # fmt: skip


def compare(
    folder: Path, out: Path | str, *more: str, **options: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tinsmith.cli", *arguments(out, *more)],
        cwd=folder, capture_output=True, text=True, timeout=500, **options,
    )  # fmt: skip


BOTH = ("--methods", "sft,opsd", "--lr", "1e-2", "--seeds", "2", "--scorer", "scorers:starts")


@pytest.fixture(scope="module")
def compared(folder: Path) -> subprocess.CompletedProcess[str]:
    """Two methods, two seeds."""
    done = compare(folder, "out", *BOTH)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def results(out: Path) -> dict[str, Any]:
    return plan.finished(out)


# ---- the command ----


def test_a_comparison_leaves_a_table_a_csv_and_a_picture(
    folder: Path, compared: subprocess.CompletedProcess[str]
) -> None:
    out = folder / "out"
    found = results(out)
    names = {f"{method}-lr0.01-seed{seed}" for method in ("sft", "opsd") for seed in (0, 1)}
    assert found.keys() == names | {"base"}
    rows = list(csv.DictReader((out / "results.csv").open()))
    assert len(rows) == 5 and rows[0]["method"] == "base"
    for row in rows[1:]:
        result = found[f"{row['method']}-lr{row['learning_rate']}-seed{row['seed']}"]
        assert float(row["learned_score"]) == result["learned"]["score"]
        assert float(row["kept_logprob"]) == result["kept"]["logprob"] < 0
        assert row["sampler_path"].startswith("tinker://")
    text = (out / "report.md").read_text()
    about, _, table = text.split("![]")[0].partition("\n\n")
    assert about in compared.stdout and table in f"{compared.stdout}\n"
    for words in (
        "OPSD: divergence",
        "beta 0.5",
        "scorers:starts",
        "| SFT ",
        "2 steps of 3",
        " ± ",
    ):
        assert words in text
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert compared.stdout.count("[5/5] ") == 1


def test_a_run_keeps_its_answers_and_steps(
    folder: Path, compared: subprocess.CompletedProcess[str]
) -> None:
    place = folder / "out" / "runs" / "opsd-lr0.01-seed1"
    rows = [json.loads(line) for line in (place / "answers.jsonl").read_text().splitlines()]
    assert [(row["side"], row["line"]) for row in rows] == [
        *(("learned", line) for line in range(1, 5)),
        *(("kept", line) for line in range(1, 4)),
    ]
    result = json.loads((place / "result.json").read_text())
    for side in ("learned", "kept"):
        picked = [row for row in rows if row["side"] == side]
        for name in ("exact", "score"):
            assert result[side][name] == pytest.approx(np.mean([row[name] for row in picked]))
        total = sum(row["logprob"] for row in picked) / sum(row["tokens"] for row in picked)
        assert result[side]["logprob"] == pytest.approx(total)
    steps = [json.loads(line) for line in (place / "steps.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1]
    assert all(step["loss:sum"] > 0 and step["datums"] == 3 for step in steps)


def test_the_same_command_again_starts_nothing_and_more_methods_are_added(
    folder: Path,
    compared: subprocess.CompletedProcess[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before, table = results(folder / "out"), (folder / "out" / "report.md").read_text()
    monkeypatch.chdir(folder)
    assert commands.main(arguments("out", *BOTH)) == 0
    again = capsys.readouterr()
    assert "5 of the 5 runs are in" in again.out and "the page at" not in again.err
    assert (folder / "out" / "report.md").read_text() == table
    more = compare(
        folder, "out", "--methods", "sdft", "--lr", "1e-3", "--seeds", "1", "--scorer",
        "scorers:starts",
    )  # fmt: skip
    assert more.returncode == 0, more.stderr[-3000:]
    assert "1 of the 2 runs are in" in more.stdout and "[1/1] sdft" in more.stdout
    after = results(folder / "out")
    assert after.keys() - before.keys() == {"sdft-lr0.001-seed0"}
    assert all(after[name] == before[name] for name in before)
    assert "| SFT " in more.stdout, "the table has all that the folder has"


def other_model(folder: Path) -> Path:
    """The demonstration's model with another number in one of its tensors."""
    place = folder / "other-model"
    if not place.exists():
        shutil.copytree(demo.MODEL, place)
        with safetensors_io.open_folder(demo.MODEL) as found:
            tensors = {name: found[name].copy() for name in found}
        next(iter(tensors.values())).reshape(-1)[0] += 1
        safetensors_io.write(place / safetensors_io.SINGLE_FILE, tensors)
    return place


def test_a_changed_setting_is_refused_by_its_name(
    folder: Path,
    compared: subprocess.CompletedProcess[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    for more, sentence in (
        (("--batch", "4"), "--batch was 3, and is 4"),
        (("--rank", "3"), "--rank was 2, and is 3"),
        (("--set", "opsd.beta=0.25"), "opsd.beta was 0.5, and is 0.25"),
        (("--retain", "test.jsonl"), "--retain had another content"),
        (("--demonstration", "turn"), "--demonstration was words, and is turn"),
        (("--scorer", "scorers:words"), "--scorer was scorers:starts, and is scorers:words"),
        (("--weights", "int4"), "--weights was stored, and is int4"),
        (("--dtype", "float32"), "--dtype was auto, and is float32"),
        (("--model", f"demo={other_model(folder)}"), "the model demo was another one"),
    ):
        assert commands.main(arguments("out", *BOTH, *more)) == 1
        told = capsys.readouterr()
        assert told.out == "" and sentence in told.err and "Choose another --out" in told.err


@pytest.mark.slow
def test_a_comparison_that_is_killed_goes_on_and_ends_as_one_that_is_not(
    folder: Path, compared: subprocess.CompletedProcess[str]
) -> None:
    out = folder / "killed"
    process = subprocess.Popen(
        [sys.executable, "-m", "tinsmith.cli", *arguments(out, *BOTH)],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        until(lambda: len(results(out)) >= 2 or process.poll() is not None)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    there = results(out)
    assert 2 <= len(there) < 5
    left = out / "runs" / "opsd-lr0.01-seed1~part"
    left.mkdir(exist_ok=True)  # as a kill leaves one, wherever it came
    (left / "result.json").write_text("{")
    done = compare(folder, out, *BOTH)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{len(there)} of the 5 runs are in {out}: {5 - len(there)} to do" in done.stdout
    whole, resumed = results(folder / "out"), results(out)
    for name in resumed:
        for side in ("learned", "kept"):
            assert resumed[name][side] == whole[name][side], name
    assert not list((out / "runs").glob("*~part"))


def test_a_comparison_that_is_ended_says_what_is_missing(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("tinsmith.cli.run.run_recipe", lambda *_, **__: 130)
    assert commands.main(arguments(tmp_path / "out", *BOTH)) == 130
    assert "5 of the 5 runs are missing: the same command does them" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--methods", "sft,dpo"), "there is no method 'dpo'; there are sft, sdft, opsd, sdpo"),
        (("--methods", "sft,sft"), "'sft,sft' names something twice"),
        (("--lr", "1e-3,fast"), "it should be a learning rate above 0, at most 1; 'fast'"),
        (("--lr", "nan"), "it should be a learning rate above 0"),
        (("--data", "none.jsonl"), "none.jsonl: No such file"),
        (("--data", "scorers.py"), "scorers.py, line 2 is not JSON"),
        (("--seeds", "31"), "from 1 to 30; '31' came"),
        (("--hold-out", "2"), "--hold-out is for a comparison without --test"),
        (("--set", "opsd.gamma=1"), "--set 'opsd.gamma=1' names no setting: these methods have sd"),
        (("--set", "opsd.beta=2"), "--set opsd.beta: it should be a number from 0 to 1; '2' came"),
        (("--set", "sdft.topk=2.5"), "--set sdft.topk: it should be a whole number from 1 to 1000"),
        (("--set", "sdft.temperature=nan"), "--set sdft.temperature: it should be a number from"),
        (
            ("--methods", "opsd", "--set", "opsd.top_k_loss=1218"),
            "opsd.top_k_loss is 1218, and the model's vocabulary has 1,217 ids",
        ),
        (("--methods", "sft", "--set", "sdft.topk=2"), "names no setting: these methods have none"),
        (("--scorer", "scorers"), "--scorer should be module:function; 'scorers' came"),
        (("--scorer", "no_such:f"), "module 'no_such' can't be imported: ModuleNotFoundError"),
        (("--scorer", "scorers:none"), "module 'scorers' has no function 'none'"),
        (("--scorer", "scorers:number"), "module 'scorers' has no function 'number'"),
        (("--scorer", "leaves:f"), "module 'leaves' can't be imported: SystemExit: 3"),
        (
            ("--methods", "sdpo", "--set", "sdpo.teacher_ema=1"),
            "--set sdpo.teacher_ema: it should be a number from 0 to below 1; '1' came",
        ),
        (("--renderer", "poem"), "there is no renderer 'poem'"),
        (("--model", "nothing"), "nothing"),
    ],
)
def test_what_is_wrong_is_one_sentence_before_anything_starts(
    more: tuple[str, ...],
    sentence: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    out = tmp_path / "out"
    assert commands.main(arguments(out, *more)) in (1, 2)
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("tinsmith") and told.err.count("\n") == 1
    assert sentence in told.err and not out.exists()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, r"runs/sft-lr0.01-seed0 has no result.json.* move it away"),
        ("{", r"runs/sft-lr0.01-seed0/result.json is damaged: Expecting"),
        ("[1]", r"result.json is damaged: it should be an object; \[1\] came"),
        ('{"method": "sft", "seconds": "long"}', r"result.json is damaged: seconds is 'long'"),
        ('{"method": "sft", "seconds": 1, "learned": {"exact": NaN}}', r"damaged: learned is {'ex"),
    ],
)
def test_a_runs_folder_that_is_not_whole_is_named_before_anything_is_trained(
    content: str | None,
    sentence: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It was trained, and then could not take its name; a damaged result was not named."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(
        "tinsmith.cli.run.run_recipe", lambda *_, **__: pytest.fail("it was started")
    )
    place = tmp_path / "runs" / "sft-lr0.01-seed0"
    place.mkdir(parents=True)
    (place / "answers.jsonl").touch()
    if content is not None:
        (place / "result.json").write_text(content)
    assert commands.main(arguments(tmp_path, *BOTH)) == 1
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1 and re.search(sentence, told.err)
    assert not (tmp_path / "settings.json").exists()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("failing", r"failed on the answer to line 1: KeyError: 'no such column' .*scorers.py:\d+"),
        ("leaving", r"failed on the answer to line 1: SystemExit: enough"),
        ("words", r"for the answer to line 1 it returned 'many'"),
        ("huge", r"for the answer to line 1 it returned 1000"),
        ("unwritable", r"for the answer to line 1 it returned int that can't be shown"),
        ("half_a_pair", r"for the answer to line 1 it returned \(0, "),
    ],
)
def test_a_scorer_that_fails_is_told_in_a_sentence(
    name: str, sentence: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    record = read_records(folder / "new.jsonl")[0]
    with pytest.raises(ValueError, match=sentence):
        measure.judge(measure.find_scorer(f"scorers:{name}"), "so.", record.answer, record)


def test_a_question_that_does_not_fit_the_context_is_refused_with_its_line(
    folder: Path, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    command_line = arguments(tmp_path / "out")
    command_line[2], command_line[4] = str(tiny_model_dir), "role_colon"
    options = commands.command_line().parse_args(command_line)
    with pytest.raises(ValueError, match=r"new.jsonl, line 1 needs \d+ tokens .* context is 128"):
        options.run(options)


def test_a_folder_that_another_command_works_in_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    out = folder / "held"
    out.mkdir()
    with (out / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert commands.main(arguments(out)) == 1
    assert f"another tinsmith compare works in {out}" in capsys.readouterr().err


def test_the_renderer_is_known_by_the_models_name_or_must_be_given() -> None:
    assert renderer_of("Qwen/Qwen3-8B", None) == "qwen3"
    assert renderer_of("any", "llama3") == "llama3"
    for name in ("/some/folder", "Qwen/Qwen3-0.6B-nothing"):
        with pytest.raises(ValueError, match=r"the cookbook knows no renderer .* --renderer"):
            renderer_of(name, None)


def test_the_example_says_a_command_that_parses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example.main([str(tmp_path / "my questions")]) == 0
    import shlex

    told = capsys.readouterr().out.splitlines()[1]
    options = commands.command_line().parse_args(shlex.split(told)[1:])
    train, sides = command._read(options)
    assert (len(train), len(sides["learned"]), len(sides["kept"])) == (400, 100, 75)
    scorer = measure.find_scorer(options.scorer)
    one = sides["kept"][0]
    assert scorer(one.answer, one.answer, one.row) == 1
    assert scorer(one.answer, sides["kept"][1].answer, one.row) == 0


# ---- a service, in this process ----


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tinker.ServiceClient]:
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    with (
        tinsmith.serve({"demo": demo.MODEL}, device="cpu", checkpoints=checkpoints) as backend,
        backend.service_client() as client,
    ):
        yield client


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return Prompts(demo.MODEL, demo.RENDERER)


@pytest.fixture(scope="module")
def records(folder: Path) -> list[Record]:
    return read_records(folder / "new.jsonl")


@pytest.fixture(autouse=True)
def tokenizers() -> None:
    """The cookbook finds the tokenizer of the name, as `tinsmith run` has it."""
    launch.register_tokenizers({"demo": demo.MODEL})


@pytest.fixture
def student(service: tinker.ServiceClient, prompts: Prompts) -> methods.Student:
    base = service.create_sampling_client(base_model="demo").result()
    judge = partial(measure.judge, None)
    return methods.Student(base, base, prompts, 8, 1024, judge, "0/0")


def defaults(name: str) -> dict[str, Any]:
    return methods.with_settings([name], [])[name]


def test_sft_trains_on_the_answers_tokens_alone(
    student: methods.Student, records: list[Record], prompts: Prompts
) -> None:
    batch = methods.METHODS["sft"].batch(student, {}, records[:3])
    assert batch.loss_fn == "cross_entropy" and len(batch.data) == 3
    for record, datum in zip(records, batch.data, strict=False):
        weights = np.asarray(datum.loss_fn_inputs["weights"].data)
        targets = np.asarray(datum.loss_fn_inputs["target_tokens"].data)
        assert weights.sum() == pytest.approx(1)
        answer = prompts.tokenizer.decode(targets[weights > 0].tolist())
        assert answer == record.answer + "<|im_end|>"
        before = datum.model_input.to_ints()[: int(np.argmax(weights > 0)) + 1]
        assert before == prompts.student(record).to_ints(), "it is asked as it is trained"


def test_sdfts_targets_are_the_teachers_likeliest_tokens(
    student: methods.Student, records: list[Record], prompts: Prompts
) -> None:
    """Each row of the weights is the softmax of the teacher's top K at that place."""
    settings = defaults("sdft") | {"topk": 4, "skip_first_tokens": 2}
    batch = methods.METHODS["sdft"].batch(student, settings, records[:2])
    answers = student.answers(records[:2], 1.0)
    assert student.answers(records[:2], 1.0) == answers, "an answer is drawn by its place"
    assert replace(student, draw="1/0").answers(records[:2], 1.0) != answers
    for record, (answer,), datum in zip(records, answers, batch.data, strict=False):
        prompt = prompts.student(record).length
        weights = np.asarray(datum.loss_fn_inputs["weights"].data).reshape(-1, 4)
        targets = np.asarray(datum.loss_fn_inputs["target_tokens"].data).reshape(-1, 4)
        assert np.all(weights[: prompt - 1 + 2] == 0)
        given = prompts.teacher(record).to_ints()
        assert record.answer in prompts.tokenizer.decode(given)
        for place in range(2, len(answer)):
            scored = student.base.sample(
                tinker.ModelInput.from_ints([*given, *answer[: place + 1]]), 1,
                tinker.SamplingParams(max_tokens=1), include_prompt_logprobs=True,
                topk_prompt_logprobs=4,
            ).result()  # fmt: skip
            tokens, logprobs = zip(*scored.topk_prompt_logprobs[-1], strict=True)
            shares = np.exp(logprobs) / np.exp(logprobs).sum()
            assert tuple(targets[prompt - 1 + place]) == tokens
            np.testing.assert_allclose(weights[prompt - 1 + place], shares, rtol=1e-5, atol=1e-7)


def test_opsds_datums_weigh_the_tokens_of_a_batch_alike(
    student: methods.Student, records: list[Record], prompts: Prompts
) -> None:
    settings = methods.with_settings(["opsd"], ["opsd.beta=0.25", "opsd.top_k_loss=7"])["opsd"]
    batch = methods.METHODS["opsd"].batch(student, settings, records[:3])
    assert batch.loss_fn == "generalized_jsd" and batch.grad_clip_norm == 1
    assert batch.loss_fn_config == {"teacher": "base", "beta": 0.25, "top_k": 7, "temperature": 1.0}
    weights = np.concatenate([datum.loss_fn_inputs["weights"].data for datum in batch.data])
    assert weights.sum() == pytest.approx(1) and len(np.unique(weights)) == 2
    for record, datum in zip(records, batch.data, strict=False):
        given = prompts.teacher(record).to_ints()
        assert list(datum.loss_fn_inputs["teacher_tokens"].data[: len(given)]) == given


def test_a_batch_whose_answers_are_empty_takes_no_step(
    student: methods.Student, records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(methods.Student, "answers", lambda self, asked, *_: [[[]]] * len(asked))
    for name in ("sdft", "opsd", "sdpo"):
        assert methods.METHODS[name].batch(student, defaults(name), records[:2]).data == []


def test_sdpos_teacher_has_read_a_right_attempt_and_what_was_said_of_a_wrong_one(
    student: methods.Student,
    records: list[Record],
    prompts: Prompts,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of three questions one has two right attempts and a wrong one, one has one right attempt,
    and one has none."""
    monkeypatch.chdir(folder)
    asked, wrong = records[:3], prompts.tokenizer.encode("Action: no<|im_end|>")
    right = [prompts.tokenizer.encode(record.answer + "<|im_end|>") for record in asked]
    groups = [[wrong, right[0], right[0]], [right[1], wrong, []], [wrong, wrong, wrong]]
    monkeypatch.setattr(methods.Student, "answers", lambda self, asked, _, count: groups)
    batch = methods.METHODS["sdpo"].batch
    settings = defaults("sdpo")

    def taught(made: methods.TrainingBatch) -> list[str]:
        decode = prompts.tokenizer.decode
        return [decode(list(datum.loss_fn_inputs["teacher_tokens"].data)) for datum in made.data]

    silent = batch(student, settings, asked)
    assert silent.loss_fn_config["teacher"] == "ema" and silent.loss_fn == "generalized_jsd"
    weights = np.concatenate([datum.loss_fn_inputs["weights"].data for datum in silent.data])
    assert weights.sum() == pytest.approx(1)
    first, second, third, fourth = taught(silent)  # the right one alone has nobody to learn from
    shown = data.demonstration_prompt(asked[0].question, asked[0].answer)
    for text, answer in (
        (first, "Action: no"),
        (second, asked[0].answer),
        (third, asked[0].answer),
    ):
        assert shown in text and text.endswith(f"{answer}<|im_end|>")
    shown = data.demonstration_prompt(asked[1].question, asked[1].answer)
    assert shown in fourth and fourth.endswith("Action: no<|im_end|>")

    judge = partial(measure.judge, measure.find_scorer("scorers:telling"))
    told = taught(batch(replace(student, judge=judge), settings, asked))
    assert len(told) == 7 and [text.count("look again: Action: no") for text in told] == [
        *(1, 0, 0), 1, *(1, 1, 1),
    ]  # fmt: skip
    assert asked[0].answer in told[0] and asked[2].answer not in told[-1]
    assert batch(replace(student, judge=judge, context=40), settings, asked).data == []


def test_without_feedback_sdpos_prompt_is_sdfts() -> None:
    assert methods.retry_prompt("why?", "so.", "no", "") == data.demonstration_prompt("why?", "so.")


def test_the_log_probability_is_that_of_the_trainers_cross_entropy(
    service: tinker.ServiceClient, student: methods.Student, records: list[Record], prompts: Prompts
) -> None:
    found = measure.measure(student.base, prompts, records[:4], max_tokens=32, scorer=None)
    client = service.create_lora_training_client("demo", rank=1).result()
    data = [prompts.supervised_datum(record) for record in records[:4]]
    forward = client.forward(data, "cross_entropy").result()
    for row, output, datum in zip(found.rows, forward.loss_fn_outputs, data, strict=True):
        logprobs = np.asarray(output["logprobs"].data)
        weights = np.asarray(datum.loss_fn_inputs["weights"].data)
        assert row["logprob"] == pytest.approx(float(logprobs[weights > 0].sum()), abs=1e-4)
        assert row["tokens"] == int((weights > 0).sum())


def test_a_plain_text_has_a_log_probability_and_nothing_else(
    service: tinker.ServiceClient, student: methods.Student, records: list[Record], prompts: Prompts
) -> None:
    text = Record((), records[5].question, 7, {})
    both = measure.measure(student.base, prompts, [text, records[0]], max_tokens=8, scorer=None)
    alone = measure.measure(student.base, prompts, [text], max_tokens=8, scorer=None)
    asked = measure.measure(student.base, prompts, records[:1], max_tokens=8, scorer=None)
    assert alone.measures.keys() == {"text"}
    assert both.measures == asked.measures | alone.measures
    assert both.rows[0].keys() == {"line", "logprob", "tokens"} and both.rows[0]["line"] == 7
    tokens = np.asarray(prompts.tokenizer.encode(text.answer))
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)
        },
    )  # fmt: skip
    client = service.create_lora_training_client("demo", rank=1).result()
    loss = client.forward([datum], "cross_entropy").result().metrics["loss:sum"]
    assert alone.measures["text"] == pytest.approx(-loss / (len(tokens) - 1), rel=1e-4)


def test_a_teacher_may_read_the_answer_as_an_earlier_turn(
    records: list[Record], prompts: Prompts
) -> None:
    (question,) = records[0].messages
    turns = [question, {"role": "assistant", "content": records[0].answer}, question]
    expected = prompts.renderer.build_generation_prompt(turns).to_ints()
    assert Prompts(demo.MODEL, demo.RENDERER, "turn").teacher(records[0]).to_ints() == expected
    assert prompts.teacher(records[0]).to_ints() != expected


def test_what_the_base_model_knows_is_measured_as_right(
    student: methods.Student, folder: Path, prompts: Prompts
) -> None:
    known = read_records(folder / "old.jsonl")
    found = measure.measure(student.base, prompts, known, max_tokens=32, scorer=None)
    assert found.measures["exact"] == 1
    cut = measure.measure(student.base, prompts, known, max_tokens=4, scorer=None)
    assert cut.measures["exact"] == 0 and cut.measures["logprob"] == found.measures["logprob"]


def test_sdpo_takes_steps_with_an_average_of_its_weights(
    service: tinker.ServiceClient, folder: Path, tmp_path: Path
) -> None:
    """With a scorer that says something of every answer, each is trained on."""
    settings = defaults("sdpo") | {"group_size": 2, "success": 2.0}
    made = Plan(
        model="demo", data=str(folder / "new.jsonl"), test=None, retain=str(folder / "old.jsonl"),
        hold_out=4, renderer=demo.RENDERER, scorer=None, steps=2, batch=2, rank=2, max_tokens=8,
        context=1024, methods={"sdpo": settings}, digests={}, wanted=["sdpo"],
        learning_rates=[1e-3], seeds=1,
    )  # fmt: skip
    train_on, _ = runner.questions(made)
    trained = training.train(
        service, made, PlannedRun("sdpo", 1e-3, 0), Prompts(demo.MODEL, demo.RENDERER), train_on,
        lambda text, expected, record: (0.0, "no"),
    )  # fmt: skip
    assert [step["datums"] for step in trained.steps] == [4, 4]
    assert all(step["loss:sum"] > 0 and step["grad_norm"] > 0 for step in trained.steps)


def test_a_scorer_must_return_a_number(
    student: methods.Student, folder: Path, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    known = read_records(folder / "old.jsonl")
    with pytest.raises(ValueError, match=r"should return a number, .* the answer to line 1 it ret"):
        measure.measure(
            student.base, prompts, known, max_tokens=4, scorer=measure.find_scorer("scorers:words")
        )


def test_the_scorer_of_the_docs_works() -> None:
    page = (ROOT / "docs" / "compare.md").read_text()
    found: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], found)
    record = Record(({"role": "user", "content": "1 + 6?"},), "It is 7.", 1, {})
    judge = partial(measure.judge, found["last_number"], expected=record.answer, record=record)
    said = {text: judge(text) for text in ("7.0", "8", "?")}
    assert said == {
        "7.0": (1.0, ""),
        "8": (0.0, "8 is not the number."),
        "?": (0.0, "There is no number in it."),
    }


def test_a_scorer_that_returns_no_number_ends_the_runner_with_a_sentence(
    service: tinker.ServiceClient,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    made = Plan(
        model="demo", data="new.jsonl", test=None, retain="old.jsonl", hold_out=4,
        renderer=demo.RENDERER, scorer="scorers:words", steps=1, batch=2, rank=2, max_tokens=8,
        context=1024, methods={"sft": {}}, digests={}, wanted=["sft"], learning_rates=[1e-3],
    )  # fmt: skip
    plan.begin(tmp_path, made)
    monkeypatch.setattr(sys, "argv", ["runner", str(tmp_path)])
    monkeypatch.setattr(tinker, "ServiceClient", lambda: contextlib.nullcontext(service))
    assert runner.main() == 1 and results(tmp_path) == {}
    told = capsys.readouterr().err
    assert told.startswith("tinsmith: the scorer should return a number") and told.count("\n") == 1


def test_exact_is_the_last_box_where_there_is_one() -> None:
    assert measure.is_exact(" so. ", "so.") and not measure.is_exact("so", "so.")
    assert measure.is_exact("I think \\boxed{7}", "1 + 6 = \\boxed{7}")
    assert not measure.is_exact("7 or so", "1 + 6 = \\boxed{7}")


def test_a_run_that_fails_is_told_and_the_others_are_done(
    service: tinker.ServiceClient,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The server refuses a loss that is not finite; here, an adapter's rank."""
    made = Plan(
        model="demo", data=str(folder / "new.jsonl"), test=None, retain=str(folder / "old.jsonl"),
        hold_out=4, renderer=demo.RENDERER, scorer=None, steps=1, batch=2, rank=2, max_tokens=8,
        context=1024, methods={"sft": {}}, digests={}, wanted=["sft"], learning_rates=[1e-3],
        seeds=2,
    )  # fmt: skip
    plan.begin(tmp_path, made)
    real = runner.train

    def train(service: Any, made: Plan, run: PlannedRun, *rest: Any) -> Any:
        return real(service, replace(made, rank=-1) if run.seed == 0 else made, run, *rest)

    monkeypatch.setattr(runner, "train", train)
    assert runner.do(lambda: contextlib.nullcontext(service), tmp_path) == 1
    assert results(tmp_path).keys() == {"base", "sft-lr0.001-seed1"}
    told = capsys.readouterr()
    assert "sft, learning rate 0.001, seed 0 failed: " in told.err and "rank" in told.err
    assert "[3/3] sft, learning rate 0.001, seed 1: learned exact" in told.out


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("It is 4.", "It is 4."),
        ("<think>\nhm\n</think>\n\n4", "4"),
        (CALL := '<tool_call>\n{"name": "f", "arguments": {"x": "a"}}\n</tool_call>', CALL),
        (f"<think>\nhm\n</think>\n\nI look.\n{CALL}", f"I look.\n{CALL}"),
        (LEFT := '<tool_call>\n{"name": "f", "argu', LEFT),
    ],
)
def test_who_answers_as_the_file_does_is_right(answer: str, text: str) -> None:
    """Token by token, with calls, and with thoughts, which nobody compares."""
    prompts = Prompts(demo.MODEL, "qwen3")
    record = Record(({"role": "user", "content": "What is it?"},), answer, 1, {})
    tokens, marks = prompts.supervised(record)
    own = [one for one, mark in zip(tokens.to_ints(), marks, strict=True) if mark]
    assert prompts.text(own) == prompts.expected(record) == text
    seen: list[tuple[str, str]] = []

    def scorer(found: str, expected: str, row: Any) -> float:
        seen.append((found, expected))
        return 1.0

    class Perfect:
        def sample(self, *_: Any) -> Any:
            return done(SimpleNamespace(sequences=[SimpleNamespace(tokens=own)]))

        def compute_logprobs(self, asked: tinker.ModelInput) -> Any:
            return done([None] + [0.0] * (asked.length - 1))

    found = measure.measure(Perfect(), prompts, [record], max_tokens=64, scorer=scorer)
    assert found.measures == {"exact": 1, "score": 1, "logprob": 0}
    assert seen == [(text, text)]


def done(value: Any) -> Any:
    return SimpleNamespace(result=lambda: value)


def test_texts_alone_are_what_is_kept(tmp_path: Path) -> None:
    place = tmp_path / "runs" / "base"
    place.mkdir(parents=True)
    result = {
        "method": "base", "learning_rate": None, "seed": None, "seconds": 1.0, "sampler_path": None,
        "learned": {"exact": 0.5, "logprob": -1.0}, "kept": {"text": -3.0},
    }  # fmt: skip
    plan.write_json(place / plan.RESULT, result)
    assert plan.finished(tmp_path) == {"base": result}
    plan.write_json(place / plan.RESULT, result | {"kept": {"texts": -3.0}})
    with pytest.raises(ValueError, match=r"kept is \{'texts': -3.0\}"):
        plan.finished(tmp_path)


def test_a_method_that_would_train_on_no_token_is_refused() -> None:
    settings = methods.with_settings(["sdft", "opsd"], [])
    methods.check_skipped(settings, 4)
    with pytest.raises(ValueError, match=r"sdft\.skip_first_tokens is 3, and --max-tokens 3: no"):
        methods.check_skipped(settings, 3)
