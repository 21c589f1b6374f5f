"""`tinsmith serve` as a process: several models, a limit of memory, its end in the middle of work,
a reader that goes away."""

import contextlib
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from conftest import Wire, make_datum
from support.small_run import PROMPT, sample
from tinsmith.cli.commands import main
from tinsmith.demo.demo import MODEL
from tinsmith.server.service.config import ServerConfig

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


@contextlib.contextmanager
def killed(process: subprocess.Popen[str]) -> Iterator[None]:
    """Ends a process in any case."""
    try:
        yield
    finally:
        process.kill()


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT))
def test_a_signal_ends_it_soon_whatever_runs_and_clients_are_told(tmp_path, number) -> None:
    """Minutes of training, minutes of sampling, clients that wait for both, and one that has
    promised a body and sends none."""
    command = [
        *TINSMITH, "serve", f"demo={MODEL}", "--port", "0", "--device", "cpu", "--threads", "1",
    ]  # fmt: skip
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with (
        ThreadPoolExecutor() as pool,
        subprocess.Popen(command, cwd=tmp_path, **pipes) as process,
        killed(process),
    ):
        url = re.findall(r"http://\S+", process.stdout.readline())[0]
        wire, ids = Wire(url), np.full(2000, 7).tolist()
        run = wire.create("demo")
        session = run.partition(":")[0]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "demo"}
        sampler = wire.post("/create_sampling_session", **body)["sampling_session_id"]

        def sample(seq: int, count: int, tokens: int) -> dict:
            prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
            params = {"max_tokens": tokens, "seed": 1}
            body = {"sampling_session_id": sampler, "seq_id": seq, "num_samples": count}
            return wire.post("/asample", **body, prompt=prompt, sampling_params=params)

        training = wire.forward_backward(run, 1, [make_datum(ids, ids)] * 200)
        wire.result(sample(1, 1, 4))  # does not wait for it
        polls = [pool.submit(wire.poll, promise) for promise in (training, sample(2, 4000, 900))]
        assert not any(poll.done() for poll in polls)
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as silent:
            silent.sendall(b"POST /api/v1/asample HTTP/1.1\r\nContent-Length: 1000\r\n\r\n{")
            process.send_signal(number)
            assert process.wait(timeout=60) == 0
        for poll in polls:
            told = poll.result(timeout=60).json()
            assert told["category"] == "server"
            assert told["error"].startswith("the server is shutting down: once it is back, go on ")
            assert told["error"].endswith("create_training_client_from_state_with_optimizer")
        assert "Traceback" not in process.stderr.read()


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
    told: list[ServerConfig] = []

    def backend(config: ServerConfig) -> None:
        told.append(config)
        raise ValueError("nothing is to be served")

    monkeypatch.setattr("tinsmith.server.backend.Backend", backend)
    options = f"--model m={tiny_model_dir} --checkpoints {tmp_path} --device cpu --dtype float32"
    options += " --weights int8 --threads 3 --memory 2G --seed 5 --expire --checkpoints-max 1G"
    options += " --no-weights-copy --image-tokens 900"
    wanted: dict[str, Any] = {"checkpoints": tmp_path, "device": "cpu"}
    wanted |= {
        "dtype": "float32",
        "weights": "int8",
        "weights_copy": False,
        "threads": 3,
        "memory": 2 << 30,
        "seed": 5,
        "expire": True,
        "image_tokens": 900,
    }
    wanted["checkpoints_max"] = 1 << 30
    if command == "serve":
        options += " --host 127.0.0.2 --port 7 --no-preload --api-key tml-0123456789"
        options += " --allow-host a.example --allow-origin https://b.example"
        wanted |= {"host": "127.0.0.2", "port": 7, "preload": False, "api_key": "tml-0123456789"}
        wanted |= {"allow_hosts": ["a.example"], "allow_origins": ["https://b.example"]}
    wanted["share_checkpoints"] = command == "run"  # a folder that serve is given is its own
    rest = [__file__] if command == "run" else []
    assert main([command, *options.split(), *rest]) == 1
    assert told == [ServerConfig({"m": tiny_model_dir}, **wanted)]
