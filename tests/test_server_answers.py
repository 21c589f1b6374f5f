"""The server answers while the engine computes: no lock, and no GIL, is held across the maths."""

import threading
import time
from itertools import pairwise

import tinker
from conftest import CONTEXT, Wire, make_datum


def long_data(datums: int) -> list[tinker.Datum]:
    """Datums of the whole context."""
    ids = [5 + i % 200 for i in range(CONTEXT)]
    return [make_datum(ids, ids[1:] + ids[:1]) for _ in range(datums)]


def test_others_are_answered_during_a_long_forward_backward(server):
    wire, others = Wire(server.url), Wire(server.url, key="tml-beside")
    known = others.post("/create_session", tags=[], user_metadata={}, sdk_version="0")
    model, seq, datums, alone = wire.create(), 0, 250, 0.0
    while alone < 1:  # as many as take a second on this machine
        seq, datums, start = seq + 1, 2 * datums, time.perf_counter()
        wire.result(wire.forward_backward(model, seq, long_data(datums)))
        alone = time.perf_counter() - start
    data = long_data(datums)
    ended: list[float] = []

    def compute() -> None:
        wire.result(wire.forward_backward(model, seq + 1, data))
        ended.append(time.perf_counter())

    ticks = [time.perf_counter()]
    caller = threading.Thread(target=compute)
    caller.start()
    while not ended:
        assert others.http.get("/healthz").json()["status"] == "ok"
        others.post("/session_heartbeat", session_id=known["session_id"])
        assert others.http.post("/retrieve_future", json={"request_id": "x"}).status_code == 404
        ticks.append(time.perf_counter())
    caller.join()
    # Whatever stops the server, or this process, for the time of the computation is one long gap.
    gaps = sorted(after - before for before, after in pairwise(ticks))
    assert len(gaps) >= 20
    assert gaps[-1] < (ended[0] - ticks[0]) / 2
