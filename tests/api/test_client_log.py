"""tinsmith.log from a training loop: what it sends, that it neither waits nor breaks, and what it
says where something is wrong."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinsmith
import torch
from support.small_run import make_client
from tinsmith.api import client_log
from tinsmith.server.backend import Backend

PATIENCE = 60.0  # seconds, for a machine that is busy with other tests


class Stub(ThreadingHTTPServer):
    """A server that keeps what comes, and answers with the statuses that it is given, then 200."""

    def __init__(self) -> None:
        self.came: list[tuple[str, str, dict[str, Any]]] = []
        self.statuses: list[int] = []
        self.open = threading.Event()
        self.open.set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                server.open.wait()
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.came.append((self.path, self.headers["X-API-Key"], body))
                self.send_response(server.statuses.pop(0) if server.statuses else 200)
                self.end_headers()
                self.wfile.write(b'{"detail": "a sentence"}')

            def log_message(self, *arguments: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, _, body in self.came]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    with Stub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("TINKER_BASE_URL", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setenv("TINKER_API_KEY", "tml-mine")
        monkeypatch.setattr(client_log, "AGAIN_SECONDS", (0.01, 0.01))
        yield server
        server.open.set()
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def sender(monkeypatch: pytest.MonkeyPatch) -> client_log.Sender:
    """One that has said nothing yet."""
    made = client_log.Sender()
    monkeypatch.setattr(client_log, "_sender", made)
    return made


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "tinsmith"]


def test_numbers_of_all_kinds_are_sent_in_order(stub: Stub, sender: client_log.Sender) -> None:
    tinsmith.log(step=3, reward=0.5, right=True, count=np.int64(7))
    tinsmith.log({"env/reward": np.float32(0.25), "t": torch.tensor([1.5])}, step=np.int32(4))
    tinsmith.log({"a": float("nan"), "b": float("-inf")}, run="s-1:train:0")
    assert sender.flush(PATIENCE)
    assert stub.bodies == [
        {"metrics": {"reward": 0.5, "right": 1.0, "count": 7.0}, "step": 3},
        {"metrics": {"env/reward": 0.25, "t": 1.5}, "step": 4},
        {"metrics": {"a": None, "b": None}, "run": "s-1:train:0"},
    ]
    assert {(path, key) for path, key, _ in stub.came} == {("/api/v1/log", "tml-mine")}


@pytest.mark.parametrize("value", ("0.5", b"1", None, [1.0], {}, np.ones(2), 10**400, object()))
def test_what_is_no_number_is_left_out_with_one_warning(
    stub: Stub, sender: client_log.Sender, caplog: pytest.LogCaptureFixture, value: Any
) -> None:
    for step in range(3):
        tinsmith.log(step=step, reward=1.0, bad=value)
    tinsmith.log(step=3, bad=value)  # nothing is left to be sent
    assert sender.flush(PATIENCE)
    assert [body["metrics"] for body in stub.bodies] == 3 * [{"reward": 1.0}]
    (text,) = set(said(caplog))
    assert "bad must be one number" in text and "left out" in text


def test_whatever_a_foreign_object_does_reaches_no_loop(
    stub: Stub, sender: client_log.Sender, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd:
        def shape(self) -> None: ...
        def item(self) -> None:
            raise AttributeError

    for step in range(3):
        tinsmith.log(step=step, reward=0.1 * step, odd=Odd(), many=[0.1 * step])
    assert sender.flush(PATIENCE) and len(stub.bodies) == 3
    assert [text.split(" must")[0].rpartition(" ")[2] for text in said(caplog)] == ["odd", "many"]


@pytest.mark.parametrize(
    ("base_url", "key", "sentence"),
    (
        ("localhost", "tml-x", "is asked for nothing: unknown url type"),
        ("localhost:8000", "tml-x", "must begin with http:// or https://"),
        ("http://localhost:1 2", "tml-x", "is asked for nothing"),
        (None, "two\nlines", "is asked for nothing"),
    ),
)
def test_an_address_that_is_none_is_one_warning_and_holds_up_nothing(
    stub: Stub,
    sender: client_log.Sender,
    caplog: pytest.LogCaptureFixture,
    base_url: str | None,
    key: str,
    sentence: str,
) -> None:
    for step in range(2):
        tinsmith.log(step=step, reward=1.0, base_url=base_url, api_key=key)
    tinsmith.log(step=2, reward=1.0)
    assert sender.flush(PATIENCE)
    assert [body["step"] for body in stub.bodies] == [2]
    (text,) = said(caplog)
    assert sentence in text


@pytest.mark.parametrize(
    ("arguments", "named", "error", "sentence"),
    (
        ((), {}, TypeError, "there is nothing to show"),
        ((), {"step": 3}, TypeError, "there is nothing to show"),
        ((0.5,), {}, TypeError, "numbers are given by their names"),
        ((), {"a": 1, "step": "3"}, TypeError, "step must be a whole number"),
        ((), {"a": 1, "step": 3.5}, TypeError, "step must be a whole number"),
        ((), {"a": 1, "step": -1}, ValueError, "step must be at least 0"),
        ((), {"a": 1, "run": 3}, TypeError, "run must be a TrainingClient or its model_id"),
    ),
)
def test_a_call_that_is_none_is_an_error(
    arguments: Any, named: Any, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        tinsmith.log(*arguments, **named)


def test_without_a_server_there_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, sender: client_log.Sender
) -> None:
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    for step in range(3):
        tinsmith.log(step=step, reward=1.0)
    (text,) = said(caplog)
    assert "TINKER_BASE_URL is not set" in text and sender._thread is None


def test_a_loop_never_waits_and_what_a_busy_server_missed_comes_later(
    stub: Stub, sender: client_log.Sender, caplog: pytest.LogCaptureFixture
) -> None:
    stub.open.clear()  # nothing is answered while the loop runs
    stub.statuses = [503, 429]
    for step in range(5):
        tinsmith.log(step=step, reward=1.0)
    stub.open.set()
    with sender._waiting.all_tasks_done:
        while sender._waiting.unfinished_tasks:
            assert sender._waiting.all_tasks_done.wait(PATIENCE)
    assert [body["step"] for body in stub.bodies] == [0, 0, 0, 1, 2, 3, 4]
    (text,) = said(caplog)
    assert "does not answer (a sentence); numbers wait until it does" in text


def test_a_refusal_is_one_warning_and_the_next_are_sent(
    stub: Stub, sender: client_log.Sender, caplog: pytest.LogCaptureFixture
) -> None:
    stub.statuses = [400, 404]
    for step in range(3):
        tinsmith.log(step=step, reward=1.0)
    assert sender.flush(PATIENCE) and len(stub.bodies) == 3
    (text,) = said(caplog)
    assert text.endswith("/api/v1/log shows nothing of this: a sentence")


def test_a_server_that_is_not_there_stops_nobody_at_the_end(
    sender: client_log.Sender, caplog: pytest.LogCaptureFixture
) -> None:
    tinsmith.log(step=0, reward=1.0, base_url="http://127.0.0.1:1")
    assert not sender.flush(PATIENCE)
    (text,) = said(caplog)
    assert "does not answer" in text and "numbers wait until it does" in text


def test_more_than_can_wait_is_dropped(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client_log, "WAITING_MAX", 2)
    sender = client_log.Sender()
    monkeypatch.setattr(client_log, "_sender", sender)
    stub.open.clear()
    for step in range(10):
        tinsmith.log(step=step, reward=1.0)
    stub.open.set()
    assert sender.flush(PATIENCE) and 2 <= len(stub.bodies) <= 3
    assert [text for text in said(caplog) if "2 calls wait for" in text]


def test_a_forked_child_sends_its_own(stub: Stub, sender: client_log.Sender) -> None:
    tinsmith.log(step=0, reward=1.0)
    assert sender.flush(PATIENCE)
    child = os.fork()
    if child == 0:
        tinsmith.log(step=1, reward=1.0)
        os._exit(0 if client_log._sender.flush(PATIENCE) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert [body["step"] for body in stub.bodies] == [0, 1]


SCRIPT = """
import sys, tinsmith
for step in range(50):
    tinsmith.log(step=step, reward=step / 50)
assert "tinker" not in sys.modules and "httpx" not in sys.modules
"""


def test_a_script_that_ends_has_sent_all(stub: Stub, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [body["step"] for body in stub.bodies] == list(range(50))


def test_a_training_client_says_which_run(
    server: Backend, sender: client_log.Sender, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "tinsmith")
    named = {"base_url": server.url, "api_key": "tml-its-own"}
    with server.service_client(api_key="tml-its-own") as service:
        first, _ = make_client(service), make_client(service)
        tinsmith.log(reward=0.5, step=1, run=first, **named)
        assert sender.flush(PATIENCE) and not said(caplog)
        told = httpx.get(f"{server.url}/page/data/runs/{first.model_id}").json()
        assert told["logged"] == [{"step": 1, "values": {"reward": 0.5}}]
        assert told["about"]["reward"] == "reward"
