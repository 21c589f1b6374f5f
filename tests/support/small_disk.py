"""A program for test_disk.py: a server whose checkpoints are on a disk of one megabyte, first full,
then read-only. It mounts the disk itself, so it runs in a mount namespace of its own:

    unshare -rm python tests/support/small_disk.py MODEL FOLDER

It prints a JSON object of what clients were told, and of what was intact afterwards."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}

import httpx
import numpy as np
import tinker
from tinsmith.engine.errors import sentence
from tinsmith.server.backend import Backend
from tinsmith.server.service.config import ServerConfig

from support.small_run import ADAM, make_client, make_data, read, train


def told(call) -> str:
    """What a call that must fail says."""
    try:
        call().result(timeout=60)
    except (tinker.RequestFailedError, tinker.APIStatusError) as error:
        return str(error)
    return "it did not fail"


def free(disk: Path) -> int:
    """Bytes that can still be written there."""
    return os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize


class Log(logging.Handler):
    """The warnings of the server's log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """One more."""
        self.lines.append(record.getMessage())


def ready(backend: Backend) -> list:
    """What /readyz says."""
    reply = httpx.get(f"{backend.url}/readyz")
    return [reply.status_code, reply.json().get("detail")]


def asked(backend: Backend, path: str, **body: object) -> list:
    """The status and the sentence of a request."""
    reply = httpx.post(f"{backend.url}/api/v1/{path}", json=body)
    return [reply.status_code, reply.json().get("detail")]


def fill(model: Path, disk: Path) -> tuple[dict, str, np.ndarray]:
    """What clients are told while the disk gets full; the good checkpoint, and what it gives."""
    found: dict = {}
    log = Log()
    logging.getLogger("tinsmith").addHandler(log)
    with (
        Backend(
            ServerConfig({"tiny": model}, checkpoints=disk, device="cpu", threads=1)
        ) as backend,
        backend.service_client() as service,
    ):
        client = make_client(service)
        train(client, 1)
        good = client.save_state("good").result().path
        expected = read(client)
        found["before"] = ready(backend)
        (disk / "ballast").write_bytes(b"x" * (free(disk) - 60_000))
        train(client, 1)
        found["full"] = told(lambda: client.save_state("more"))
        found["overwrite"] = told(lambda: client.save_state("good", overwrite=True))
        (disk / "ballast2").write_bytes(b"x" * (free(disk) - 4096))
        found["ready"] = ready(backend)
        for _ in range(100):  # until the database needs a page that there is not
            found["session"] = asked(backend, "create_session", user_metadata={"k": "v" * 4096})
            if found["session"][0] != 200:
                break
        large = {"k": "v" * 50_000}
        found["run"] = told(
            lambda: service.create_lora_training_client("tiny", rank=2, user_metadata=large)
        )
        client.forward_backward(make_data(), "cross_entropy").result()
        found["trains_on"] = client.optim_step(ADAM).result().metrics["grad_norm"] > 0
    found["log"] = log.lines
    return found, good, expected


def main(model: Path, disk: Path) -> dict:
    """See the file's header."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    subprocess.run(mount, check=True)
    found, good, expected = fill(model, disk)
    for file in disk.glob("ballast*"):
        file.unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        Backend(ServerConfig({"tiny": model}, checkpoints=disk, device="cpu", threads=1)).close()
    except OSError as error:
        found["read_only"] = sentence(error)
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    found["left"] = sorted(file.name for file in disk.glob("*/weights/*"))
    with (
        Backend(
            ServerConfig({"tiny": model}, checkpoints=disk, device="cpu", threads=1)
        ) as backend,
        backend.service_client() as service,
    ):
        rest = tinker.RestClient(base_url=backend.url, api_key="tml-local")
        listed = rest.list_user_checkpoints().result().checkpoints
        found["listed"] = [item.tinker_path == good for item in listed]
        again = service.create_training_client_from_state_with_optimizer(good).result()
        found["intact"] = bool(np.array_equal(read(again), expected))
        found["saves_again"] = again.save_state("more").result().path.endswith("/more")
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))))
