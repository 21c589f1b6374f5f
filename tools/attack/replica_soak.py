"""Attacks a server with replicas: in each training that a client does there is one fault, and every
reply must have the bits of a training without one.

The server is a process of its own with two more replicas. A training is the SDK's loop: two
forward_backward of several micro-batches and an optim_step, samples from the new weights, a
checkpoint every other step, and one more step from a checkpoint that is loaded back. It goes on
from its last checkpoint where the server was started again, as docs/resume.md says. What it must
get is known from a server of one process. Meanwhile one of FAULTS happens, at a moment within the
time that the training takes. An hour of them:

    python -m tools.attack replica_soak --seconds 3600

A replica is given up here after SILENT_SECONDS without a message, and comes back soon, so that a
fault and its end fit into a training.
"""

import contextlib
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tinker
from tinsmith.demo.demo import MODEL

from tools.attack import common
from tools.attack.common import Attempt, Failure, One

REPLICAS = 3
STEPS, SAVE_EVERY = 4, 2
TRAININGS = 3  # different ones
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo")
IDS = 250  # ids below this are in the model's vocabulary
TRIES = 5  # of a training to go on, without a step between them
SILENT_SECONDS = 5.0
SECONDS = 50.0  # for a start or an end; a machine under load is slow

# `tinsmith`, which also ends when its standard input does.
PROGRAM = f"""
import os, sys, threading
from tinsmith.cli import commands
from tinsmith.replicas import crew, local
local.SILENT_SECONDS, crew.AGAIN_SECONDS_MAX = {SILENT_SECONDS}, 2.0
threading.Thread(target=lambda: sys.stdin.read() or os._exit(1), daemon=True).start()
sys.exit(commands.main())
"""


class Server:
    """`tinsmith serve` as a process, which may be ended and started again at its address."""

    def __init__(self, folder: Path, replicas: int):
        self._folder, self._replicas = folder, replicas
        self._log = folder / "log"
        self._told = 0  # characters of the log that were looked at
        self._port = 0
        self.starts = 0
        folder.mkdir()
        self.start()

    def start(self) -> None:
        """Starts it, and waits until it listens with all of its replicas."""
        begin = self._log.stat().st_size if self._log.exists() else 0
        command = [
            sys.executable, "-c", PROGRAM, "serve", str(MODEL), "--device", "cpu", "--seed", "7",
            "--threads", str(self._replicas), "--replicas", str(self._replicas), "--port",
            str(self._port), "--checkpoints", str(self._folder / "saved"), "--no-status",
        ]  # fmt: skip
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT
            )

        def listens() -> str | None:
            found = re.search(r"http://\S+:(\d+)", self._log.read_text()[begin:])
            if found is None and self._process.poll() is not None:
                raise Failure(f"the server did not start: {self._log.read_text()[begin:]}")
            return found and found.group(1)

        self._port = int(wait_for(listens, "the server to listen"))
        self.starts += 1

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._port}"

    def client(self) -> tinker.ServiceClient:
        """A new session."""
        return tinker.ServiceClient(base_url=self.url, api_key="tml-local")

    def helpers(self) -> list[int]:
        """The processes of its other replicas."""
        children = Path(f"/proc/{self._process.pid}/task").glob("*/children")
        return [int(number) for file in children for number in file.read_text().split()]

    def end(self, number: int) -> None:
        """Ends it by a signal. Its replicas must end too."""
        helpers = self.helpers()
        self._process.send_signal(number)
        code = self._process.wait(SECONDS)
        if code != (-number if number == signal.SIGKILL else 0):
            raise Failure(f"the server ended with {code}: {self.said()}")
        assert self._process.stdin is not None
        self._process.stdin.close()

        def gone() -> bool:
            return not any(Path(f"/proc/{one}").exists() for one in helpers)

        wait_for(gone, "the replicas to end with their server")

    def settle(self) -> None:
        """Waits until all replicas compute. Failure if the log has an error that is no sentence."""
        name = r'tinsmith_replicas\{state="same bits"\} '

        def complete() -> bool:
            found = re.search(name + r"(\d+)", httpx.get(f"{self.url}/metrics").text)
            return self._replicas == 1 or (
                found is not None and int(found.group(1)) == self._replicas - 1
            )

        wait_for(complete, "the replicas to join")
        text = self.said()
        if "Traceback" in text:
            raise Failure(f"the server's log has {text}")

    def said(self) -> str:
        """What its log has that was not looked at."""
        text = self._log.read_text()
        self._told, new = len(text), text[self._told :]
        return new


