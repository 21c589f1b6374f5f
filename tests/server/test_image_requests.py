"""Images in requests: where they stand among the ids, what holds them, and what is refused with the
name of the datum and of the chunk. The engine's registry is a stand-in."""

import base64
import gc
import threading
import weakref
import zlib
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tinker
from conftest import VOCAB, Wire, make_datum
from support.images import PROCESSOR, Core, jpeg, png
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinsmith.engine import image_cache
from tinsmith.engine.decoding import Sample, SampleRequest, SampleResult
from tinsmith.engine.image_cache import ImageCache, look
from tinsmith.engine.training import Batch, BatchResult, TrainJob
from tinsmith.server.http.overload import Arrivals, Overloaded
from tinsmith.server.wire import chunking, images, json_calls, sampling_calls, training_calls
from tinsmith.server.wire.messages import pb
from tinsmith.server.wire.provenance import Sampled

SIZE, TOKENS = (40, 100), 3  # one token high, three wide
MODEL: Any = SimpleNamespace(
    vocab=VOCAB,
    context=1 << 16,
    config={"context": 1 << 16},
    eos_ids=(1,),
    processor=PROCESSOR,
    no_images="",
)
BLIND: Any = SimpleNamespace(
    vocab=VOCAB, context=99, processor=None, no_images="its folder has no vision tower"
)


def chunk(data: bytes, name: str = "png", tokens: int | None = None) -> tinker.types.ImageChunk:
    return tinker.types.ImageChunk(data=data, format=name, expected_tokens=tokens)


def text(*ids: int) -> tinker.types.EncodedTextChunk:
    return tinker.types.EncodedTextChunk(tokens=list(ids))


def datum(*chunks: Any, length: int | None = None, **inputs: Any) -> tinker.Datum:
    """A datum of chunks, whose targets are 0 at all `length` positions."""
    count = sum(one.length for one in chunks) if length is None else length
    made = make_datum([], None, weights=np.ones(count), **inputs)
    targets = tinker.TensorData.from_numpy(np.zeros(count, np.int64))
    return tinker.Datum(
        model_input=tinker.ModelInput(chunks=list(chunks)),
        loss_fn_inputs={**made.loss_fn_inputs, "target_tokens": targets},
    )


def as_protobuf(data: list[tinker.Datum], loss: str = "cross_entropy") -> Any:
    inputs = tinker.types.ForwardBackwardInput(data=data, loss_fn=loss)
    call = tinker.types.ForwardBackwardRequest(
        forward_backward_input=inputs, model_id="run", seq_id=1
    )
    return forward_backward_request_to_proto(call)


def json_chunk(one: Any) -> dict[str, Any]:
    made = one.model_dump(mode="json", exclude_none=True)
    if "data" in made:
        made["data"] = base64.b64encode(one.data).decode()
    return made


def as_json(data: list[tinker.Datum], loss: str = "cross_entropy") -> dict[str, Any]:
    datums = [
        {
            "model_input": {"chunks": [json_chunk(one) for one in each.model_input.chunks]},
            "loss_fn_inputs": {
                key: {"data": value.data, "dtype": value.dtype, "shape": value.shape}
                for key, value in each.loss_fn_inputs.items()
            },
        }
        for each in data
    ]
    return {"forward_backward_input": {"loss_fn": loss, "data": datums}}


def read(
    call: training_calls.TrainingCall, cache: ImageCache, model: Any = MODEL, most: int = 99
) -> Batch:
    """A batch, as the route reads it."""
    placed = training_calls.look_at_images(call, model, most)
    return training_calls.batch(call, model, held=[cache.hold(one.image) for one in placed])


def both(data: list[tinker.Datum], model: Any = MODEL, most: int = 99, **more: Any) -> list[Batch]:
    """The batches of a call in protobuf and in JSON."""
    calls = [
        training_calls.parse_call(as_protobuf(data, **more).SerializeToString()),
        json_calls.call_of(as_json(data, **more), "forward_backward_input"),
    ]
    cache = ImageCache(Core())
    return [read(call, cache, model, most) for call in calls]


def refused(data: list[tinker.Datum], match: str, **more: Any) -> None:
    """Both forms are refused with the sentence."""
    for call in (
        lambda: training_calls.parse_call(as_protobuf(data).SerializeToString()),
        lambda: json_calls.call_of(as_json(data), "forward_backward_input"),
    ):
        with pytest.raises(ValueError, match=match):
            read(call(), ImageCache(Core()), **more)


