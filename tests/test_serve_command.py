"""`tinsmith serve` as a process: several models, a limit of memory, a reader that goes away."""

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tinker
from small_run import PROMPT, sample
from tinsmith.cli import main

TINSMITH = [sys.executable, "-m", "tinsmith.cli"]


def test_models_are_named_one_after_another(tiny_model_dir: Path, tmp_path: Path) -> None:
    teacher = shutil.copytree(tiny_model_dir, tmp_path / "teacher")
    command = [
        *TINSMITH, "serve", f"student={tiny_model_dir}", str(teacher), "--model",
        f"third={teacher}", "--port", "0", "--memory", "40M", "--device", "cpu",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stdout is not None
    with process.stdout:
        line = process.stdout.readline()
        assert line.startswith(f"tinsmith serves student, {teacher}, third at http://"), line
        url = re.findall(r"http://\S+", line)[0]
        rest = tinker.RestClient(base_url=url, api_key="tml-local")
        told = rest.get_server_capabilities().result().supported_models
        assert [item.model_name for item in told] == ["student", str(teacher), "third"]
        with tinker.ServiceClient(base_url=url, api_key="tml-local") as service:
            drawn = [
                sample(service.create_sampling_client(base_model=name).result(), seed=1)
                for name in ("student", str(teacher))
            ]
            assert drawn[0] == drawn[1] and len(PROMPT.to_ints()) == 5
            first = service.create_lora_training_client("third", rank=4)
            assert first.result().get_info().model_data.model_name == "third"
            second = service.create_lora_training_client("third", rank=1024)
            with pytest.raises(tinker.RequestFailedError, match=r"of the 40\.00 MiB that"):
                second.result()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0


def test_no_model_and_no_amount_of_memory_are_sentences(tiny_model_dir, tmp_path) -> None:
    for arguments, told in (
        ((), "tinsmith: there is no model to serve: name one"),
        ((f"m={tiny_model_dir}", "--memory", "much"), "tinsmith: 'much' is not an amount of"),
        ((f"m={tiny_model_dir}", "--memory", "9K"), "of the 9.00 KiB that the server may use"),
    ):
        command = [*TINSMITH, "serve", *arguments, "--port", "0"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
        assert done.returncode == 1 and told in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = " ".join([*TINSMITH, "doctor"])
    for reader in ("true", "head -n 1"):
        done = subprocess.run(
            f"{command} | {reader}", shell=True, capture_output=True, text=True, timeout=60
        )
        assert done.stderr == "" and done.stdout in ("", done.stdout.partition("\n")[0] + "\n")


@pytest.mark.parametrize("command", ["serve", "run"])
def test_each_option_reaches_the_server(
    command: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {}

    def backend(models: dict[str, Path], **options: Any) -> None:
        told.update(options, models=list(models))
        raise ValueError("nothing is to be served")

    monkeypatch.setattr("tinsmith.server.backend.Backend", backend)
    options = f"--model m={tiny_model_dir} --checkpoints {tmp_path} --device cpu --dtype float32"
    options += " --threads 3 --memory 2G --seed 5"
    wanted: dict[str, Any] = {"models": ["m"], "checkpoints": tmp_path, "device": "cpu"}
    wanted |= {"dtype": "float32", "threads": 3, "memory": 2 << 30, "seed": 5}
    if command == "serve":
        options += " --host 127.0.0.2 --port 7 --no-preload"
        wanted |= {"host": "127.0.0.2", "port": 7, "preload": False}
    rest = ["recipe.py"] if command == "run" else []
    assert main([command, *options.split(), *rest]) == 1
    assert told == wanted
