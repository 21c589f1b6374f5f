"""Which models a recipe asks for, by its arguments and source; and what is said without them."""

import subprocess
import sys
from pathlib import Path

import pytest
from tinker_cookbook.recipes import sl_basic
from tinsmith.cli.recipe_models import asks_for_help, no_model, wanted_models
from tinsmith.demo import demo

HERE = demo.MODEL.resolve()
RECIPE = """
import chz
STUDENT = "org/student"
@chz.chz
class Config:
    model_name: str = STUDENT
    teacher_model: str = "org/teacher:peft:262144"
    grader_llm_name: str = chz.field(default="org/grader", doc="a/b")
    embedding_model: str = "no-name-of-a-hub"
    log_path: str = "some/folder"
def main():
    client.create_sampling_client(base_model="org/answerer")
"""


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    file = tmp_path / "recipe.py"
    file.write_text(RECIPE)
    return str(file)


def test_a_recipes_own_models_are_found_in_its_arguments(tmp_path: Path) -> None:
    folder = str(demo.MODEL)
    for key in ("model_name", "teacher_model", "--grader_llm_name", "base.model_name"):
        command = ["recipe.py", f"{key}={folder}", "a=b", f"{key}_path={tmp_path}"]
        assert wanted_models(command).found == {folder: HERE}, key
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")  # a recipe's log, which is no model
    wanted = wanted_models(["recipe.py", f"log_path={run}", "model_name=nothing/here"])
    assert (wanted.found, wanted.missing) == ({}, ("nothing/here",))


def test_the_defaults_are_read_from_the_recipes_source(recipe: str) -> None:
    names = {"org/student", "org/teacher", "org/grader", "org/answerer"}
    assert set(wanted_models([recipe]).missing) == names
    given = wanted_models([recipe, f"model_name={demo.MODEL}", "x.teacher_model=org/other"])
    assert given.found == {str(demo.MODEL): HERE}
    assert set(given.missing) == {"org/other", "org/grader", "org/answerer"}


def test_a_default_that_is_on_this_machine_is_served(
    recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without the suffix that says a context, which the server reads itself."""
    cached = tmp_path / "cache" / "models--org--teacher"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc\n")
    (cached / "snapshots").mkdir()
    (cached / "snapshots" / "abc").symlink_to(demo.MODEL)
    assert wanted_models([recipe]).found == {"org/teacher": cached / "snapshots" / "abc"}


def test_a_source_that_cannot_be_read_is_pythons_to_tell(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def (")
    for command in ([str(broken)], ["absent.py"], ["-m", "no.such.module"]):
        assert wanted_models(command).missing == ()
    assert "--model NAME=FOLDER" in no_model(["absent.py"], ())


@pytest.mark.parametrize("name", ("no.such.module", "tinker_cookbook.recipes.sl_basik", "json"))
def test_a_module_that_is_not_there_wants_no_model(name: str) -> None:
    assert no_model(["-m", name], ()) == f"there is no module {name!r} to run"


def test_help_is_asked_for_by_the_recipes_own_arguments() -> None:
    assert asks_for_help(["-m", "recipe", "--help"]) and asks_for_help(["recipe.py", "--help"])
    assert asks_for_help(["recipe.py", "-h"]) and not asks_for_help(["recipe.py", "a=-h"])
    assert not asks_for_help(["-m", "recipe", "text=--help"])


def run(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tinsmith.cli", "run", "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120)


def test_a_recipe_without_its_model_says_which_and_the_two_ways_on(tmp_path: Path) -> None:
    ended, name = run(sl_basic.__name__, cwd=tmp_path), sl_basic.DEFAULT_MODEL_NAME
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert f"the recipe wants {name}, " in ended.stderr
    assert f"tinsmith pull {name}, or run --pull)" in ended.stderr
    assert f"tinsmith run --model {name}=FOLDER -m {sl_basic.__name__} ..." in ended.stderr
    assert not list(tmp_path.glob("*checkpoints*"))


def test_a_recipes_help_needs_no_model(tmp_path: Path) -> None:
    """chz shows it in an exception's text, with the recipe's own defaults."""
    ended = run(sl_basic.__name__, "--help", cwd=tmp_path)
    shown = ended.stdout + ended.stderr
    assert "lora_rank" in shown and f"'{sl_basic.DEFAULT_MODEL_NAME}'" in shown
    assert "no model to serve" not in shown
