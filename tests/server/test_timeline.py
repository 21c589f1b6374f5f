"""A session's timeline: what Perfetto is given, against the calls that the server has seen."""

import json
import re
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import tinker
from conftest import Wire, make_datum
from support.tiny_models import folder
from tinsmith.engine.call_log import Call
from tinsmith.server.backend import Backend
from tinsmith.server.records import timeline
from tinsmith.server.records.timeline import Timelines
from tinsmith.server.service.config import ServerConfig

DATA = [make_datum([11, 12, 13], [12, 13, 14], weights=[1, 1, 1])]
PROMPT = tinker.ModelInput.from_ints([10, 20, 30])
KEY = "tml-somebody-else"

Event = dict[str, Any]


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    with Backend(
        ServerConfig({"tiny": folder("qwen3")}, checkpoints=checkpoints, device="cpu")
    ) as it:
        yield it


def work(client: tinker.ServiceClient) -> None:
    """Two steps whose calls wait for one another, samples side by side, and a call that fails."""
    run = client.create_lora_training_client("tiny", rank=4, seed=1).result()
    for _ in range(2):
        training = run.forward_backward(DATA * 2, "cross_entropy")
        run.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        training.result()
    sampler = run.save_weights_and_get_sampling_client().result()
    base = client.create_sampling_client(base_model="tiny").result()
    params = tinker.SamplingParams(max_tokens=4, stop=[], seed=3)
    for one in [who.sample(PROMPT, 2, params) for who in (sampler, base, sampler, base)]:
        one.result()
    with pytest.raises(Exception, match="nothing"):
        run.forward(DATA, "nothing").result()


def exported(backend: Backend, session: str, key: str = "tml-local") -> str:
    rest = tinker.RestClient(base_url=backend.url, api_key=key)
    return rest.export_session_trace(session).result()


def read(url: str) -> dict[str, Any]:
    """A trace, which keeps the rules of Chrome's format."""
    with urllib.request.urlopen(url) as reply:
        assert reply.headers["content-type"] == "application/json"
        trace = json.load(reply)
    return checked(trace)