# ---- training calls ----


def test_images_ids_stand_in_the_places_of_their_chunks() -> None:
    one, other = png(1, SIZE), jpeg(2, (70, 40))
    first = datum(text(5, 6), chunk(one, tokens=TOKENS), text(7))
    second = datum(chunk(other, "jpeg", 2), text(8), chunk(one, tokens=TOKENS))
    for batch in both([first, second]):
        ids = [5, 6, -1, -2, -3, 7, -4, -5, 8, -1, -2, -3]
        assert batch.tokens.tolist() == ids and batch.tokens.dtype == np.int32
        assert batch.lengths.tolist() == [6, 6] and not batch.targets.any()
        assert [held.core.first for held in batch.images] == [-1, -4, -1]
        plain = sum(array.nbytes for array in [*batch.arrays, *batch.inputs.values()])
        assert batch.nbytes == plain + 3 * 1024 * (3 + 2)  # each image's pixels once


def test_the_number_of_tokens_may_be_left_out() -> None:
    one = datum(text(5), chunk(png(1, SIZE)), length=1 + TOKENS)
    assert both([one])[0].lengths.tolist() == [1 + TOKENS]


def test_many_small_images_of_a_datum_are_no_small_fields(monkeypatch) -> None:
    """Whatever they weigh together; and the call without images is cut as before."""
    monkeypatch.setattr(chunking, "INNER_BYTES_MAX", 1 << 14)
    files = [png(seed, SIZE) for seed in range(64)]
    assert max(map(len, files)) < chunking.LARGE < sum(map(len, files))
    call = as_protobuf([datum(*[chunk(one, tokens=TOKENS) for one in files])])
    parsed = training_calls.parse_call(call.SerializeToString())
    assert parsed.lifted.images and sum(map(len, parsed.parts)) < 1 << 14
    batch = read(parsed, ImageCache(Core()))
    assert batch.tokens.tolist() == [-1 - row for row in range(64 * TOKENS)]
    plain = training_calls.parse_call(as_protobuf([datum(text(5))]).SerializeToString())
    assert not plain.lifted.images and not plain.lifted._strings
    assert training_calls.look_at_images(plain, BLIND, 1) == []


@pytest.mark.parametrize(
    ("file", "name", "match"),
    [
        (b"GIF89a", "png", "the image is no PNG file"),
        (b"GIF89a", "jpeg", "the image is no JPEG file"),
        (png(1, SIZE)[:-20], "png", "the image ends early or is damaged"),
        (png(1, (1, 300)), "png", "the image is 300 × 1: more than 200 times as long as wide"),
        (b"", "png", "the image is no PNG file"),
    ],
)
def test_a_bad_file_is_refused_by_datum_and_chunk(file, name, match) -> None:
    good = datum(text(5), chunk(png(1, SIZE), tokens=TOKENS))
    bad = datum(text(5, 6), text(7), chunk(file, name, 1), text(8))
    refused([good, bad], rf"^datum 1: model_input\[2\]: {match}$")


def test_what_differs_from_the_processor_is_refused() -> None:
    """In the number of tokens, here of the hosted service's example; and in the size."""
    wide = replace(PROCESSOR, least=65536, most=16777216)
    model = SimpleNamespace(**{**vars(MODEL), "processor": wide})
    one = datum(text(5), chunk(png(1, (220, 300)), tokens=63))
    match = r"^datum 0: model_input\[1\]: expected 63 tokens, got 70 from image \(300 × 220 pixels"
    refused([one], match, model=model)
    call = as_protobuf([datum(chunk(png(1, SIZE), tokens=TOKENS))])
    call.data[0].model_input[0].image.override_dimensions.width = 9
    parsed = training_calls.parse_call(call.SerializeToString())
    with pytest.raises(
        ValueError, match=r"datum 0: model_input\[0\] with override_dimensions is n"
    ):
        read(parsed, ImageCache(Core()))


def test_an_image_that_is_too_large_for_this_server_is_refused() -> None:
    one = datum(text(5), chunk(png(1, (64, 64)), tokens=4))
    both([one], most=4)
    match = r"^datum 0: model_input\[1\]: the image has 4 tokens; this server takes 3 \(--image-tok"
    refused([one], match, most=3)


