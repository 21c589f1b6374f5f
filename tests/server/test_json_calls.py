"""Training calls in JSON, as SDKs up to 0.24 and Fireworks' send them: the numbers of the protobuf
calls, and each refusal by the datum that is at fault."""

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tinker
from conftest import Wire, make_datum
from tinker.proto.response_conv import deserialize_forward_backward_output
from tinsmith.server.wire import json_calls

JSON = "application/json"


@pytest.fixture
def wire(server) -> Iterator[Wire]:
    made = Wire(server.url)
    with made.http:
        yield made


def tensor(values: list[Any], dtype: str = "float32", **more: Any) -> dict[str, Any]:
    return {"data": values, "dtype": dtype, "shape": [len(values)], **more}


def one(tokens: list[int], targets: list[int], **inputs: Any) -> dict[str, Any]:
    """A datum as those SDKs write it."""
    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
        "loss_fn_inputs": {"target_tokens": tensor(targets, "int64"), **inputs},
    }


PLAIN = one([5, 6, 7], [6, 7, 8], weights=tensor([0.5, 1, -1]))


def body(
    model: str, seq: int, data: list[Any], key: str = "forward_backward_input", **more: Any
) -> dict[str, Any]:
    given = {"data": data, "loss_fn": "cross_entropy", "loss_fn_config": None} | more
    return {key: given, "model_id": model, "seq_id": seq, "type": "forward_backward"}


def values(found: dict[str, Any]) -> list[np.ndarray]:
    """The log-probabilities of a JSON answer."""
    rows = [item["logprobs"] for item in found["loss_fn_outputs"]]
    assert all(row["dtype"] == "float32" for row in rows)
    return [np.asarray(row["data"], np.float32).reshape(row["shape"]) for row in rows]


def test_a_call_in_json_gives_the_bits_of_the_protobuf_call(wire: Wire) -> None:
    """Dense and sparse, with several targets a position, twice with a step between."""
    ids = [[12, 13], [14, 0], [16, 17]]
    soft = {"data": [0.25, 0.75, 1.0, 0.3, 0.7], "dtype": "float32", "shape": [3, 2]}
    soft |= {"sparse_crow_indices": [0, 2, 3, 5], "sparse_col_indices": [0, 1, 0, 0, 1]}
    several = one([31, 32, 33], [0], weights=soft)
    flat = [token for row in ids for token in row]
    several["loss_fn_inputs"]["target_tokens"] = {"data": flat, "dtype": "int64", "shape": [3, 2]}
    same = [
        make_datum([5, 6, 7], [6, 7, 8], weights=[0.5, 1, -1]),
        make_datum([31, 32, 33], ids, weights=[[0.25, 0.75], [1, 0], [0.3, 0.7]]),
    ]
    first, second = wire.create(), wire.create()
    for seq in (1, 3):
        found = wire.result(wire.post("/forward_backward", **body(first, seq, [PLAIN, several])))
        promise = wire.forward_backward(second, seq, same)
        wanted = deserialize_forward_backward_output(wire.poll(promise).content)
        assert found["metrics"] == pytest.approx(wanted.metrics, abs=0)
        for row, other in zip(values(found), wanted.loss_fn_outputs, strict=True):
            np.testing.assert_array_equal(row, other["logprobs"].to_numpy())
        for model in (first, second):
            wire.result(wire.optim_step(model, seq + 1))


def test_large_arrays_in_json_are_whole(wire: Wire) -> None:
    """Arrays of more than 64 KB take another way into the message than small ones."""
    rng = np.random.default_rng(0)
    tokens, ids = rng.integers(3, 60, 120), rng.integers(3, 60, (120, 150))
    weights = rng.normal(size=ids.shape).astype(np.float32)
    datum = one(tokens.tolist(), [0])
    datum["loss_fn_inputs"] = {
        "target_tokens": tensor(ids.ravel().tolist(), "int64", shape=[120, 150]),
        "weights": tensor(weights.ravel().tolist(), shape=[120, 150]),
    }
    [found] = values(wire.result(wire.post("/forward_backward", **body(wire.create(), 1, [datum]))))
    promise = wire.forward_backward(
        wire.create(), 1, [make_datum(tokens.tolist(), ids, weights=weights)]
    )
    [wanted] = deserialize_forward_backward_output(wire.poll(promise).content).loss_fn_outputs
    assert found.nbytes > 1 << 16
    np.testing.assert_array_equal(found, wanted["logprobs"].to_numpy())


