"""How `tinsmith run` starts a recipe: as `python` would, and with the tokenizers of its models."""

import json
import subprocess
import sys
from pathlib import Path

from tinsmith.demo import demo
from tinsmith.run import recipe_models


def launch(*arguments: str, cwd: Path) -> str:
    command = [sys.executable, "-m", "tinsmith.launch", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=True).stdout


def test_a_script_and_a_module_start_as_python_starts_them(tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "neighbour.py").write_text("here = 'found'\n")
    text = "import sys, neighbour\nprint(__name__, neighbour.here, sys.argv[1:], __file__)\n"
    (scripts / "recipe.py").write_text(text)
    for command, folder in ((["scripts/recipe.py"], tmp_path), (["-m", "recipe"], scripts)):
        ran = subprocess.run(
            [sys.executable, *command, "a=1", "-b"],
            capture_output=True, text=True, cwd=folder, check=True,
        )  # fmt: skip
        assert launch(*command, "a=1", "-b", cwd=folder) == ran.stdout
        assert ran.stdout.startswith("__main__ found ['a=1', '-b']")


def test_a_name_of_another_model_finds_the_tokenizer_of_its_folder(tmp_path: Path) -> None:
    """Offline, where the hub's tokenizer of that name can't be had."""
    ended = subprocess.run(
        [
            sys.executable, "-m", "tinsmith.cli", "run", "--model", f"Qwen/Qwen3-8B={demo.MODEL}",
            "-m", "tinker_cookbook.recipes.decisions.demo", "model_name=Qwen/Qwen3-8B",
        ],
        input="What does it cost?\n\n", capture_output=True, text=True, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    shown = ended.stdout[ended.stdout.index("{") : ended.stdout.rindex("}") + 1]
    assert abs(sum(json.loads(shown).values()) - 1) < 1e-3


def test_a_recipes_own_models_are_found_in_its_arguments(tmp_path: Path) -> None:
    folder = str(demo.MODEL)
    assert recipe_models(
        [f"model_name={folder}", f"teacher_model={folder}", f"grader_llm_name={folder}", "a=b"]
    ) == {folder: demo.MODEL.resolve()}
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")  # a recipe's log, which is no model
    assert recipe_models([f"log_path={run}", "model_name=nothing/here", "-m"]) == {}
