"""Large messages and JSON, read and written in pieces: to the same content as in one, with the same
refusals, and never much in one call, in which nothing else would run."""

import itertools
import json
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tinker
from conftest import make_datum
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinsmith.engine.decoding import PromptTargets, Sample, SampleResult
from tinsmith.engine.training import BatchResult
from tinsmith.server.service import bodies
from tinsmith.server.service.promises import Refusal
from tinsmith.server.wire import chunking, replies, sampling_calls, training_calls
from tinsmith.server.wire.messages import pb

MODEL: Any = SimpleNamespace(vocab=1000, context=1 << 20)


@pytest.fixture
def crumbs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is large."""
    monkeypatch.setattr(chunking, "LARGE", 6)
    monkeypatch.setattr(chunking, "PIECE", 40)
    monkeypatch.setattr(bodies, "STRETCH", 8)


def request(data: list[tinker.Datum]) -> pb.ForwardBackwardRequest:
    config = {"beta": 0.25, "teacher": "none"}
    inputs = tinker.types.ForwardBackwardInput(data=data, loss_fn="ppo", loss_fn_config=config)
    call = tinker.types.ForwardBackwardRequest(
        forward_backward_input=inputs, model_id="run", seq_id=7
    )
    return forward_backward_request_to_proto(call)


def some_data() -> list[tinker.Datum]:
    rng = np.random.default_rng(0)
    data = []
    for length in (1, 3, 9, 2, 30):
        made = rng.random((length, 2), np.float32)
        data.append(make_datum(list(range(length)), np.ones((length, 2)), weights=made))
    return data


def put_together(call: training_calls.TrainingCall) -> bytes:
    """The message that a call was, in protobuf's own order."""
    parts = [call.head, *map(training_calls._parsed, call.parts)]
    whole = b"".join(b"".join(chunking.fill(part, call.lifted)) for part in parts)
    return pb.ForwardBackwardRequest.FromString(whole).SerializeToString(deterministic=True)


def outcome(read: Any, body: bytes) -> bytes | None:
    """What a reader makes of a body; None where it refuses it."""
    try:
        return read(body)
    except Exception:
        return None


def at_once(body: bytes) -> bytes:
    return pb.ForwardBackwardRequest.FromString(body).SerializeToString(deterministic=True)


def in_pieces(body: bytes) -> bytes:
    return put_together(training_calls.parse_call(body))


@pytest.mark.usefixtures("crumbs")
def test_a_message_in_pieces_is_the_message() -> None:
    body = request(some_data()).SerializeToString()
    call = training_calls.parse_call(body)
    assert len(call) == 5 and len(call.parts) > 3 and len(call.lifted._strings) > 10
    assert (call.head.model_id, call.head.seq_id, call.head.loss_fn) == ("run", 7, "ppo")
    assert put_together(call) == at_once(body)


@pytest.mark.usefixtures("crumbs")
def test_fields_that_come_twice_are_merged_as_protobuf_merges_them() -> None:
    tensor, entry = pb.Tensor(dense=b"12345678", shape=[2]), pb.Datum.LossFnInputsEntry(key="w")
    parts = [tensor, pb.Tensor(dtype=pb.DTYPE_FLOAT32), pb.Tensor(dense=b"abcdefgh")]
    value = b"".join(
        chunking._tagged(2, len(b)) + b for b in (p.SerializeToString() for p in parts)
    )
    inner = entry.SerializeToString() + value
    datum = chunking._tagged(2, len(inner)) + inner
    head = pb.ForwardBackwardRequest(model_id="first", seq_id=5).SerializeToString()
    zero = bytes([2 << 3, 0])  # seq_id 0, which a message that is made has no field for
    again = pb.ForwardBackwardRequest(model_id="second").SerializeToString()
    body = head + chunking._tagged(3, len(datum)) + datum + zero + again
    call = training_calls.parse_call(body)
    [one] = call.datums()
    assert call.lifted.get(one.inputs["w"].dense) == b"abcdefgh"
    assert (call.head.model_id, call.head.seq_id) == ("second", 0)
    assert put_together(call) == at_once(body)


