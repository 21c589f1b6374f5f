"""A server of models that see, when something is amiss: a tower's file that is damaged or gone,
little memory, ids that another client's images have. Who waits gets a sentence, and so do later
ones, until what was amiss is mended."""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import tinker
from conftest import make_datum
from support.images import png
from support.vision_models import folder
from tinsmith import _core
from tinsmith.engine import image_cache
from tinsmith.engine.image_cache import ImageCache
from tinsmith.engine.loading import TowerLoading
from tinsmith.models.registry import inspect_model
from tinsmith.server.backend import Backend
from tinsmith.server.service.config import ServerConfig

NAME = "qwen3_vl"
SIZE = (64, 96)
TOKENS = 6
PARAMS = tinker.SamplingParams(max_tokens=4, seed=3, stop=[])


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> ImageCache:
    """A process's new cache."""
    monkeypatch.setattr(image_cache, "_made", [])
    return image_cache.images()


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """Two models of one size, in folders that may be changed."""
    found = {name: tmp_path / name for name in ("m", "other")}
    for place in found.values():
        shutil.copytree(folder(NAME), place)
    return found


def start(models: dict[str, Path], **options: Any) -> Backend:
    checkpoints = next(iter(models.values())).parent / "checkpoints"
    return Backend(
        ServerConfig(models, checkpoints=checkpoints, device="cpu", threads=1, **options)
    )


def file_of(place: Path) -> Path:
    [found] = place.glob("*.safetensors")
    return found


def damage(place: Path) -> None:
    """Writes a number into the tower that is none."""
    tensors = safetensors.numpy.load_file(file_of(place))
    name = next(name for name in tensors if "visual.blocks.1.mlp.linear_fc1.weight" in name)
    tensors[name].reshape(-1)[5] = np.nan
    safetensors.numpy.save_file(tensors, file_of(place), {"format": "pt"})


def seen(*seeds: int) -> tinker.ModelInput:
    """A prompt with images."""
    chunks: list[Any] = [tinker.types.EncodedTextChunk(tokens=[5, 6])]
    for seed in seeds:
        data = png(seed, SIZE)
        chunks.append(tinker.types.ImageChunk(data=data, format="png", expected_tokens=TOKENS))
    return tinker.ModelInput(chunks=[*chunks, tinker.types.EncodedTextChunk(tokens=[7])])


def drawn(client: tinker.SamplingClient, prompt: tinker.ModelInput) -> list[int]:
    return list(client.sample(prompt, 1, PARAMS).result().sequences[0].tokens)


