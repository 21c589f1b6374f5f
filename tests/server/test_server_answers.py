"""The server answers while the engine computes: no lock, and no GIL, is held across the maths."""

import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import Wire, make_datum
from tinsmith.demo.demo import MODEL
from tinsmith.server.backend import Backend
from tinsmith.server.service.config import ServerConfig

ROUNDS, TRIES = 4, 30


def test_others_are_answered_during_a_long_forward_backward(tmp_path: Path) -> None:
    """Many times within one micro-batch, for between two of them others have their turns anyway; on
    a busy machine perhaps in a later one."""
    ids = np.full(2000, 7).tolist()
    with Backend(
        ServerConfig({"demo": MODEL}, checkpoints=tmp_path, device="cpu", threads=1)
    ) as backend:
        wire, others = Wire(backend.url), Wire(backend.url, key="tml-beside")
        known = others.post("/create_session", tags=[], user_metadata={}, sdk_version="0")
        model = wire.create("demo")

        def train(seq: int) -> None:
            wire.result(wire.forward_backward(model, seq, [make_datum(ids, ids)]))

        for seq in range(1, TRIES):
            caller, rounds = threading.Thread(target=train, args=(seq,)), 0
            caller.start()
            while caller.is_alive() and rounds < ROUNDS:
                call = backend.worker.now.training
                assert others.http.get("/healthz").json() == {"status": "ok"}
                others.post("/session_heartbeat", session_id=known["session_id"])
                told = others.http.post("/retrieve_future", json={"request_id": "x"})
                assert told.status_code == 404
                rounds += bool(call) and backend.worker.now.training == call
            caller.join()
            if rounds == ROUNDS:
                return
    pytest.fail("the server stood still")