def test_forward_has_no_gradient_and_its_answer_is_json_whatever_is_accepted(wire: Wire) -> None:
    model = wire.create()
    calls = [
        wire.post("/forward", **body(model, 1, [PLAIN], "forward_input")),
        wire.post("/forward_backward", **body(model, 2, [PLAIN])),
    ]
    for promise in calls:
        for kind in ("application/x-protobuf, application/json", "*/*"):
            reply = wire.http.post("/retrieve_future", json=promise, headers={"Accept": kind})
            assert reply.headers["content-type"] == JSON
    first, second = (wire.result(promise) for promise in calls)
    assert first == second
    wire.result(wire.optim_step(model, 3))
    moved = wire.result(wire.post("/forward", **body(model, 4, [PLAIN], "forward_input")))
    alone = wire.create()
    wire.result(wire.post("/forward_backward", **body(alone, 1, [PLAIN])))
    wire.result(wire.optim_step(alone, 2))
    wanted = wire.result(wire.post("/forward", **body(alone, 3, [PLAIN], "forward_input")))
    assert moved == wanted and moved != first


def test_what_a_loss_tells_beside_is_in_json_too(wire: Wire) -> None:
    """generalized_jsd with the teacher's log-probabilities: its divergences."""
    model = wire.create()
    datum = one([5, 6, 7], [0])
    ids, numbers = [6, 7, 8, 9, 10, 11], [-0.5, -1.5, -0.7, -1.2, -2.0, -0.3]
    datum["loss_fn_inputs"] = {
        "target_tokens": tensor(ids, "int64", shape=[3, 2]),
        "teacher_logprobs": tensor(numbers, shape=[3, 2]),
        "weights": tensor([1.0, 0.5, 1.0]),
    }
    call = body(model, 1, [datum], loss_fn="generalized_jsd", loss_fn_config={"beta": 0.5})
    found = wire.result(wire.post("/forward_backward", **call))
    same = make_datum(
        [5, 6, 7],
        np.reshape(ids, (3, 2)),
        teacher_logprobs=np.reshape(numbers, (3, 2)),
        weights=[1.0, 0.5, 1.0],
    )

    def change(message: Any) -> None:
        message.loss_fn = "generalized_jsd"
        message.loss_fn_config_v2["beta"].number = 0.5

    promise = wire.forward_backward(wire.create(), 1, [same], change=change)
    wanted = deserialize_forward_backward_output(wire.poll(promise).content)
    [row], [other] = found["loss_fn_outputs"], wanted.loss_fn_outputs
    assert row.keys() == other.keys()
    for name, array in row.items():
        np.testing.assert_array_equal(array["data"], other[name].to_numpy().ravel())
    assert found["metrics"] == pytest.approx(wanted.metrics, abs=0)


def changed(**inputs: Any) -> dict[str, Any]:
    datum = one([5, 6, 7], [6, 7, 8])
    datum["loss_fn_inputs"] |= inputs
    return datum


