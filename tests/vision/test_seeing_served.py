"""Images through the SDK and a server: the numbers of transformers, whichever file an image came
in, and one decoding and one pass of the tower for each image."""

import io
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import tinker
from conftest import logprobs, make_datum
from PIL import Image
from support import vision_reference
from support.images import array
from support.vision_models import folder
from tinsmith.engine import image_cache
from tinsmith.engine.bases import Bases
from tinsmith.engine.image_cache import ImageCache
from tinsmith.server.backend import Backend
from tinsmith.server.service.config import ServerConfig

NAME = "qwen3_vl"
SIZES = ((200, 96), (60, 190), (31, 31))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    options: dict[str, Any] = {"device": "cpu", "threads": 1, "image_tokens": 20}
    options["checkpoints"] = tmp_path_factory.mktemp("checkpoints")
    with Backend(ServerConfig({"m": folder(NAME)}, **options)) as backend:
        yield backend


@pytest.fixture
def service(server: Backend) -> Iterator[tinker.ServiceClient]:
    with server.service_client() as client:
        yield client


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> ImageCache:
    """A process's new cache."""
    monkeypatch.setattr(image_cache, "_made", [])
    return image_cache.images()


def file_of(seed: int, name: str) -> tuple[bytes, Image.Image]:
    """A file with one of three sizes, and what Pillow reads of it."""
    out = io.BytesIO()
    Image.fromarray(array(seed, SIZES[seed % 3])).save(out, name)
    return out.getvalue(), Image.open(io.BytesIO(out.getvalue()))