@pytest.mark.usefixtures("crumbs")
def test_what_protobuf_refuses_is_refused_and_nothing_else() -> None:
    body, drawn = request(some_data()).SerializeToString(), random.Random(0)
    refused = 0
    for _ in range(2000):
        bad = bytearray(body)
        for _ in range(drawn.randint(1, 3)):
            bad[drawn.randrange(len(bad))] = drawn.choice([0, 1, 0x0B, 0x1A, 0x7F, 0x80, 0xFF])
        bad = bad[: drawn.choice([len(bad), drawn.randrange(len(bad))])]
        expected = outcome(at_once, bytes(bad))
        refused += expected is None
        assert outcome(in_pieces, bytes(bad)) == expected
    assert 200 < refused < 1950
    for at in range(len(body)):  # each length is one too large once
        bad = bytearray(body)
        bad[at] = (bad[at] + 1) % 256
        assert outcome(in_pieces, bytes(bad)) == outcome(at_once, bytes(bad)), at


def test_a_request_without_datums_has_a_limit() -> None:
    body = pb.ForwardBackwardRequest(model_id="x" * (1 << 21)).SerializeToString()
    with pytest.raises(ValueError, match=r"no ForwardBackwardRequest message: \d+ bytes of it are"):
        training_calls.parse_call(body)


def test_a_batch_of_large_arrays_is_the_batch_of_small_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = request(some_data()).SerializeToString().replace(b"ppo", b"cross_entropy"[:3])
    body = pb.ForwardBackwardRequest.FromString(body)
    body.loss_fn = "cross_entropy"
    body.ClearField("loss_fn_config")
    body.ClearField("loss_fn_config_v2")
    body = body.SerializeToString()
    plain = training_calls.batch(training_calls.parse_call(body), MODEL)
    monkeypatch.setattr(chunking, "LARGE", 6)
    monkeypatch.setattr(chunking, "PIECE", 40)
    call = training_calls.parse_call(body)
    lifted = training_calls.batch(call, MODEL)
    assert not call.parts  # what has become arrays is let go of
    for one, other in zip(plain.arrays, lifted.arrays, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(plain.inputs["weights"], lifted.inputs["weights"])
    assert plain.shapes == lifted.shapes


# ---- results ----


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).random(shape, np.float32)


@pytest.mark.parametrize("length", (3, 60_000), ids=("small", "large"))
def test_results_of_any_size_are_the_sdks_message(length: int) -> None:
    logprobs = (numbers(length, 2), numbers(5, 2), numbers(4), *(numbers(9) for _ in range(4000)))
    jsd = tuple(part + 1 for part in logprobs)
    parts = replies.batch_message(BatchResult(logprobs, 1.5, {"jsd:mean": 2.0}, {"jsd": jsd}))
    assert max(map(len, parts)) > 1e5 or length == 3
    message = pb.ForwardBackwardOutput.FromString(b"".join(parts))
    assert message.loss_fn_output_type == "ArrayRecord"
    assert dict(message.metrics) == {"loss:sum": 1.5, "jsd:mean": 2.0}
    found: dict[str, list[np.ndarray]] = {"logprobs": [], "jsd": []}
    for record in message.loss_fn_outputs:
        assert record.type_tag == "ArrayRecord"
        for name, tensor in record.fields.items():
            ends = np.frombuffer(tensor.offsets, "<i8")
            assert len(ends) == record.num_datums + 1 and tensor.dtype == pb.DTYPE_FLOAT32
            for begin, end in itertools.pairwise(ends):
                flat = np.frombuffer(tensor.data[begin:end], "<f4")
                found[name].append(flat.reshape(-1, *tensor.trailing_shape))
    for name, expected in (("logprobs", logprobs), ("jsd", jsd)):
        assert len(found[name]) == len(expected)
        for one, other in zip(found[name], expected, strict=True):
            np.testing.assert_array_equal(one.reshape(other.shape), other)


