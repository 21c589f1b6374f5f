"""Several base models in one server: read on first use, dropped for others, back bit for bit."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
from support.small_run import PROMPT, make_client, make_data, sample, train
from support.waiting import until
from tinsmith.checkpoints.lora import LoraSpec
from tinsmith.checkpoints.optimizers import AdamParams
from tinsmith.engine import bases
from tinsmith.engine.bases import inspect_models, memory_of, parse_bytes
from tinsmith.engine.decoding import SampleRequest
from tinsmith.engine.errors import RequestError
from tinsmith.engine.jobs import SnapshotJob
from tinsmith.engine.ledger import Hold
from tinsmith.engine.loading import Loading
from tinsmith.engine.training import Batch, OptimJob, TrainJob
from tinsmith.engine.worker import Worker
from tinsmith.models.registry import load_model
from tinsmith.server.backend import Backend
from tinsmith.server.clients import serve
from tinsmith.server.service.config import ServerConfig
from tinsmith.system.format import readable

NAMES = ("tiny", "other", "third")
DRAW = {"max_tokens": 12, "seed": 5, "stop": []}


@pytest.fixture(scope="module")
def models(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three models; the third's head is the second's embedding, so that all draw differently."""
    import safetensors.numpy

    folder = tmp_path_factory.mktemp("three")
    found = {"tiny": tiny_model_dir}
    for number, name in enumerate(NAMES[1:], 1):
        shutil.copytree(tiny_model_dir, folder / name)
        file = folder / name / "model.safetensors"
        tensors = safetensors.numpy.load_file(file)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:: -1 if number == 1 else 1] * 1.5
        tensors = {key: value.copy() for key, value in tensors.items()}
        safetensors.numpy.save_file(tensors, file, {"format": "pt"})
        found[name] = folder / name
    return found


def start(models: dict[str, Path], folder: Path, **options) -> Backend:
    return Backend(ServerConfig(models, checkpoints=folder, device="cpu", threads=1, **options))


def loaded(backend: Backend) -> list[str]:
    """The models that are in memory, the least recently used first."""
    return [
        backend.worker._engine.bases._names[path] for path in backend.worker._engine.bases._loaded
    ]