def checked(trace: dict[str, Any]) -> dict[str, Any]:
    """Complete events with whole microseconds, on processes and threads that have names; those of a
    thread lie beside or inside one another, the outer first."""
    assert trace.keys() == {"displayTimeUnit", "otherData", "traceEvents"}
    names: dict[str, set[tuple[int, int]]] = defaultdict(set)
    open_until: dict[tuple[int, int], list[int]] = defaultdict(list)
    last: dict[tuple[int, int], int] = defaultdict(int)
    for event in trace["traceEvents"]:
        place = event["pid"], event["tid"]
        if event["ph"] == "M":
            assert event.keys() == {"ph", "name", "pid", "tid", "args"}
            assert event["args"].keys() == {"name"} and place not in names[event["name"]]
            names[event["name"]].add(place)
            continue
        assert event.keys() == {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"}
        start, end = event["ts"], event["ts"] + event["dur"]
        assert event["ph"] == "X" and isinstance(start, int) and 0 <= start <= end
        assert place in names["thread_name"] and (place[0], 0) in names["process_name"]
        assert start >= last[place]
        last[place] = start
        outer = open_until[place]
        while outer and outer[-1] <= start and outer[-1] < end:
            outer.pop()
        assert not outer or end <= outer[-1], "two slices of a thread overlap"
        outer.append(end)
    return trace


def slices(trace: dict[str, Any]) -> list[Event]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


PARTS = ("queued", "work", "prefill", "decode")


def test_a_trace_has_each_call_with_the_times_that_the_server_saw(backend: Backend) -> None:
    seen: list[Any] = []
    backend.notifier.listen(seen.append)
    with backend.service_client() as client:
        session = client.holder.get_session_id()
        work(client)
    backend.notifier.flush()
    backend.notifier.forget(seen.append)
    calls = [one for one in seen if isinstance(one, Call) and one.kind != "forget"]
    trace = read(exported(backend, session))
    found = [event for event in slices(trace) if event["name"] not in PARTS]
    about = trace["otherData"]
    assert about["session"] == session and about["calls_dropped"] == 0
    assert about["calls"] == len(found)
    calls.sort(key=lambda call: call.arrived)
    found = [event for event in found if event["name"] != "forget"]
    assert [event["name"] for event in found] == [call.kind for call in calls]
    assert {"create", "forward_backward", "optim_step", "sample", "reject"} <= {
        call.kind for call in calls
    }
    for event, call in zip(found, calls, strict=True):
        args = event["args"]
        assert event["ts"] / 1e6 == pytest.approx(call.arrived - calls[0].arrived, abs=2e-6)
        assert event["dur"] / 1e6 == pytest.approx(call.ended - call.arrived, abs=2e-6)
        for name in ("tokens", "cached", "drawn", "base", "sampler", "error"):
            assert args.get(name, type(getattr(call, name))()) == getattr(call, name), name
        assert args["step"] == call.step
    failed = [event for event in found if "error" in event["args"]]
    assert [event["name"] for event in failed] == ["reject"]
    assert "nothing" in failed[0]["args"]["error"]


def test_a_calls_parts_are_as_long_as_the_call(backend: Backend) -> None:
    with backend.service_client() as client:
        session = client.holder.get_session_id()
        work(client)
    backend.notifier.flush()
    found = slices(read(exported(backend, session)))
    sums: dict[int, dict[str, int]] = {}
    for event in found:
        if event["name"] not in PARTS:
            own = sums[len(sums)] = {"all": event["dur"], "sample": event["name"] == "sample"}
        else:
            own[event["name"]] = event["dur"]
    assert sum(own["sample"] for own in sums.values()) == 4
    for own in sums.values():
        assert own["queued"] + own.get("work", 0) == own["all"]
        assert ("prefill" in own) == bool(own["sample"])
        if own["sample"]:
            assert own["prefill"] + own["decode"] == own["work"] > 0


def test_runs_and_samplers_of_other_weights_have_processes_of_their_own(backend: Backend) -> None:
    with backend.service_client() as client:
        session = client.holder.get_session_id()
        work(client)
    backend.notifier.flush()
    events = read(exported(backend, session))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(name.partition(" ")[0] for name in names.values()) == ["run", "sampler"]
    for pid, name in names.items():
        samples = [e for e in events if e["pid"] == pid and e["name"] == "sample"]
        assert len(samples) == 2, name
        assert all(sample["cat"] == "sampling" for sample in samples)


def test_another_keys_session_has_no_trace(backend: Backend) -> None:
    with backend.service_client() as client:
        session = client.holder.get_session_id()
        work(client)
    backend.notifier.flush()
    url = exported(backend, session)
    reply = Wire(backend.url, KEY).http.get(f"/sessions/{session}/trace_export")
    assert reply.status_code == 404 and "there is no session" in reply.text
    ticket = re.fullmatch(r".*/trace/([0-9a-f]{32})", url)
    assert ticket is not None
    wrong = url.replace(ticket[1], "0" * 32)
    with pytest.raises(HTTPError, match="404"):
        urllib.request.urlopen(wrong)


def test_a_session_without_calls_has_no_trace(backend: Backend) -> None:
    with (
        backend.service_client() as client,
        pytest.raises(RuntimeError, match="knows no calls of s-"),
    ):
        exported(backend, client.holder.get_session_id())


def test_a_server_with_a_key_signs_the_traces_url(tmp_path: Path) -> None:
    with Backend(
        ServerConfig({"tiny": folder("qwen3")}, checkpoints=tmp_path, api_key=KEY, device="cpu")
    ) as it:
        with it.service_client() as client:
            session = client.holder.get_session_id()
            client.create_lora_training_client("tiny", rank=4, seed=1).result()
            it.notifier.flush()
            url = exported(it, session, KEY)
        assert [event["name"] for event in slices(read(url))][:3] == ["create", "queued", "work"]
        with pytest.raises(HTTPError, match="401"):
            urllib.request.urlopen(url.partition("?")[0])


def call(session: str, arrived: float, ended: float) -> Call:
    found = Call("sample", sampler=f"{session}:sample:0", at=1000.0 + arrived, arrived=arrived)
    found.began = found.ended = ended
    return found


def test_the_oldest_calls_and_sessions_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "SESSIONS_MAX", 2)
    monkeypatch.setattr(timeline, "PIECE_CALLS", 7)
    kept = Timelines()
    for name in ("s-a", "s-b", "s-a"):
        kept(call(name, 5.0, 6.0))
    for number in range(3):  # these are of no session
        kept(Call("save", f"upload-{number}", ended=1.0))
        kept(Call("sample", sampler=f"inference:{number}", ended=1.0))
    assert "s-a" in kept and "s-b" in kept
    for place in range(timeline.CALLS_MAX + 3):
        kept(call("s-c", 10.0 + place, 12.0 + place))
    assert kept.trace("s-b") is None
    pieces = kept.trace("s-c")
    assert pieces is not None
    trace = checked(json.loads(b"".join(pieces)))
    about = trace["otherData"]
    assert (about["calls"], about["calls_dropped"]) == (timeline.CALLS_MAX, 3)
    assert about["began"] == "1970-01-01T00:16:53+00:00"  # of the first that is kept
    found = [event for event in slices(trace) if event["name"] == "sample"]
    assert [event["ts"] for event in found] == [1_000_000 * n for n in range(timeline.CALLS_MAX)]
    assert {event["tid"] for event in found} == {1, 2}