@pytest.mark.parametrize("length", (3, 60_000), ids=("small", "large"))
def test_samples_of_any_size_are_the_sdks_message(length: int) -> None:
    ids = np.arange(2 * length, dtype=np.int32).reshape(length, 2)
    samples = tuple(
        Sample(ids[:, 0].copy(), numbers(length), reason, ids + n, numbers(length, 2))
        for n, reason in enumerate(("stop", "length"))
    )
    cells = np.arange(1, length)
    targets = PromptTargets(ids[1:, 0], cells, (length, 1), cells, length)
    result = SampleResult(
        samples, numbers(length), ids, numbers(length, 2), targets, numbers(length - 1), ids,
        numbers(length, 2),
    )  # fmt: skip
    message = pb.SampleResponse.FromString(b"".join(sampling_calls.sample_message(result)))
    for sequence, sample in zip(message.sequences, samples, strict=True):
        assert sequence.tokens == sample.tokens.tobytes()
        assert sequence.logprobs == sample.logprobs.tobytes()
        topk = sequence.topk_sampled_logprobs
        assert topk.token_ids == sample.topk_ids.tobytes() and (topk.k, topk.length) == (2, length)
        assert topk.logprobs == sample.topk_logprobs.tobytes()
    stops = [sequence.stop_reason for sequence in message.sequences]
    assert stops == [pb.STOP_REASON_STOP, pb.STOP_REASON_LENGTH]
    assert message.prompt_logprobs == result.prompt_logprobs.tobytes()
    assert message.topk_prompt_logprobs.token_ids == ids.tobytes()
    scores = np.frombuffer(message.target_prompt_logprobs.dense, "<f4")
    np.testing.assert_array_equal(scores[1:], result.target_logprobs)
    drawn = message.prompt_alt_tokens
    assert drawn.tokens.dense == ids.astype("<i8").tobytes()
    assert drawn.logprobs.dense == numbers(length, 2).tobytes()
    assert sampling_calls.result_bytes(result) >= 4 * 10 * length


# ---- JSON ----

DOCUMENTS = [
    '{"a": [1, 2, 3, -4, 5.5e3, 12345678901234567890, 7], "b": [[1, 2], [], [3]]}',
    '{"a": [null, true, false, "x,y]", {"c": [1, [2, 3, 4, 5, 6, 7, 8, 9]]}, NaN, -Infinity, 0]}',
    '{ "a" : [ 1 ,2\n,\t3 ] , "b" : [ ] , "c" : [\n] }',
    '{"a": [1, 2, 3, 4, 5, 6, 7,]}', '{"a": [,1, 2, 3, 4]}', '{"a": [1, 2, , 3, 4, 5]}',
    '{"a": [1, 2, 3, 4 5, 6, 7]}', '{"a": [1, 2, 3, 4, 5, 6', '{"a": [1, 2, 3, 4, 5, 6}',
    '{"a": [01, 2, 3]}', '{"a": [1, 2, 3, 4, x, 5]}', '{"a": [1, 2, 3]', "{} 1", "[1,2,3,4,5,6] ]",
    '{"a": [1, 2, 3, 4, ]}', '{"a": "[1, 2, 3, 4"}', '{"a": [' + "1" * 5000 + ", 2]}",
]  # fmt: skip


@pytest.mark.usefixtures("crumbs")
@pytest.mark.parametrize("text", DOCUMENTS, ids=range(len(DOCUMENTS)))
def test_json_in_pieces_is_json(text: str) -> None:
    def read(**how: Any) -> str:
        try:
            return repr(json.loads(text, **how))
        except json.JSONDecodeError as error:
            return f"at {error.pos}"
        except ValueError as error:
            return str(error)

    assert read(cls=bodies._Decoder) == read(**bodies._FINITE)