def wait_for(happened: Callable[[], Any], what: str) -> Any:
    """Asks until something has come; Failure after SECONDS."""
    end = time.monotonic() + SECONDS
    while not (found := happened()):
        if time.monotonic() > end:
            raise Failure(f"waited {SECONDS:g} s for {what}")
        time.sleep(0.02)
    return found


# ---- the training ----


class Training:
    """One training by its seed: the digest of each step's replies."""

    def __init__(self, server: Server, seed: int):
        self._server, self._seed = server, seed
        self.digests: dict[int, str] = {}
        self._saved: tuple[int, str | None] = (0, None)  # after so many steps, and where

    def run(self) -> None:
        """Takes all steps, from the last checkpoint where the server was started again."""
        failed = 0
        while len(self.digests) <= STEPS:
            before, starts = len(self.digests), self._server.starts
            service = self._server.client()
            try:
                self._go_on(service)
            except (tinker.TinkerError, ValueError) as error:
                failed = failed + 1 if len(self.digests) == before else 1
                if (self._server.starts == starts and failed > 1) or failed == TRIES:
                    raise Failure(f"the training ended: {error}") from error
            finally:
                service.close("success")  # a server that was started again does not know it

    def _go_on(self, service: tinker.ServiceClient) -> None:
        first, path = self._saved
        if path is None:
            made = service.create_lora_training_client(str(MODEL), rank=8, seed=self._seed)
        else:
            made = service.create_training_client_from_state_with_optimizer(path)
        client = made.result()
        base = service.create_sampling_client(base_model=str(MODEL)).result()
        for number in range(first, STEPS):
            self._keep(number, self._step(client, base, number))
            if (number + 1) % SAVE_EVERY == 0:
                saved = client.save_state(f"step-{number + 1}", overwrite=True).result()
                self._saved = number + 1, saved.path
        made = service.create_training_client_from_state_with_optimizer(self._saved[1])
        self._keep(STEPS, self._step(made.result(), base, STEPS))

    def _keep(self, number: int, replies: list[Any]) -> None:
        digest = hashlib.sha256(repr(replies).encode()).hexdigest()
        if self.digests.setdefault(number, digest) != digest:
            raise Failure(f"step {number} gave other bits when it was repeated")

    def _step(
        self, client: tinker.TrainingClient, base: tinker.SamplingClient, number: int
    ) -> list[Any]:
        rng = np.random.default_rng((self._seed, number))
        loss = LOSSES[number % len(LOSSES)]
        calls = [client.forward_backward(_data(rng, loss), loss) for _ in range(2)]
        ended = client.optim_step(tinker.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0))
        found: list[Any] = []
        for call in calls:
            output = call.result()
            found.append(output.metrics["loss:sum"])
            found += [row["logprobs"].to_numpy().tobytes() for row in output.loss_fn_outputs]
        found.append(ended.result().metrics["grad_norm"])
        newest = client.save_weights_and_get_sampling_client().result()
        waiting = [_ask(sampler, rng, n) for n in (1, 3, 32) for sampler in (base, newest)]
        for reply in [one.result() for one in waiting]:
            rows = [(list(s.tokens), s.logprobs, s.stop_reason) for s in reply.sequences]
            found += [rows, reply.prompt_logprobs]
        return found


def _data(rng: np.random.Generator, loss: str) -> list[tinker.Datum]:
    """Datums that are all eight parts of a call."""
    found = []
    for length in rng.integers(100, 500, size=10):
        inputs: dict[str, Any] = {"target_tokens": rng.integers(0, IDS, length)}
        if loss == "cross_entropy":
            inputs["weights"] = rng.uniform(-1, 2, length).astype(np.float32)
        else:
            inputs["logprobs"] = -rng.uniform(4, 6, length).astype(np.float32)
            inputs["advantages"] = rng.normal(size=length).astype(np.float32)
        prompt = tinker.ModelInput.from_ints(rng.integers(0, IDS, length).tolist())
        found.append(tinker.Datum(model_input=prompt, loss_fn_inputs=inputs))
    return found