def sampler(service: tinker.ServiceClient, name: str = "m") -> tinker.SamplingClient:
    return service.create_sampling_client(base_model=name).result()


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a number": (damage, r"blocks\.1\.mlp\.linear_fc1\.weight has nan at \[0, 5\]"),
    "a file": (lambda place: file_of(place).unlink(), "has neither model.safetensors nor"),
    "a folder": (lambda place: shutil.rmtree(place), "has neither model.safetensors nor"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tower_that_can_not_be_read_is_a_sentence_for_all_who_wait(
    fault: str, places: dict[str, Path]
) -> None:
    """And for those that come later, while text is served; a mended file is read."""
    change, sentence = FAULTS[fault]
    with start(places) as backend, backend.service_client() as service:
        client, text = sampler(service), tinker.ModelInput.from_ints([1, 2, 3])
        train = service.create_lora_training_client("m", rank=2, seed=1).result()
        wanted = drawn(client, text)
        change(places["m"])
        prompt = seen(1)
        one = make_datum([], np.zeros(prompt.length), weights=np.ones(prompt.length))
        one = tinker.Datum(model_input=prompt, loss_fn_inputs=one.loss_fn_inputs)
        waiting: list[Future[Any]] = [client.sample(seen(seed), 1, PARAMS) for seed in (1, 2, 1)]
        waiting += [train.forward([one], "cross_entropy"), client.sample(seen(3), 1, PARAMS)]
        for asked in (*waiting, client.sample(seen(1), 1, PARAMS)):
            with pytest.raises(tinker.RequestFailedError, match=sentence):
                asked.result()
        assert drawn(client, text) == wanted
        shutil.rmtree(places["m"], ignore_errors=True)
        shutil.copytree(folder(NAME), places["m"])
        drawn(client, seen(1))


def test_an_evicted_model_gets_its_tower_again(places: dict[str, Path]) -> None:
    """The same images from two clients at once, on one and then the other of two models that have
    no room beside each other."""
    with start(places) as backend, backend.service_client() as service:
        wanted = drawn(sampler(service), seen(1, 2))
    cost = inspect_model(folder(NAME)).weight_bytes
    with (
        start(places, memory=3 * cost) as backend,
        backend.service_client() as service,
        backend.service_client(api_key="tml-second") as second,
    ):
        clients = {name: [sampler(own, name) for own in (service, second)] for name in places}
        for name in (*places, *places, *places):
            asked = [client.sample(seen(1, 2), 1, PARAMS) for client in clients[name]]
            for one in asked:
                assert list(one.result().sequences[0].tokens) == wanted
        assert backend.worker._engine.bases.evictions > 0


def test_a_model_whose_tower_is_read_stays(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = inspect_model(folder(NAME)).weight_bytes
    evicted = list[bool]()
    with start(places, memory=3 * cost) as backend, backend.service_client() as service:
        take = TowerLoading.take

        def evict_first(loading: TowerLoading) -> Any:
            evicted.append(backend.worker._engine.bases._evict(None))
            return take(loading)

        client = sampler(service)
        drawn(client, tinker.ModelInput.from_ints([1, 2]))
        monkeypatch.setattr(TowerLoading, "take", evict_first)
        drawn(client, seen(1))
        assert evicted and list(backend.worker._engine.bases._loaded) == [places["m"].resolve()]


def test_features_stay_within_the_servers_memory(places: dict[str, Path]) -> None:
    """A server may use less than its machine has."""
    cost = inspect_model(folder(NAME)).weight_bytes
    with start({"m": places["m"]}, memory=4 * cost) as backend:
        with backend.service_client() as service:
            client = sampler(service)
            for seed in range(0, 60, 4):
                drawn(client, seen(*range(seed, seed + 4)))
        [loaded] = backend.worker._engine.bases._loaded.values()
        assert loaded.core.tower_images == 60
        assert loaded.core.features_bytes <= max(4 * cost // 16, 4 * TOKENS * 64 * 4 * 3)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    options: dict[str, Any] = {"device": "cpu", "threads": 1}
    options["checkpoints"] = tmp_path_factory.mktemp("checkpoints")
    with Backend(ServerConfig({"m": folder(NAME)}, **options)) as backend:
        yield backend


def test_ids_below_0_are_no_clients_to_send(server: Backend) -> None:
    """They would be another client's image."""
    image = _core.Image(np.zeros(4 * 32 * 32 * 3, np.uint8), 2, 2)
    ids = [image.first - row for row in range(4)]
    match = f"id {image.first}"
    with server.service_client() as service:
        client = sampler(service)
        train = service.create_lora_training_client("m", rank=2, seed=1).result()
        given = tinker.ModelInput.from_ints([1, *ids])
        with pytest.raises(tinker.RequestFailedError, match=match):
            drawn(client, given)
        with pytest.raises(tinker.RequestFailedError, match=match):
            stops = tinker.SamplingParams(max_tokens=1, stop=ids)
            client.sample(tinker.ModelInput.from_ints([1]), 1, stops).result()
        for tokens, targets in (([1, *ids], [0] * 5), ([1] * 5, [1, *ids])):
            made = make_datum(tokens, targets, weights=np.ones(5))
            with pytest.raises(tinker.RequestFailedError, match=match):
                train.forward([made], "cross_entropy").result()


def test_a_cancelled_request_takes_no_others_image(server: Backend) -> None:
    """A request that is cancelled while others wait for the same image."""
    with server.service_client() as service, server.service_client(api_key="tml-b") as second:
        first, other = sampler(service), sampler(second)
        asked = [first.sample(seen(1), 1, PARAMS) for _ in range(8)]
        wanted = other.sample(seen(1), 1, PARAMS)
        for one in asked[::2]:
            one.future().cancel()
        found = list(wanted.result().sequences[0].tokens)
        for one in asked[1::2]:
            assert list(one.result().sequences[0].tokens) == found