@pytest.mark.parametrize(
    ("text", "sentence"),
    (
        ('{"a": [' + "[]," * (1 << 17) + "[]]}", "131075 of them lists and objects"),
        ('{"a": [' + "1," * 10_000_000 + "1]}", r"JSON has up to 10\d{6} values in its first"),
        ('{"a":' * 65 + "1" + "}" * 65, "more than 64 lists and objects in each other"),
        ('{"a": ' + "[" * 64 + "]" * 64 + "}", "more than 64 lists and objects in each other"),
        ('{"a": ' + "[" * 9000 + "]" * 9000 + "}", "not JSON: maximum recursion depth"),
        ('{"a": NaN}', "not JSON: the number NaN is not finite"),
        ('{"a": [-Infinity]}', "not JSON: the number -Infinity is not finite"),
        ('{"a": [1, 2, 1e999]}', "not JSON: the number 1e999 is not finite"),
        ('{"a": {"b": ["\\ud800"]}}', r"the text '\\ud800', which is no Unicode"),
        ('{"\\uDFFFx": 1}', r"the text '\\udfffx', which is no Unicode"),
        (b'{"a": "\xed\xa0\x80"}', "not JSON: byte 7 is no UTF-8"),
    ),
)
def test_json_that_could_do_harm_is_refused(text: str | bytes, sentence: str) -> None:
    body = text.encode() if isinstance(text, str) else text

    def read() -> None:
        bodies.count_values(body)
        bodies.parse_json(body)

    with pytest.raises(Refusal, match=sentence):
        read()


def test_json_that_is_unusual_is_read() -> None:
    text = '{"a": ' + "[" * 63 + "]" * 63 + ', "b": "\\ud83d\\ude00", "c": "\\\\ud800"}'
    bodies.count_values(text.encode())
    assert bodies.parse_json(text.encode()) == json.loads(text)


# ---- others have their turns ----


def large_body(count: int, length: int, targets: int) -> bytes:
    ids = np.zeros((length, targets), np.int64)
    datum = make_datum([0] * length, ids, weights=np.ones((length, targets)))
    message = request([datum])
    message.loss_fn = "cross_entropy"
    message.ClearField("loss_fn_config")
    message.ClearField("loss_fn_config_v2")
    one = message.data[0]
    for _ in range(count - 1):
        message.data.add().CopyFrom(one)
    return message.SerializeToString()


@pytest.mark.parametrize("form", ((1000, 400, 1), (2, 300, 1600)), ids=("many", "large"))
def test_reading_a_request_lets_others_run(
    monkeypatch: pytest.MonkeyPatch, form: tuple[int, int, int]
) -> None:
    """protobuf keeps others waiting while it reads, so it reads little at a time."""
    body, parsed, sizes = large_body(*form), training_calls._parsed, list[int]()

    def counted(part: bytes) -> pb.ForwardBackwardRequest:
        sizes.append(len(part))
        return parsed(part)

    monkeypatch.setattr(training_calls, "_parsed", counted)
    assert len(training_calls.batch(training_calls.parse_call(body), MODEL).lengths) == form[0]
    assert sizes and max(sizes) < 2 * chunking.PIECE < len(body) / 8


def test_writing_a_result_lets_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """protobuf writes the message without its large arrays."""
    result = BatchResult((numbers(1_000_000), *(numbers(100) for _ in range(2000))), 0.0)
    sizes, fill = list[int](), chunking.fill

    def counted(message: Any, lifted: chunking.Lifted) -> list[chunking.Buffer]:
        sizes.append(message.ByteSize())
        return fill(message, lifted)

    monkeypatch.setattr(replies, "fill", counted)
    assert sum(map(len, replies.batch_message(result))) > 4 * 1_200_000
    assert sizes and max(sizes) < chunking.LARGE


def test_reading_json_lets_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """json's decoder in C keeps others waiting, so it reads a stretch at a time."""
    body = json.dumps({"data": list(range(400_000)), "prompt": {"chunks": [{"tokens": [1]}]}})
    sizes, expected, loads = list[int](), json.loads(body), json.loads

    def counted(text: str, **options: Any) -> Any:
        sizes.append(len(text))
        return loads(text, **options)

    monkeypatch.setattr(json, "loads", counted)
    assert bodies.parse_json(body.encode()) == expected
    assert sum(sizes) > 0.9 * len(body) and max(sizes) < len(body) / 8