def _ask(sampler: tinker.SamplingClient, rng: np.random.Generator, count: int) -> Any:
    """A request for so many samples; one for more than a few is drawn in parts."""
    params = tinker.SamplingParams(
        max_tokens=int(rng.integers(8, 60)), seed=int(rng.integers(1 << 40)), stop=[]
    )
    prompt = tinker.ModelInput.from_ints(rng.integers(0, IDS, rng.integers(2, 150)).tolist())
    return sampler.sample(prompt, count, params, include_prompt_logprobs=count == 3)


# ---- faults ----


def _signal(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.kill(process, number)


def _kill(server: Server, rng: random.Random) -> None:
    """A replica is killed."""
    _signal(rng.choice(server.helpers()), signal.SIGKILL)


def _stop(seconds: float) -> Callable[[Server, random.Random], None]:
    """A replica is stopped for a while."""

    def fault(server: Server, rng: random.Random) -> None:
        process = rng.choice(server.helpers())
        _signal(process, signal.SIGSTOP)
        time.sleep(seconds)
        _signal(process, signal.SIGCONT)

    return fault


def _restart(number: int) -> Callable[[Server, random.Random], None]:
    """The server ends by a signal, and is started again."""

    def fault(server: Server, rng: random.Random) -> None:
        server.end(number)
        time.sleep(rng.random())
        server.start()

    return fault


def _cancel(server: Server, rng: random.Random) -> None:
    """A request is cancelled that is drawn in parts, on all replicas."""
    with server.client() as service:
        sampler = service.create_sampling_client(base_model=str(MODEL)).result()
        params = tinker.SamplingParams(max_tokens=1500, seed=1, stop=[])
        future = sampler.sample(tinker.ModelInput.from_ints([5, 6, 7]), 64, params)
        time.sleep(2 * rng.random())
        future.cancel()


FAULTS = {
    "killed": _kill,
    "silent": _stop(SILENT_SECONDS + 2),
    "paused": _stop(1.5),
    "server killed": _restart(signal.SIGKILL),
    "server interrupted": _restart(signal.SIGINT),
    "cancelled": _cancel,
}


@contextmanager
def attack() -> Iterator[One]:
    """The program."""
    warnings.filterwarnings("ignore")  # of the SDK's, that a call is old or new
    with common.workplace() as folder:
        quiet, took = Server(folder / "quiet", 1), 0.0
        expected = []
        for seed in range(TRAININGS):
            begin = time.monotonic()
            training = Training(quiet, seed)
            training.run()
            took = time.monotonic() - begin
            expected.append(training.digests)
        quiet.end(signal.SIGTERM)
        server = Server(folder / "attacked", REPLICAS)

        def one(attempt: Attempt) -> str:
            name = list(FAULTS)[attempt.number % len(FAULTS)]
            seed, after = attempt.rng.randrange(TRAININGS), took * attempt.rng.random()
            attempt.note(f"{name} after {after:.2f} s of training {seed}")
            _one(server, FAULTS[name], seed, after, attempt.rng, expected)
            return name

        try:
            yield one
        finally:
            server.end(signal.SIGTERM)


def _one(
    server: Server,
    fault: Callable[[Server, random.Random], None],
    seed: int,
    after: float,
    rng: random.Random,
    expected: list[dict[int, str]],
) -> None:
    """A training with a fault."""
    problems: list[BaseException] = []

    def disturb() -> None:
        try:
            time.sleep(after)
            fault(server, rng)
        except Exception as error:
            problems.append(error)

    training, thread = Training(server, seed), threading.Thread(target=disturb)
    server.settle()
    thread.start()
    try:
        training.run()
    finally:
        thread.join()
    if problems:
        raise problems[0]
    server.settle()
    if training.digests != expected[seed]:
        found, wanted = (json.dumps(one) for one in (training.digests, expected[seed]))
        raise Failure(f"the replies are {found}, and those of a quiet run {wanted}")