CHUNKS = {"model_input": {"chunks": [{"type": "image", "data": ""}]}, "loss_fn_inputs": {}}
WRONG: dict[str, tuple[Any, str]] = {
    "no object": ([PLAIN, 7], "datum 1 must be an object, 7 came"),
    "no input": ([{"loss_fn_inputs": {}}], "datum 0 has no model_input"),
    "an unknown field": ([{**PLAIN, "extra": 1}], "unknown field 'extra' in datum 0"),
    "an image without its format": ([CHUNKS], "datum 0: model_input[0] has no format"),
    "router replay": (
        [{**PLAIN, "model_input": {**PLAIN["model_input"], "routing_matrices": ["x"]}}],
        "datum 0: model_input with routing_matrices is not supported here",
    ),
    "floats as targets": (
        [changed(target_tokens=tensor([6.5, 7, 8], "int64"))],
        "datum 0: target_tokens must be a flat list of integers",
    ),
    "truth as a number": (
        [changed(weights=tensor([True, False, True]))],
        "datum 0: weights must be a flat list of numbers",
    ),
    "truth among integers": (
        [changed(target_tokens=tensor([True, 7, 8], "int64"))],
        "datum 0: target_tokens must be a flat list of integers",
    ),
    "texts": (
        [changed(weights=tensor(["1", "2", "3"]))],
        "datum 0: weights must be a flat list of numbers",
    ),
    "columns without rows": (
        [changed(weights=tensor([1.0], shape=[3, 1], sparse_col_indices=[0]))],
        "datum 0: weights has no sparse_crow_indices",
    ),
    "an empty shape that is too large": (
        [changed(weights=tensor([], shape=[0, 1 << 62]))],
        "datum 0: weights: shape (0, 4611686018427387904) is too large",
    ),
    "lists in a list": (
        [changed(weights=tensor([[1.0], [1.0], [1.0]]))],
        "datum 0: weights must be a flat list of numbers",
    ),
    "lists of several lengths": (
        [changed(weights=tensor([[1.0], [1.0, 2.0]]))],
        "datum 0: weights must be a flat list of numbers",
    ),
    "too large an id": (
        [one([5, 1 << 40, 7], [6, 7, 8])],
        "datum 0: model_input[0] has 1099511627776, which is no int32",
    ),
    "more digits than 64 bits": (
        [changed(target_tokens=tensor([6, 7, 10**30], "int64"))],
        "datum 0: target_tokens must be a flat list of integers",
    ),
    "another dtype": (
        [changed(weights=tensor([1.0, 1.0, 1.0], "float64"))],
        "datum 0: weights has dtype 'float64'; there are ['float32', 'int32', 'int64']",
    ),
    "another shape": (
        [changed(weights=tensor([1.0, 1.0, 1.0], shape=[2, 2]))],
        "datum 0: weights: shape (2, 2) does not fit 3 elements",
    ),
    "half of the sparse rows": (
        [changed(weights=tensor([1.0], shape=[3, 1], sparse_crow_indices=[0, 1, 1, 1]))],
        "datum 0: weights has no sparse_col_indices",
    ),
    "what float32 can't hold": (
        [changed(weights=tensor([1e300, 1.0, 1.0]))],
        "datum 0: weights[0] is inf: every number must be finite",
    ),
    "an input that is not read": (
        [changed(advantages=tensor([1.0, 1.0, 1.0]))],
        "cross_entropy does not read 'advantages'",
    ),
    "no list": ({}, "data must be a list, {} came"),
    "no datums": ([], "forward_backward needs at least 1 datum, none came"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_refused_call_uses_up_its_turn(wire: Wire, name: str) -> None:
    data, sentence = WRONG[name]
    model = wire.create()
    found = wire.result(wire.post("/forward_backward", **body(model, 1, data)))
    assert found["category"] == "user" and sentence in found["error"]
    assert "metrics" in wire.result(wire.optim_step(model, 2))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"loss_fn": "nll"}, "unknown loss 'nll'; there are"),
        ({"loss_fn": None}, "forward_backward_input has no loss_fn"),
        ({"loss_fn_config": {"beta": [1]}}, "loss_fn_config beta must be a number or a text"),
        ({"loss_fn_config": {"beta": True}}, "loss_fn_config beta must be a number or a text"),
        ({"loss_fn_config": {"beta": 10**400}}, "beta must be a number of 63 bits"),
        ({"loss_fn_config": {"beta": 1}}, "unknown loss_fn_config key 'beta'"),
        ({"chunks": 3}, "unknown field 'chunks' in forward_backward_input"),
    ],
)
def test_settings_of_a_call_are_checked(wire: Wire, more: dict[str, Any], sentence: str) -> None:
    model = wire.create()
    found = wire.result(wire.post("/forward_backward", **body(model, 1, [PLAIN], **more)))
    assert sentence in found["error"]
    assert "metrics" in wire.result(wire.optim_step(model, 2))


