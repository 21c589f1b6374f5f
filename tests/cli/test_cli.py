"""The ways in: the command line, `tinsmith run`, and `tinsmith.serve` in a notebook."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import tinsmith
from conftest import make_datum
from tinsmith import _core
from tinsmith.cli import commands
from tinsmith.engine.devices import _say_cpu, choose_device
from tinsmith.engine.worker import devices


def test_serve_works_inside_a_running_event_loop(tiny_model_dir, tmp_path):
    before = set(threading.enumerate())  # a server that other tests share may be there already

    async def main() -> float:
        with (
            tinsmith.serve({"tiny": tiny_model_dir}, checkpoints=tmp_path, device="cpu") as backend,
            backend.service_client() as service,
        ):
            client = await service.create_lora_training_client("tiny", rank=4)
            return (await client.forward([make_datum([1, 2], [2, 3])], "cross_entropy")).metrics[
                "loss:sum"
            ]

    assert asyncio.run(main()) > 0
    left = set(threading.enumerate()) - before
    assert not [t for t in left if t.name.startswith("tinsmith") and not t.daemon]


def test_import_is_light():
    code = "import sys, tinsmith; print(sorted(m for m in sys.modules if '.' not in m))"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for heavy in ("tinker", "starlette", "uvicorn", "torch", "transformers", "tokenizers"):
        assert f"'{heavy}'" not in names.stdout


def run_cli(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tinsmith.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120)


def test_run_serves_the_recipes_model_and_passes_its_exit_code_on(tiny_model_dir, tmp_path):
    script = tmp_path / "recipe.py"
    script.write_text(
        "import sys, tinker\n"
        "name = sys.argv[1].partition('=')[2]\n"
        "with tinker.ServiceClient() as service:\n"
        "    client = service.create_lora_training_client(name, rank=2).result()\n"
        "    print('rank', client.get_info().lora_rank)\n"
        "sys.exit(7)\n"
    )
    done = run_cli("run", str(script), f"model_name={tiny_model_dir}", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (7, "rank 2\n"), done.stderr
    assert re.search(r"the page at http://127\.0\.0\.1:\d+/ shows the run", done.stderr)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGABRT, 7), (signal.SIGTERM, 143)])
def test_run_returns_the_code_of_a_recipe_after_which_python_crashes(
    number, code, tiny_model_dir, tmp_path, monkeypatch
):
    """What it printed is there too. A signal from outside is no crash."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    script = tmp_path / "recipe.py"
    script.write_text(
        "import io, os, sys\n"
        "class Output(io.TextIOWrapper):\n"
        "    def flush(self):\n"
        f"        if sys.is_finalizing(): os.kill(os.getpid(), {number})\n"
        "        super().flush()\n"
        "sys.stdout = Output(open(1, 'wb'))\n"
        "print('finished')\n"
        "sys.exit(7)\n"
    )
    done = run_cli("run", f"--model=tiny={tiny_model_dir}", str(script), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "finished\n"), done.stderr
    crashed = "exit code 7, then Python crashed while shutting down (SIGABRT)" in done.stderr
    assert crashed == (number == signal.SIGABRT)


def test_run_calls_a_recipe_that_crashes_failed(tiny_model_dir, tmp_path):
    """Also where a child that it forked has ended well, and where all is done but the callbacks."""
    script = tmp_path / "recipe.py"
    model = f"--model=tiny={tiny_model_dir}"
    script.write_text(
        "import atexit, os, sys\n"
        "atexit.register(os.abort)\n"
        "if not os.fork():\n"
        "    atexit.unregister(os.abort)\n"
        "    sys.exit(0)\n"
        "os.wait()\n"
    )
    done = run_cli("run", model, str(script), cwd=tmp_path)
    assert done.returncode == 128 + signal.SIGABRT, done.stderr


def test_cli_errors_are_one_sentence(tiny_model_dir, tmp_path, server):
    port = server.url.rpartition(":")[2]
    model = f"--model=tiny={tiny_model_dir}"
    for arguments, sentence in (
        (("serve", "--model", "tiny=/nowhere"), "there is no model '/nowhere'"),
        (("serve", model, "--port", port), "the port is in use"),
        (("run", "-m", "nothing"), "there is no module 'nothing' to run"),
        (("run", "nothing.py"), "there is no script 'nothing.py'"),
        (("info", "/nowhere"), "there is no model '/nowhere'"),
    ):
        done = run_cli(*arguments, cwd=tmp_path)
        assert done.returncode == 1
        assert sentence in done.stderr and "Traceback" not in done.stderr
    done = run_cli("info", str(tiny_model_dir), "--tokens", "64", "--rank", "4", cwd=tmp_path)
    assert done.returncode == 0 and "base weights" in done.stdout, done.stderr
    assert "fills the KV cache and keeps it for prompts that begin alike" in done.stdout
    assert "sums of a call's gradients" in done.stdout


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 5), (signal.SIGTERM, 143)])
def test_a_signal_reaches_the_recipe(number, code, tiny_model_dir, tmp_path):
    script = tmp_path / "recipe.py"
    script.write_text(
        "import sys, threading\n"
        "try:\n"
        "    print('started', flush=True)\n"
        "    threading.Event().wait()\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(5)\n"
    )
    command = [sys.executable, "-m", "tinsmith.cli", "run", f"--model=tiny={tiny_model_dir}"]
    process = subprocess.Popen(
        [*command, str(script)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "started\n"
        process.send_signal(number)
        assert process.wait(timeout=60) == code


def test_sigterm_is_the_callers_again_when_a_recipe_has_ended(
    tiny_model_dir, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script, before = tmp_path / "recipe.py", signal.getsignal(signal.SIGTERM)
    script.write_text("")
    assert commands.main(["run", f"--model=tiny={tiny_model_dir}", str(script)]) == 0
    assert signal.getsignal(signal.SIGTERM) == before


def test_auto_is_the_cpu_and_says_its_threads_and_no_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_core, "devices", lambda name=None: {"cuda": "cuda: it was not built"})
    _say_cpu.cache_clear()
    for expected in ("tinsmith computes on the CPU, 3 threads\n", ""):  # it is said once
        assert choose_device("auto", 3) == "cpu"
        assert capsys.readouterr().err == expected
    assert choose_device("auto") == "cpu"
    cores = len(os.sched_getaffinity(0))
    assert f"on the CPU, {cores} thread" in capsys.readouterr().err
    monkeypatch.setattr(_core, "devices", lambda name=None: {"cuda": ""})
    assert choose_device("auto") == "cpu"
    assert "--device cuda would take the GPU" in capsys.readouterr().err
    _say_cpu.cache_clear()


def test_a_device_that_is_not_there_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="there is no device 'tpu'"):
        choose_device("tpu")
    reason = devices()["cuda"]
    if reason:
        with pytest.raises(RuntimeError, match="the device cuda can't be used: "):
            choose_device("cuda")