def test_a_request_has_so_many_images_and_pixels(monkeypatch) -> None:
    monkeypatch.setattr(images, "COUNT_MAX", 3)
    made = [datum(chunk(png(1, SIZE), tokens=TOKENS)) for _ in range(4)]
    assert len(both(made[:3])[0].images) == 3
    refused(made, r"^datum 3: model_input\[0\]: the request has more than 3 images")
    monkeypatch.setattr(images, "PIXELS_MAX", 2 * 40 * 100)
    refused(made[:3], r"^datum 2: model_input\[0\]: the request's images have 12000 pixels up to t")


def test_a_model_without_a_tower_refuses_images_and_nothing_else() -> None:
    match = (
        r"^datum 0: model_input\[1\]: this model takes no images: its folder has no vision tower$"
    )
    refused([datum(text(5), chunk(png(1, SIZE), tokens=TOKENS))], match, model=BLIND)
    assert both([datum(text(5), text(6))], model=BLIND)[0].tokens.tolist() == [5, 6]


def test_other_chunks_are_refused_by_name() -> None:
    call = as_protobuf([datum(text(5))])
    call.data[0].model_input.add().dmel.SetInParent()
    match = (
        r"datum 0: model_input\[1\] is a chunk of dmel; tinsmith takes text and images, no audio"
    )
    with pytest.raises(ValueError, match=match):
        read(training_calls.parse_call(call.SerializeToString()), ImageCache(Core()))
    pointer = {"type": "image_asset_pointer", "location": "/etc/passwd", "format": "png"}
    for one, match in (
        (pointer, r"datum 0: model_input\[0\] is an image_asset_pointer: send the image's bytes"),
        ({"type": "x"}, r"datum 0: model_input\[0\] is a chunk of x; tinsmith takes text and imag"),
        ({}, r"datum 0: model_input\[0\] is a chunk of an unknown kind; tinsmith"),
        ({"type": "image"}, r"datum 0: model_input\[0\] has no data"),
        ({"type": "image", "data": "Ä", "format": "png"}, r"model_input\[0\]: the image's data is"),
        (
            {"type": "image", "data": "ab", "format": "png"},
            r"model_input\[0\]: the image's data is",
        ),
        (
            {"type": "image", "data": "", "format": "png", "x": 1},
            "unknown field 'x' in datum 0: mo",
        ),
        (
            {"type": "image", "data": "", "format": "png", "expected_tokens": -1},
            r"model_input\[0\]: expected_tokens must be from 0 to",
        ),
    ):
        body = as_json([datum(text(5))])
        body["forward_backward_input"]["data"][0]["model_input"]["chunks"] = [one]
        with pytest.raises(ValueError, match=match):
            read(json_calls.call_of(body, "forward_backward_input"), ImageCache(Core()))


def test_another_format_is_refused_although_its_image_is_never_looked_at() -> None:
    call = as_protobuf([datum(text(5), chunk(png(1, SIZE), tokens=TOKENS))])
    call.data[0].model_input[1].image.format = "gif"
    call.data[0].model_input[1].image.data = b"GIF89a"
    parsed = training_calls.parse_call(call.SerializeToString())
    assert not parsed.lifted.images
    match = r"datum 0: model_input\[1\]: the image's format must be png or jpeg, 'gif' came"
    with pytest.raises(ValueError, match=match):
        read(parsed, ImageCache(Core()))


def test_a_teachers_tokens_can_have_no_image() -> None:
    teacher = np.asarray([5.0, 6.0])
    one = datum(text(5), chunk(png(1, SIZE), tokens=TOKENS))
    one.loss_fn_inputs["teacher_tokens"] = tinker.TensorData.from_numpy(teacher.astype(np.int64))
    with pytest.raises(ValueError, match=r"datum 0 has an image, which the teacher's teacher_tok"):
        both([one], loss="generalized_jsd")
    carried = datum(chunk(png(1, SIZE), tokens=TOKENS))
    shape = np.zeros((TOKENS, 2))
    carried.loss_fn_inputs.clear()
    kinds = {"target_tokens": np.int64, "teacher_logprobs": np.float32, "weights": np.float32}
    for key, kind in kinds.items():
        carried.loss_fn_inputs[key] = tinker.TensorData.from_numpy(shape.astype(kind))
    assert both([carried], loss="generalized_jsd")[0].tokens.tolist() == [-1, -2, -3]