def test_texts_as_numbers_take_no_memory() -> None:
    """NumPy would make a matrix of letters of them, as wide as the longest."""
    texts: list[Any] = ["a" * 100_000, *["b"] * 200]
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="x must be a flat list of numbers"):
            json_calls._numbers(texts, np.dtype("<f4"), "x")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("kind", "text"),
    (("APPLICATION/JSON; charset=utf-8", "loss_fn_outputs"), ("application/jsonx", "no Forward")),
)
def test_the_content_type_says_what_a_body_is(wire: Wire, kind: str, text: str) -> None:
    call = json.dumps(body(wire.create(), 1, [PLAIN])).encode()
    reply = wire.http.post("/forward_backward", content=call, headers={"Content-Type": kind})
    found = wire.result(reply.json()) if reply.status_code == 200 else reply.json()
    assert text in json.dumps(found)


def test_a_call_without_a_place_is_refused_at_once(wire: Wire) -> None:
    model = wire.create()
    for change, sentence in (({"seq_id": None}, "no seq_id"), ({"model_id": None}, "no model_id")):
        reply = wire.http.post("/forward_backward", json={**body(model, 1, [PLAIN]), **change})
        assert reply.status_code == 400 and sentence in reply.json()["detail"]
    reply = wire.http.post("/forward", content=b"\x0a\x00")
    assert reply.status_code == 400 and "the body is not JSON" in reply.json()["detail"]


def sampled(server, wire: Wire, accept: str, **more: Any) -> dict[str, Any]:
    """A sample of the base model, asked for as SDK 0.16 does: chunks have no type."""
    session = wire.post("/create_session", tags=[], user_metadata={}, sdk_version="0")
    name = wire.post(
        "/create_sampling_session",
        session_id=session["session_id"],
        sampling_session_seq_id=0,
        base_model="tiny",
    )["sampling_session_id"]
    promise = wire.post(
        "/asample",
        sampling_session_id=name,
        seq_id=1,
        prompt={"chunks": [{"tokens": [10, 20, 30]}]},
        sampling_params={"max_tokens": 4, "seed": 3, "stop": []},
        **more,
    )
    reply = wire.http.post("/retrieve_future", json=promise, headers={"Accept": accept})
    assert reply.headers["content-type"] == JSON
    return reply.json()


def test_a_sample_is_json_for_a_client_that_accepts_no_protobuf(server, wire: Wire) -> None:
    scores = {"prompt_logprobs": True, "topk_prompt_logprobs": 2}
    found = sampled(server, wire, JSON, **scores)
    with server.service_client() as service:
        client = service.create_sampling_client(base_model="tiny").result()
        wanted = client.sample(
            tinker.ModelInput.from_ints([10, 20, 30]),
            1,
            tinker.SamplingParams(max_tokens=4, seed=3, stop=[]),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=2,
        ).result()
    [sequence] = wanted.sequences
    assert found["sequences"] == [
        {
            "stop_reason": "length",
            "tokens": list(sequence.tokens),
            "logprobs": list(sequence.logprobs),
        }
    ]
    assert (
        found["prompt_logprobs"] == wanted.prompt_logprobs and found["prompt_logprobs"][0] is None
    )
    pairs = [row and [list(pair) for pair in row] for row in wanted.topk_prompt_logprobs]
    assert found["topk_prompt_logprobs"] == pairs and pairs[0] is None


def test_what_json_has_no_form_for_is_refused(server, wire: Wire) -> None:
    found = sampled(server, wire, JSON, topk_sample_logprobs=2)
    assert "send Accept: application/x-protobuf" in found["detail"]