@pytest.fixture(scope="module")
def expected(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """What each model draws where there is room for all."""
    with start(models, tmp_path_factory.mktemp("all")) as backend, backend.service_client() as own:
        clients = {name: own.create_sampling_client(base_model=name).result() for name in NAMES}
        return {name: sample(client, 2, **DRAW) for name, client in clients.items()}


@pytest.fixture(scope="module")
def run_bytes(models: dict[str, Path]) -> int:
    """What a run of rank 4 and its step take where there is little memory."""
    core = load_model(models["tiny"], threads=1).core
    plan = core.plan(4, core.plan(4)["step_tokens"], 1)
    return plan["adapter"] + plan["sums"] // 4 + plan["scratch"] + plan["step"] * 9 // 8


@pytest.fixture
def narrow(models: dict[str, Path], tmp_path: Path) -> Iterator[Backend]:
    """A server with room for one model and its cache, or for two without."""
    weights = inspect_models(models)["tiny"].weight_bytes
    with start(models, tmp_path, memory=int(2.3 * weights)) as backend:
        yield backend


def test_models_are_listed_at_once_and_read_on_first_use(models, tmp_path):
    with start(models, tmp_path) as backend, backend.service_client() as service:
        told = service.get_server_capabilities().supported_models
        assert [item.model_name for item in told] == list(NAMES) and loaded(backend) == []
        client = service.create_sampling_client(base_model="other").result()
        assert loaded(backend) == []
        sample(client, 1, **DRAW)
        assert loaded(backend) == ["other"]
        make_client(service)
        assert loaded(backend) == ["other", "tiny"]


def test_preload_reads_them_before_listening(models, tmp_path):
    with start({"tiny": models["tiny"]}, tmp_path) as backend:
        assert loaded(backend) == ["tiny"]
    with start({"tiny": models["tiny"]}, tmp_path, preload=False) as backend:
        assert loaded(backend) == []
    with start(models, tmp_path, preload=True) as backend:
        assert loaded(backend) == list(NAMES)


def test_a_broken_model_is_found_at_the_start(models, tmp_path):
    shutil.copytree(models["tiny"], tmp_path / "broken")
    file = tmp_path / "broken" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        start(models | {"broken": tmp_path / "broken"}, tmp_path / "saved")


def test_one_folder_under_two_names_is_read_once(models, tmp_path):
    twice = {"one": models["tiny"], "two": models["tiny"]}
    with start(twice, tmp_path) as backend, backend.service_client() as service:
        for name in twice:
            sample(service.create_sampling_client(base_model=name).result(), 1, **DRAW)
        assert len(backend.worker._engine.bases._loaded) == 1


def test_the_least_recently_used_makes_room_and_comes_back(narrow, expected):
    with narrow.service_client() as service:
        clients = {n: service.create_sampling_client(base_model=n).result() for n in NAMES}
        for name in ("tiny", "other", "third", "tiny", "third", "other", "tiny"):
            assert sample(clients[name], 2, **DRAW) == expected[name]
            assert loaded(narrow)[-1] == name and len(loaded(narrow)) < 3


def test_the_least_recently_used_of_two_makes_room(models, tmp_path):
    memory = int(2.5 * inspect_models(models)["tiny"].weight_bytes)
    with start(models, tmp_path, memory=memory, preload=False) as backend:
        for name in ("tiny", "other", "tiny", "third"):
            backend.worker.preload([name]).result(timeout=60)
        assert loaded(backend) == ["tiny", "third"]


def test_a_checkpoints_sampler_comes_back_to_the_same_bits(models, tmp_path, expected):
    with start(models, tmp_path) as backend, backend.service_client() as service:
        client = make_client(service)
        train(client, 2)
        path = client.save_weights_for_sampler("s").result().path
        tuned = service.create_sampling_client(model_path=path).result()
        drawn, logprobs = sample(tuned, 2, **DRAW), tuned.compute_logprobs(PROMPT).result()
    assert drawn != expected["tiny"]
    memory = int(2.3 * inspect_models(models)["tiny"].weight_bytes)
    with start(models, tmp_path, memory=memory) as backend, backend.service_client() as service:
        tuned = service.create_sampling_client(model_path=path).result()
        others = [service.create_sampling_client(base_model=n).result() for n in NAMES[1:]]
        for _ in range(2):
            assert sample(tuned, 2, **DRAW) == drawn
            assert tuned.compute_logprobs(PROMPT).result() == logprobs
            for name, other in zip(NAMES[1:], others, strict=True):
                assert sample(other, 2, **DRAW) == expected[name]
            assert "tiny" not in loaded(backend)


def test_a_run_keeps_its_model_and_the_refusal_says_what_holds_memory(
    models, tmp_path, run_bytes, expected
):
    """There is no room for the idle run on the disk."""
    weights = inspect_models(models)["tiny"].weight_bytes
    memory, full = run_bytes + int(1.1 * weights), {"checkpoints_max": 1}
    with (
        start(models, tmp_path, memory=memory, **full) as backend,
        backend.service_client() as service,
    ):
        with backend.service_client() as trainer:
            client = make_client(trainer)
            losses = train(client, 1)
            other = service.create_sampling_client(base_model="other").result()
            with pytest.raises(tinker.RequestFailedError) as caught:
                sample(other, 1, **DRAW)
            told = str(caught.value)
            assert f"the base model other needs {readable(weights)}" in told
            assert f"of the {readable(memory)} that the server may use" in told
            assert f"the base model tiny ({readable(weights)})" in told
            held = backend.worker.memory().result()
            assert f"a training step on tiny ({readable(held.arenas)})" in told
            assert f"the run {client.model_id} ({readable(held.adapters)})" in told
            assert "idle runs stay in memory: nothing was written, because the checkpoints" in told
            assert "end a client that is not needed" in told and "--memory" in told
            with pytest.raises(tinker.RequestFailedError, match="a run of rank 4 needs"):
                make_client(service)
            # The trainer did not notice.
            assert (
                client.forward_backward(make_data(), "cross_entropy").result().metrics["loss:sum"]
                < losses[0]
            )
        assert sample(other, 2, **DRAW) == expected["other"]  # the trainer's session has ended


def test_clients_runs_make_room_for_each_other_and_leave_nothing(models, tmp_path, run_bytes):
    memory = inspect_models(models)["tiny"].weight_bytes + run_bytes
    with start(models, tmp_path, memory=memory) as backend, backend.service_client() as service:
        clients = [make_client(service) for _ in range(5)]
        first = [train(client, 1) for client in clients]
        assert len(list(tmp_path.glob("+idle-runs-*/*.safetensors"))) >= 3
        second = [train(client, 1) for client in clients]
        assert all(losses == first[0] for losses in first) and second[0][0] < first[0][0]
        assert all(losses == second[0] for losses in second)
        path = clients[0].save_state("a").result().path
        assert service.create_training_client_from_state_with_optimizer(path).get_info()
    assert not list(tmp_path.glob("+*"))


@pytest.mark.parametrize(
    ("rank", "sentence"),
    [(4096, "a run of rank 4096 needs"), (2**30, "rank 1073741824 is more than 4096"),
     (2**40, "rank .* is more than 4096"), (0, "rank must be at least 1, not 0")],
)  # fmt: skip
def test_a_refused_run_evicts_nothing(narrow, expected, rank, sentence):
    with narrow.service_client() as service:
        client = service.create_sampling_client(base_model="other").result()
        assert sample(client, 2, **DRAW) == expected["other"]
        sample(service.create_sampling_client(base_model="tiny").result(), 1, **DRAW)
        before, caches = loaded(narrow), narrow.worker._engine.decoder.caches()
        with pytest.raises(RequestError, match=sentence):
            narrow.worker.create(f"rank {rank}", "tiny", LoraSpec(rank, 1)).result()
        assert (loaded(narrow), narrow.worker._engine.decoder.caches()) == (before, caches)


IDS = np.arange(3, 43, dtype=np.int32)
ONE = np.ones(1, np.int32)
WEIGHTS = {"weights": np.ones(len(IDS), np.float32)}
BATCH = Batch(IDS, ONE * len(IDS), IDS, ONE, "cross_entropy", WEIGHTS, {}, (IDS.shape,))


def a_run(worker: Worker, *, idle: bool) -> list:
    """What two steps give, the second from a forward and its backward; between its requests the
    run is trimmed, or is not."""
    worker.create("run", "tiny", LoraSpec(4, 1)).result()
    lane, found = worker._engine.runs["run"], []
    for seq, backward in enumerate((True, None, False, True, None), 1):
        if backward is None:
            found.append(worker.submit("run", seq, OptimJob(AdamParams())).result())
            continue
        result = worker.submit("run", seq, TrainJob(BATCH, backward=backward)).result()
        found.append((result.loss, result.logprobs[0].tolist()))
        if idle:
            until(lambda: not lane.adapter.model.training_bytes)
        else:
            assert lane.adapter.model.training_bytes
    return found


def test_an_idle_run_gives_its_steps_memory_back_and_goes_on(models):
    bases = inspect_models({"tiny": models["tiny"]})
    results = []
    for seconds in (0.0, 1e6):
        worker = Worker(bases, threads=1, idle_seconds=seconds)
        try:
            results.append(a_run(worker, idle=not seconds))
        finally:
            worker.close()
    assert results[0] == results[1]


def test_a_failed_allocation_takes_the_memory_of_an_idle_step(models):
    """It is reserved for the step, but free until the next one."""
    worker = Worker(inspect_models({"tiny": models["tiny"]}), threads=1)
    try:
        a_run(worker, idle=False)
        lane, bases = worker._engine.runs["run"], worker._engine.bases
        until(lambda: not lane.ready)
        core = lane.adapter.model
        assert not worker._engine.release(lane.base.path) and core.training_bytes

        def allocate() -> str:
            if core.training_bytes:
                raise MemoryError("the GPU has no 1.0 MiB of memory to give")
            return "it has"

        assert bases.make(1, "a cache", allocate) == "it has"
        assert [path.name for path in bases._loaded] == [models["tiny"].name]
    finally:
        worker.close()


def a_loop(worker: Worker, steps: int) -> list[list[int]]:
    """A snapshot in each step, and what is drawn from it and from an older one that is used."""
    worker.create("run", "tiny", LoraSpec(4, 1)).result(timeout=60)
    request, drawn = SampleRequest(np.asarray([5, 6], np.int32), max_tokens=3, seed=1), []
    for step in range(steps):
        worker.submit("run", 3 * step + 1, TrainJob(BATCH)).result(timeout=60)
        worker.submit("run", 3 * step + 2, OptimJob(AdamParams(learning_rate=0.1))).result(
            timeout=60
        )
        worker.submit("run", 3 * step + 3, SnapshotJob(f"step {step}")).result(timeout=60)
        for name in (f"step {step}", "step 0"):
            result = worker.sample(name, request).result(timeout=60)
            drawn.append(result.samples[0].tokens.tolist())
    return drawn


def test_a_loop_with_a_snapshot_in_each_step_stays_within_little_memory(models, run_bytes):
    """Old snapshots make room, those that nobody has used for longest first. One that is used
    again and again is not old."""
    known = inspect_models({"tiny": models["tiny"]})
    core = load_model(models["tiny"], threads=1).core
    weights, size = core.weight_bytes, core.plan(4, 1)["adapter"]
    cache = core.cache_bytes(core.cache_tokens(weights + run_bytes, 0))
    found = []
    for limit in (None, weights + run_bytes + cache + 2 * size):
        worker = Worker(known, threads=1, memory=limit)
        try:
            found.append(a_loop(worker, 24))
            kept = {name for name, item in worker._engine.snapshots._items.items() if item.adapter}
            if limit is None:
                assert len(kept) == 24
                continue
            assert {"step 0", "step 23"} <= kept and len(kept) < 12
            assert worker._engine.bases._used() <= limit
            request = SampleRequest(np.asarray([5, 6], np.int32), max_tokens=3)
            lost = worker.sample("step 1", request).exception(timeout=60)
            assert "step 1 were dropped to make room; save_weights_for_sampler" in str(lost)
            path, bases = known["tiny"].path, worker._engine.bases
            stays = weights + bases.step_bytes + bases._ledger.staying
            assert bases.make(limit - stays, "all", lambda: True, keep=path)
            kept = {name for name, item in worker._engine.snapshots._items.items() if item.adapter}
            assert kept == {"step 0", "step 22", "step 23"}
        finally:
            worker.close()
    assert found[0] == found[1]


def test_a_failed_allocation_makes_room_too(models, tmp_path, expected, monkeypatch):
    """What a card with less free memory than it has in all does. There is no room for idle runs on
    the disk."""
    take, failures = Loading.take, []

    def fails_twice(loading):
        if loading.model.path == models["other"] and len(failures) < 2:
            failures.append(len(failures))
            raise MemoryError("the GPU has no 1.0 MiB of memory to give")
        return take(loading)

    monkeypatch.setattr(Loading, "take", fails_twice)
    with start(models, tmp_path, checkpoints_max=1) as backend, backend.service_client() as service:
        clients = {n: service.create_sampling_client(base_model=n).result() for n in NAMES}
        for name in ("tiny", "third", "other"):
            assert sample(clients[name], 2, **DRAW) == expected[name]
        assert failures == [0, 1] and loaded(backend) == ["other"]
        failures.clear()
        make_client(service)
        backend.worker._engine.bases._loaded.pop(models["other"].resolve())
        with pytest.raises(tinker.RequestFailedError, match=r"other: the GPU has no .* held by"):
            sample(clients["other"], 1, **DRAW)


def test_a_cache_takes_a_share_of_the_limit_but_holds_a_context(models, tmp_path):
    memory = int(2.3 * inspect_models(models)["tiny"].weight_bytes)
    with start({"tiny": models["tiny"]}, tmp_path, memory=memory) as backend:
        held = backend.worker._engine.bases
        [model] = held._loaded.values()
        core, room = model.core, held.cache_tokens(model)
        token, rest = core.plan(1, 1)["kv_token"], memory - core.weight_bytes
        run = Hold(model.path, rest - rest // 3, "a run", True)
        held._ledger.set("run", run)
        beside_a_run = held.cache_tokens(model)
    page = 64

    def pages(size: int) -> int:
        return size // token // page * page

    assert pages(rest // 4) > (context := int(core.config["context"]))
    assert room == pages(rest // 4) and beside_a_run == pages(rest // 6)
    assert core.cache_tokens(memory, 0) == context // page * page
    assert core.cache_tokens(memory, rest // 3) == pages(rest // 6)
    assert core.cache_tokens(core.weight_bytes + 4 * 100 * token, rest) == page
    assert core.cache_tokens(1, 1) == page and core.cache_tokens(1 << 50, 1 << 50) == 1 << 20
    assert core.cache_tokens() * token == core.plan(4)["cache"]


def test_a_limit_that_no_model_fits_in_is_a_sentence(models, tmp_path):
    with pytest.raises(Exception, match=r"the base model tiny needs .* 100.00 KiB are free"):
        start({"tiny": models["tiny"]}, tmp_path, memory=100 << 10)


@pytest.mark.parametrize(
    ("given", "bytes_", "sentence"),
    [("3G", 3 << 30, None), (1 << 30, 1 << 30, None), ("4 apples", 0, "not an amount of memory"),
     (0, 0, "memory must be at least 1 byte, 0 came"), (1.5, 0, "memory must be an integer")],
)  # fmt: skip
def test_serve_takes_memory_as_a_number_or_as_text(given, bytes_, sentence, models, tmp_path):
    options = {"checkpoints": tmp_path, "device": "cpu", "threads": 1, "preload": False}
    if sentence is None:
        with serve({"tiny": models["tiny"]}, memory=given, **options) as backend:
            assert backend.worker._engine.bases.memory == bytes_
        return
    with pytest.raises((ValueError, TypeError), match=sentence):
        serve({"tiny": models["tiny"]}, memory=given, **options)


def test_the_log_says_what_a_cache_takes(models, tmp_path, caplog):
    with start(models, tmp_path) as backend, backend.service_client() as service:
        with caplog.at_level("INFO", logger="tinsmith"):
            sample(service.create_sampling_client(base_model="other").result(), 1, **DRAW)
        [(path, size, _)] = backend.worker._engine.decoder.caches()
        assert f"{path}: sampling fills a cache of keys and values of up to" in caplog.text
        assert f"of up to {readable(size)}" in caplog.text


def test_amounts_of_memory():
    assert [parse_bytes(text) for text in ("2000", "1.5G", "12GiB", "800mb", "3 k")] == [
        2000, 3 << 29, 12 << 30, 800 << 20, 3 << 10,
    ]  # fmt: skip
    for text in ("", "G", "-1", "0", "nan", "inf", "12Q"):
        with pytest.raises(ValueError, match="is not an amount of memory"):
            parse_bytes(text)
    total = memory_of("cpu")
    assert total is not None and 1 << 28 < total < 1 << 50


def test_a_cards_memory_comes_from_its_driver(monkeypatch):
    cards = [("cuda", "a card", 80 << 30, (9, 0)), ("cuda:1", "another", 24 << 30, (8, 9))]
    monkeypatch.setattr("tinsmith._core.cards", lambda kind: cards)
    assert memory_of("cuda") == int((80 << 30) * bases.SHARE)
    assert memory_of("cuda:1") == int((24 << 30) * bases.SHARE)

    def absent(kind):
        raise RuntimeError(f"{kind}: this machine has no NVIDIA GPU that it may use")

    monkeypatch.setattr("tinsmith._core.cards", absent)
    assert memory_of("cuda") is None