def test_merged_fields_of_an_image_are_protobufs() -> None:
    """An image in two parts of one message, and one that a text replaces."""
    data = png(1, SIZE)
    parts = [pb.ImageChunk(data=b"x", format="png"), pb.ImageChunk(data=data)]
    whole = b"".join(
        chunking._tagged(2, len(p)) + p for p in (q.SerializeToString() for q in parts)
    )
    gone = pb.Chunk(image=pb.ImageChunk(data=b"y", format="png")).SerializeToString()
    gone += pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=b"\5\0\0\0")).SerializeToString()
    call = as_protobuf([datum(length=1 + TOKENS)])
    inner = b"".join(chunking._tagged(1, len(one)) + one for one in (whole, gone))
    inner += call.data[0].SerializeToString()
    call.ClearField("data")
    body = call.SerializeToString() + chunking._tagged(3, len(inner)) + inner
    batch = read(training_calls.parse_call(body), ImageCache(Core()))
    assert batch.tokens.tolist() == [-1, -2, -3, 5]


# ---- prompts ----


def prompt(*chunks: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": {"chunks": [json_chunk(one) for one in chunks]}, **more}


def asked(body: dict[str, Any], cache: ImageCache, model: Any = MODEL) -> SampleRequest:
    placed = sampling_calls.look_at_images(body, model, 99)
    held = [cache.hold(one.image) for one in placed]
    return sampling_calls.sample_request(body, model, 0, held=held)


def test_a_prompt_has_the_ids_of_its_images() -> None:
    cache = ImageCache(Core())
    body = prompt(text(5), chunk(png(1, SIZE), tokens=TOKENS), text(6, 7), prompt_logprobs=True)
    assert sampling_calls.has_images(body) and not sampling_calls.has_images(prompt(text(5)))
    found = asked(body, cache)
    assert found.prompt.tolist() == [5, -1, -2, -3, 6, 7] and found.prompt.dtype == np.int32
    assert [one.core.first for one in found.images] == [-1]
    without = replace(found, images=())
    held = [sampling_calls.held_bytes(one, 99) for one in (found, without)]
    assert held[0] - held[1] == 3 * 1024 * TOKENS
    for bad in ({}, {"prompt": 5}, {"prompt": {"chunks": 5}}, {"prompt": {"chunks": [5]}}):
        assert not sampling_calls.has_images(bad)


def test_a_prompts_refusals_name_the_chunk() -> None:
    one = chunk(png(1, SIZE), tokens=4)
    cache = ImageCache(Core())
    with pytest.raises(
        ValueError, match=r"^prompt\[1\]: expected 4 tokens, got 3 from image \(100"
    ):
        asked(prompt(text(5), one), cache)
    with pytest.raises(ValueError, match=r"^prompt\[0\]: this model takes no images: its folder"):
        asked(prompt(one), cache, BLIND)
    body = prompt(text(5))
    body["prompt"]["chunks"].append({"type": "image_asset_pointer", "location": "file:///x"})
    with pytest.raises(ValueError, match=r"^prompt\[1\] is an image_asset_pointer: send the image"):
        asked(body, cache)
    with pytest.raises(ValueError, match=r"^prompt\[0\]: the image's format must be png or jpeg"):
        sampling_calls.sample_request(
            {"prompt": {"chunks": [{"type": "image", "data": "", "format": "gif"}]}}, MODEL, 0
        )


def test_what_was_sampled_behind_an_image_is_trained_behind_the_same_image() -> None:
    """An image's ids are part of a sample's provenance."""
    cache, files = ImageCache(Core()), [png(seed, SIZE) for seed in (1, 2)]
    ids = [5, *cache.hold(look(partial(bytes, files[0]), "png", PROCESSOR)).ids.tolist(), 6]
    logprobs = np.asarray([-0.5, -0.25], np.float32)
    known = Sampled(np.asarray(ids, np.int32), np.asarray([7, 8], np.int32), logprobs)

    def trained(file: bytes, *, before: int = 6) -> Batch:
        advantages = np.asarray([0, 0, 0, 0, 1, 1], np.float32)
        one = datum(text(5), chunk(file, tokens=TOKENS), text(before, 7), advantages=advantages)
        del one.loss_fn_inputs["weights"]
        one.loss_fn_inputs["target_tokens"] = tinker.TensorData.from_numpy(
            np.asarray([0, 0, 0, 6, 7, 8], np.int64)
        )
        one = one.with_provenance(
            model_input=[
                tinker.PromptProvenanceSpan(sequence_id="s:0", length=5),
                tinker.SampledProvenanceSpan(sequence_id="s:0", length=1),
            ],
            loss_fn_inputs=[
                tinker.PromptProvenanceSpan(sequence_id="s:0", offset=1, length=4),
                tinker.SampledProvenanceSpan(sequence_id="s:0", length=2),
            ],
        )
        call = training_calls.parse_call(as_protobuf([one], "stable_reinforce").SerializeToString())
        placed = training_calls.look_at_images(call, MODEL, 99)
        held = [cache.hold(one.image) for one in placed]
        return training_calls.batch(call, MODEL, find=lambda name: known, held=held)

    assert trained(files[0]).inputs["logprobs"].tolist() == [0, 0, 0, 0, -0.5, -0.25]
    match = "has a row of an image at position 1, but sequence s:0 has another image's there"
    with pytest.raises(ValueError, match=match):
        trained(files[1])
    with pytest.raises(ValueError, match="has id 9 at position 4, but sequence s:0 has id 6 there"):
        trained(files[0], before=9)


# ---- through a server ----


class Seeing:
    """A server whose model can see, and whose engine gets nothing: its jobs and requests are
    noted."""

    def __init__(self, server: Any, monkeypatch: pytest.MonkeyPatch):
        self.cache = ImageCache(Core(), recent_bytes=0)
        self.asked: list[Any] = []
        self.futures: list[Future[Any]] = []
        self.service = server._service
        monkeypatch.setattr(image_cache, "images", lambda: self.cache)
        blind = self.service.bases["tiny"]
        tower: Any = SimpleNamespace(processor=PROCESSOR)
        monkeypatch.setitem(self.service.bases, "tiny", replace(blind, vision=tower))
        submit = server.worker.submit

        def noted(model_id: str, seq: int, job: Any) -> Future[Any]:
            if not isinstance(job, TrainJob):
                return submit(model_id, seq, job)
            return self._note(job)

        monkeypatch.setattr(server.worker, "submit", noted)
        monkeypatch.setattr(server.worker, "sample", lambda name, one, client: self._note(one))

    def _note(self, asked: Any) -> Future[Any]:
        self.asked.append(asked)
        self.futures.append(Future())
        return self.futures[-1]


@pytest.fixture
def seeing(server, monkeypatch) -> Seeing:
    return Seeing(server, monkeypatch)


def sampler(wire: Wire) -> str:
    session = wire.post("/create_session", tags=[], user_metadata={}, sdk_version="0")
    made = wire.post(
        "/create_sampling_session",
        session_id=session["session_id"],
        sampling_session_seq_id=0,
        base_model="tiny",
    )
    return made["sampling_session_id"]


def test_a_job_holds_its_images_until_it_ends(server, seeing) -> None:
    wire = Wire(server.url)
    one = datum(text(5), chunk(png(1, SIZE), tokens=TOKENS))
    promise = wire.forward_backward(wire.create(), 1, [one], compress=True)
    [job] = seeing.asked
    assert job.batch.tokens.tolist() == [5, -1, -2, -3]
    pixels = weakref.ref(job.batch.images[0].core)
    assert seeing.service.queue.bytes == job.nbytes > 3 * 1024 * TOKENS
    assert seeing.service.arrivals.bytes == 0
    result = BatchResult((np.zeros(4, np.float32),), 0.0)
    seeing.futures.pop().set_result(result)
    assert wire.poll(promise).status_code == 200
    seeing.asked.clear()
    del job
    gc.collect()
    assert pixels() is None and seeing.service.queue.bytes == 0


def test_a_sample_holds_its_images_and_the_same_image_is_found(server, seeing) -> None:
    wire = Wire(server.url)
    name = sampler(wire)
    body = prompt(text(5), chunk(jpeg(1, SIZE), "jpeg", TOKENS), text(6))
    for number in range(2):
        wire.post("/asample", sampling_session_id=name, seq_id=number, **body)
    first, second = seeing.asked
    assert first.prompt.tolist() == second.prompt.tolist() == [5, -1, -2, -3, 6]
    assert first.images[0] is second.images[0]
    assert (seeing.cache.decoded, seeing.cache.found) == (1, 1)
    for future in seeing.futures:
        sample = Sample(np.asarray([5], np.int32), np.zeros(1, np.float32), "length")
        future.set_result(SampleResult((sample,)))


def test_decoding_waits_for_memory_and_counts_it(server, seeing, monkeypatch) -> None:
    taken = []
    take = Arrivals.acquire

    async def noted(self, entry, size):
        taken.append(size)
        await take(self, entry, size)

    monkeypatch.setattr(Arrivals, "acquire", noted)
    wire = Wire(server.url)
    file = png(1, (400, 300))
    body = prompt(chunk(file), text(6))
    wire.post("/asample", sampling_session_id=sampler(wire), seq_id=0, **body)
    [request] = seeing.asked
    most = image_cache.DECODING_BYTES * 400 * 300
    assert max(taken) >= most and sum(taken) >= most + len(file) + request.images[0].nbytes
    assert seeing.service.arrivals.bytes == 0
    sample = Sample(np.asarray([5], np.int32), np.zeros(1, np.float32), "length")
    seeing.futures.pop().set_result(SampleResult((sample,)))


def test_without_memory_to_decode_a_request_is_to_come_again(server, seeing, monkeypatch) -> None:
    """With 429, as one whose body finds no memory; then it is the first of its name."""
    take, full = Arrivals.acquire, True

    async def refused(self, entry, size):
        if full and size > 1 << 20:
            raise Overloaded("the server is full; come again", 5)
        await take(self, entry, size)

    monkeypatch.setattr(Arrivals, "acquire", refused)
    wire = Wire(server.url)
    name, model, file = sampler(wire), wire.create(), png(1, (400, 300))
    body = {"sampling_session_id": name, "seq_id": 0, **prompt(chunk(file))}
    rows = int(np.prod(PROCESSOR.tokens(400, 300)))
    one = as_protobuf([datum(text(5), chunk(file), length=1 + rows)])
    one.model_id = model
    post = partial(wire.http.post, headers={"Content-Type": "application/x-protobuf"})
    for _ in range(2):
        replies = [wire.http.post("/asample", json=body)]
        replies.append(post("/forward_backward", content=one.SerializeToString()))
        assert [reply.status_code for reply in replies] == ([429] * 2 if full else [200] * 2)
        full = False
    assert len(seeing.asked) == 2 and seeing.service.arrivals.bytes == 0
    sample = Sample(np.asarray([5], np.int32), np.zeros(1, np.float32), "length")
    for future, result in zip(
        seeing.futures,
        (SampleResult((sample,)), BatchResult((np.zeros(1 + rows, np.float32),), 0.0)),
        strict=True,
    ):
        future.set_result(result)


def test_an_image_is_decoded_beside_the_event_loop(server, seeing, monkeypatch) -> None:
    names = []
    decode = image_cache.decode

    def noted(*arguments: Any) -> Any:
        names.append(threading.current_thread().name)
        return decode(*arguments)

    monkeypatch.setattr(image_cache, "decode", noted)
    wire = Wire(server.url)
    model = wire.create()
    wire.forward_backward(model, 1, [datum(chunk(png(1, SIZE), tokens=TOKENS))])
    assert len(names) == 1 and names[0].startswith("tinsmith-beside")
    seeing.futures.pop().set_result(BatchResult((np.zeros(3, np.float32),), 0.0))


def test_a_damaged_image_takes_its_turn_with_a_sentence(server, seeing) -> None:
    """It is found only where it is decoded: the header and the checksums are good."""
    wire = Wire(server.url)
    model, good = wire.create(), png(1, SIZE)
    begin = good.index(b"IDAT")
    size = int.from_bytes(good[begin - 4 : begin])
    part = b"IDAT" + good[begin + 4 : begin + size // 2]
    bad = good[: begin - 4] + (len(part) - 4).to_bytes(4) + part
    bad += zlib.crc32(part).to_bytes(4) + good[begin + 8 + size :]
    promise = wire.forward_backward(model, 1, [datum(text(5), chunk(bad, tokens=TOKENS))])
    found = wire.result(promise)
    sentence = "datum 0: model_input[1]: the image ends early or is damaged"
    assert found == {"error": sentence, "category": "user"}
    assert "metrics" in wire.result(wire.optim_step(model, 2))
    body = prompt(chunk(bad))
    promise = wire.post("/asample", sampling_session_id=sampler(wire), seq_id=0, **body)
    assert wire.result(promise)["error"] == "prompt[0]: the image ends early or is damaged"


def test_a_model_that_cannot_see_says_so(server) -> None:
    wire = Wire(server.url)
    one = datum(text(5), chunk(png(1, SIZE), tokens=TOKENS))
    found = wire.result(wire.forward_backward(wire.create(), 1, [one]))
    assert found["category"] == "user"
    assert found["error"].startswith("datum 0: model_input[1]: this model takes no images: config.")
    promise = wire.post(
        "/asample", sampling_session_id=sampler(wire), seq_id=0, **prompt(chunk(png(1, SIZE)))
    )
    assert "which has no vision tower" in wire.result(promise)["error"]