def chunk(seed: int, name: str = "png") -> tuple[tinker.types.ImageChunk, Image.Image]:
    """An image for the SDK, which counts its tokens as the reference does, and for that."""
    data, image = file_of(seed, name)
    _, high, wide = vision_reference.pixels(folder(NAME), image)
    return tinker.types.ImageChunk(data=data, format=name, expected_tokens=high * wide // 4), image


def both(*parts: Any) -> tuple[tinker.ModelInput, list[Any]]:
    """Tokens and images, as the SDK sends them and as the reference takes them."""
    chunks, seen = [], []
    for part in parts:
        if isinstance(part, list):
            chunks.append(tinker.types.EncodedTextChunk(tokens=part))
            seen.append(part)
        else:
            chunks.append(part[0])
            seen.append(part[1])
    return tinker.ModelInput(chunks=chunks), seen


def targets_of(given: tinker.ModelInput) -> np.ndarray:
    """The next token, and 0 where it is an image's, and at the end."""
    ids: list[int] = []
    for one in given.chunks:
        ids += [0] * one.length if one.type == "image" else one.tokens
    return np.asarray([*ids[1:], 0], np.int64)


def datum(given: tinker.ModelInput, targets: np.ndarray) -> tinker.Datum:
    made = make_datum([], targets, weights=np.ones(len(targets)))
    return tinker.Datum(model_input=given, loss_fn_inputs=made.loss_fn_inputs)


def test_what_is_trained_and_scored_are_transformers_numbers(service, cache) -> None:
    text = np.random.default_rng(5).integers(0, 96, 90).tolist()
    tall, wide, small = chunk(0), chunk(1, "jpeg"), chunk(2)
    inputs = [both(tall, text[:5], small, small, text[5:], wide), both(text[:9], tall)]
    data = [datum(given, targets_of(given)) for given, _ in inputs]
    client = service.create_lora_training_client("m", rank=4, seed=1).result()
    found = logprobs(client.forward(data, "cross_entropy").result())
    sampler = client.save_weights_and_get_sampling_client().result()
    for one, (given, seen) in zip(found, inputs, strict=True):
        targets, wanted = targets_of(given), vision_reference.log_probabilities(folder(NAME), seen)
        wanted = wanted.detach().numpy()[np.arange(len(targets)), targets]
        assert np.abs(one - wanted).max() < 5e-5
        scored = sampler.compute_logprobs(given).result()
        is_image = [row for part in given.chunks for row in [part.type == "image"] * part.length]
        assert [row for row, value in enumerate(scored) if value is None] == [0]
        assert all(scored[row] == 0 for row in range(1, len(scored)) if is_image[row])
        kept = [row for row in range(1, len(scored)) if not is_image[row]]
        assert [scored[row] for row in kept] == [float(one[row - 1]) for row in kept]
    assert cache.decoded == 3


def test_an_epoch_decodes_nothing_and_the_tower_sees_each_image_once(
    service, cache, server
) -> None:
    given, _ = both([5, 6], chunk(3), [7, 8, 9])
    one = datum(given, targets_of(given))
    client = service.create_lora_training_client("m", rank=4, seed=1).result()
    model, losses = server._service.bases["m"], []

    def seen() -> int:
        """The images that the tower has seen."""
        use = partial(Bases.use, model=model, tower=True)
        return server.worker.call(lambda engine: use(engine.bases).core.tower_images).result()

    before = seen()
    for _ in range(3):
        losses.append(client.forward_backward([one, one], "cross_entropy").result().metrics)
        client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    assert (cache.decoded, cache.found) == (1, 5) and seen() == before + 1
    assert losses[0]["loss:sum"] > losses[1]["loss:sum"] > losses[2]["loss:sum"]


def test_a_sample_behind_an_image_is_the_trainers(service, cache) -> None:
    """Its log-probabilities are those of a datum, to the last bit; and its provenance counts."""
    given, _ = both([5, 6], chunk(3), [7])
    client = service.create_lora_training_client("m", rank=4, seed=1).result()
    sampler = client.save_weights_and_get_sampling_client(record_stability_info=True).result()
    params = tinker.SamplingParams(max_tokens=6, seed=3, stop=[])
    reply = sampler.sample(given, 2, params, include_prompt_logprobs=True).result()
    for sequence in reply.sequences:
        whole = tinker.ModelInput(
            chunks=[*given.chunks, tinker.types.EncodedTextChunk(tokens=sequence.tokens[:-1])]
        )
        targets = np.asarray([0] * (given.length - 1) + list(sequence.tokens), np.int64)
        advantages = np.asarray([0] * (given.length - 1) + [1] * 6, np.float32)
        made = make_datum([], targets, advantages=advantages)
        one = tinker.Datum(model_input=whole, loss_fn_inputs=made.loss_fn_inputs)
        name = sequence.sequence_id
        one = one.with_provenance(
            model_input=[
                tinker.PromptProvenanceSpan(sequence_id=name, length=given.length),
                tinker.SampledProvenanceSpan(sequence_id=name, length=5),
            ],
            loss_fn_inputs=[
                tinker.PromptProvenanceSpan(sequence_id=name, offset=1, length=given.length - 1),
                tinker.SampledProvenanceSpan(sequence_id=name, length=6),
            ],
        )
        result = client.forward([one], "stable_reinforce").result()
        assert logprobs(result)[0][-6:].tolist() == list(sequence.logprobs)
        assert result.metrics["sampler_ratio:max"] == 1.0
    assert cache.decoded == 1


def test_refusals_reach_the_client(service) -> None:
    client = service.create_lora_training_client("m", rank=4, seed=1).result()
    data, image = file_of(0, "png")
    wrong = tinker.types.ImageChunk(data=data, format="png", expected_tokens=7)
    given = tinker.ModelInput(chunks=[wrong])
    match = r"datum 0: model_input\[0\]: expected 7 tokens, got \d+ from image \(96 × 200 pixels\)"
    with pytest.raises(tinker.RequestFailedError, match=match):
        client.forward([datum(given, np.zeros(7, np.int64))], "cross_entropy").result()
    out = io.BytesIO()
    image.resize((400, 400)).save(out, "png")
    large = tinker.types.ImageChunk(data=out.getvalue(), format="png", expected_tokens=9)
    sampler = client.save_weights_and_get_sampling_client().result()
    with pytest.raises(tinker.RequestFailedError, match=r"takes 20 \(--image-tokens\)"):
        sampler.compute_logprobs(tinker.ModelInput(chunks=[large])).result()
