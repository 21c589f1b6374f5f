"""The CUDA device's memory, stream and failures, on an emulated card that can be small, old or
lost: what can't fit is refused in a sentence, nothing is allocated inside a step, and whatever
happens to the card reaches the caller."""

import ctypes
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import logprobs, make_datum
from support import beside
from support.distill_cases import distill, pair
from support.emulated_card import MIB, CardMaker, emulated_card
from support.op_devices import Device, Memory, emulated_library
from support.tiny_models import Datum, call, datum, folder, randomize, tokens_of
from tinsmith import _core
from tinsmith.engine.worker import plan
from tinsmith.models.registry import LoadedModel, load_model, read_config

ADAM = {
    "learning_rate": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(emulated_library()))
    library.cuda_emulated_lose.argtypes = [ctypes.c_int64]
    library.cuda_emulated_waits.restype = ctypes.c_int64
    library.cuda_emulated_used.restype = ctypes.c_size_t
    library.cuda_emulated_scratch.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    return library


@pytest.fixture
def card(library: ctypes.CDLL) -> Iterator[CardMaker]:
    """Sets what the card is; it is itself again afterwards, and not lost."""
    with emulated_card() as make:
        yield make
    library.cuda_emulated_lose(-1)


def load(name: str = "qwen3") -> LoadedModel:
    return load_model(folder(name), device="cuda-emulated")


def wide_config(**sizes: Any) -> tuple[dict[str, float], np.ndarray]:
    """A model's config that is large enough for numbers to matter."""
    config, freq = read_config(folder("qwen3"))
    return config | sizes, freq


# ---- memory ----


def test_an_op_that_was_not_rehearsed_fails_and_says_so(library: ctypes.CDLL) -> None:
    dev, T, V, K = Device("cuda-emulated"), 1100, 9000, 64
    held = [dev.put(np.zeros(n), "float") for n in (T * K, T * K, T * V, T)]
    arguments = [dev.pointer, *(memory.pointer for memory in held), T, V, K]
    dev.c.topk_logprob(*arguments)
    with pytest.raises(RuntimeError, match=r"needs \d+ bytes for itself, \d+ were reserved"):
        dev.check(dev.c.sync(dev.pointer))
    dev.check(dev.c.sync(dev.pointer))  # it is told once
    dev.c.rehearse(dev.pointer)
    dev.c.topk_logprob(*arguments)
    assert dev.c.rehearsed(dev.pointer) == T * 2 * K * 8  # of each of two parts of a row, K ranks
    assert (held[0].read(64) == 0).all()


def flat(data: list[Datum]) -> tuple[np.ndarray, ...]:
    lengths = np.array([len(one.tokens) for one in data], np.int32)
    ids = [np.concatenate([getattr(one, name) for one in data]) for name in ("tokens", "targets")]
    return ids[0], lengths, ids[1], np.ones_like(lengths)


def both_halves(adapter: _core.Adapter, data: list[Datum]) -> None:
    adapter.forward(*flat(data), keep=True)
    adapter.backward(np.ones(sum(len(one.tokens) for one in data), np.float32))


def train_with(loss: str) -> Callable[[_core.Adapter, list[Datum]], object]:
    return lambda adapter, data: call(adapter, data, loss)


def taught_by(teacher: str | None) -> Callable[[_core.Adapter, list[Datum]], object]:
    pairs = [pair("qwen3", 5, 31, 60), pair("qwen3", 40, 9, 0, seed=1)]
    found = {
        "an adapter": lambda core: randomize(_core.Adapter(core, rank=7)),
        "another model": lambda core: load().core,
    }.get(teacher, lambda core: None)
    return lambda adapter, data: distill(adapter, pairs, {"top_k": 9}, found(adapter.model))


CALLS = {
    "linear": train_with("cross_entropy"),
    "chunk by chunk": train_with("importance_sampling"),
    "whole datums": train_with("gspo"),
    "halves": both_halves,
    "its own teacher": taught_by(None),
    "a teacher": taught_by("an adapter"),
    "a teacher elsewhere": taught_by("another model"),
}


@pytest.mark.parametrize("room", [0, 250_000], ids=["all is kept", "little is kept"])
@pytest.mark.parametrize("name", CALLS)
def test_ops_ask_for_the_scratch_that_was_rehearsed(
    library: ctypes.CDLL, name: str, room: int
) -> None:
    """Whatever is called, and whatever its layers keep: no op runs that no rehearsal has seen."""

    def asked(rehearsed: bool) -> set[int]:
        sizes = (ctypes.c_size_t * 100)()
        return set(sizes[: library.cuda_emulated_scratch(rehearsed, sizes, 100)])

    limit = room and room + (2 * MIB if name == "a teacher elsewhere" else MIB)
    adapter = randomize(_core.Adapter(load().core, rank=4, step_tokens=60, step_bytes=limit))
    data = [
        datum(tokens_of("qwen3", length), logprobs=np.zeros(length), advantages=np.ones(length))
        for length in (30, 11, 50)
    ]
    if name in ("linear", "halves"):
        data = [datum(one.tokens) for one in data]
    asked(True), asked(False)
    adapter.write("gradients", np.ones(adapter.size, np.float32))
    adapter.optim_step(**ADAM)
    norm = asked(False)  # of all calls: what they add is looked at when it is there
    CALLS[name](adapter, data)
    ran = asked(False) - norm
    assert len(ran) > 3 and ran <= asked(True)


def test_a_teacher_in_parts_is_rehearsed_in_those_parts(library: ctypes.CDLL) -> None:
    """Attention over sequences of one row each takes scratch that it does not take beside a longer
    one: the second part here is 60 of them, the first a long one that fills a step."""
    core = load().core
    pairs = [pair("qwen3", 1, 2, 98), *(pair("qwen3", 1, 1, 0, seed) for seed in range(60))]
    found = []
    for rows in (100, 1000):
        adapter = randomize(_core.Adapter(core, rank=4, step_tokens=rows))
        *results, loss = distill(adapter, pairs)
        found.append([*(one.tobytes() for one in results), loss, adapter.read("gradients")])
    np.testing.assert_array_equal(found[0].pop(), found[1].pop())
    assert found[0] == found[1]


def test_a_plan_is_made_before_anything_is_allocated(card: CardMaker) -> None:
    config, freq = wide_config(vocab=50_000, width=512, heads=64)
    card(50 * MIB)
    small = plan(config, freq, "bf16", rank=4, device="cuda-emulated")
    card(4096 * MIB)
    large = plan(config, freq, "bf16", rank=4, device="cuda-emulated")
    assert small["weights"] == large["weights"] > 50 * MIB
    own = MIB + 1024  # scratch, and counters
    assert small["free"] == 50 * MIB - own and large["free"] == 4096 * MIB - own
    assert large["own"] >= 2 * MIB  # attention_backward's 4 bytes a row and head
    small = plan(config, freq, "bf16", rank=4, tokens=8, device="cuda-emulated")
    assert MIB <= small["own"] < large["own"]


def test_a_step_takes_what_the_plan_says_and_no_more(card: CardMaker) -> None:
    model = load()
    adapter = randomize(_core.Adapter(model.core, rank=4))
    sizes = model.core.plan(4, 70)
    call(adapter, [datum(tokens_of("qwen3", 70))])
    taken = sizes["free"] - model.core.plan(4, 70)["free"]
    assert sizes["step"] <= taken <= sizes["step"] + sizes["own"]
    call(adapter, [datum(tokens_of("qwen3", 70))])  # with a vector beside the gradients
    left = model.core.plan(4, 70)["free"]
    assert 0 < sizes["free"] - taken - left <= 4 * adapter.size + 256
    for _ in range(2):  # a step like it allocates nothing
        call(adapter, [datum(tokens_of("qwen3", 70, seed=1))])
    assert left == model.core.plan(4, 70)["free"]


def test_what_the_card_cant_hold_is_told_with_bytes_needed_and_free(card: CardMaker) -> None:
    config, freq = wide_config(vocab=50_000)
    model, core = _core.Model(config, freq, device="cuda-emulated"), load().core
    adapter, large = randomize(_core.Adapter(core, rank=4)), _core.Adapter(core, rank=1024)
    card(2 * MIB)
    wanted = rf"base model needs {model.plan(1)['weights'] / MIB:.1f} MiB on device cuda-emulated"
    with pytest.raises(MemoryError, match=wanted + r", which can give 2\.0 of its \d+\.\d MiB"):
        model.load("final_norm", -1, np.ones(int(config["width"]), np.float32))
    with pytest.raises(MemoryError, match=r"a cache of keys and values of 65536 tokens needs"):
        _core.Sampler(core, tokens=65536)
    with pytest.raises(MemoryError, match=r"a snapshot of rank 1024 needs \d\.\d MiB"):
        large.snapshot()
    before = adapter.read("weights")
    with pytest.raises(MemoryError, match=r"a training step of 2000 tokens needs \d+\.\d MiB"):
        call(adapter, [datum(tokens_of("qwen3", 100, seed=i)) for i in range(20)])
    np.testing.assert_array_equal(adapter.read("weights"), before)
    assert not adapter.read("gradients").any()
    call(adapter, [datum(tokens_of("qwen3", 3))])  # what fits goes on


GIBS = (1, 2, 4, 64)


def default_sizes() -> list[dict[str, int]]:
    """The plan of a model on a card with so many GiB."""
    kinds = {"layers": 12, "mixers": ("full_attention",) * 12, "feeds": ("mlp",) * 12}
    config, freq = wide_config(width=512, ffn=2048, **kinds)
    found = []
    with emulated_card() as card:
        for gib in GIBS:
            card(gib * 1024 * MIB)
            found.append(plan(config, freq, "bf16", rank=8, device="cuda-emulated"))
    return found


def test_defaults_are_made_of_the_cards_memory() -> None:
    """In a process of its own: other tests' models are on this one's card, and count."""
    emulated_library()
    code = "import json, test_cuda_device as own; print(json.dumps(own.default_sizes()))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, check=True, **beside(__file__))
    sizes = json.loads(done.stdout)
    for one in sizes:
        room = one["all"] - one["weights"]
        assert one["step"] < room / 2 and one["cache"] <= room / 4
    steps = [one["step_tokens"] for one in sizes]
    caches = [one["cache"] for one in sizes]
    assert steps == sorted(steps) and steps[0] < steps[-1] == 8192
    assert caches == sorted(caches) and caches[0] < caches[-1]


def test_info_prints_the_plan(library: ctypes.CDLL, capsys: pytest.CaptureFixture[str]) -> None:
    from tinsmith.cli.commands import main

    assert main(["info", str(folder("qwen3")), "--rank", "4", "--tokens", "64"]) == 0
    printed = capsys.readouterr().out
    for words in ("base weights", "a training step of 64 tokens", "a KV cache of", "are free now"):
        assert words in printed


# ---- the stream ----


def test_a_step_waits_once_and_the_pipelined_gradient_is_the_same(library: ctypes.CDLL) -> None:
    """Two chunks of logits. With q = logp a ratio is 1, and importance_sampling's gradient that of
    cross_entropy with the advantages as weights, to the bit."""
    core, ids = load().core, [tokens_of("qwen3", 103, seed=i) for i in range(6)]
    advantages = np.linspace(-1, 2, 103, dtype=np.float32)
    advantages[:20] = 0
    logp, gradients, waits = [], [], []
    for loss in ("cross_entropy", "importance_sampling"):
        adapter = randomize(_core.Adapter(core, rank=4))
        if loss == "cross_entropy":
            data = [datum(one, weights=advantages) for one in ids]
        else:
            data = [
                datum(one, logprobs=q, advantages=advantages)
                for one, q in zip(ids, logp, strict=True)
            ]
        before = library.cuda_emulated_waits()
        logp, _ = call(adapter, data, loss)
        waits.append(library.cuda_emulated_waits() - before)
        gradients.append(adapter.read("gradients"))
    # An array to reserve, the log-probabilities, the step's end, the gradient's norm.
    assert waits[0] <= 6 and waits[1] <= waits[0] + 2, waits
    np.testing.assert_array_equal(*gradients)


# ---- decoding steps, recorded ----


def decode(
    core: _core.Model, requests: list[dict[str, Any]], joins: dict[int, int], **options: Any
) -> tuple[list[dict[str, Any]], tuple[int, int]]:
    """Results of requests decoded together, and the sampler's (steps, replays); `joins` says before
    which step a request comes."""
    sampler, results = _core.Sampler(core, **options), {}
    for step in range(400):
        for number, asked in enumerate(requests):
            if joins.get(number, 0) == step:
                sampler.add(number, **asked)
        _, done = sampler.step()
        results |= {number: sampler.take(number) for number in done}
        if len(results) == len(requests):
            return [results[number] for number in range(len(requests))], sampler.replays
    raise AssertionError("the sampler does not get on")


def assert_same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    for one, other in zip(found, wanted, strict=True):
        for sample, as_sample in zip(one["samples"], other["samples"], strict=True):
            np.testing.assert_array_equal(sample["tokens"], as_sample["tokens"])
            np.testing.assert_array_equal(sample["logprobs"], as_sample["logprobs"])
            assert sample["stop_reason"] == as_sample["stop_reason"]


@pytest.mark.parametrize("spec", ("qwen3", "llama-tied", "qwen3_moe"))
def test_replayed_steps_give_the_same_bits(library: ctypes.CDLL, spec: str) -> None:
    """One, three and six sequences, so that rows are nobody's; one joins late with a prompt that
    makes the arena grow, and one crosses a page."""
    core = load(spec).core
    adapter = randomize(_core.Adapter(core, rank=4))
    options = ({"temperature": 0.0}, {"top_k": 7, "num_samples": 3}, {"top_p": 0.8}, {})
    requests = [
        {"prompt": tokens_of(spec, length), "adapter": adapter, "seed": length, **more}
        | {"max_tokens": 6 + 4 * (length == 61)}
        for length, more in zip((5, 3, 61, 90), options, strict=True)
    ]
    joins = {1: 3, 3: 7}
    found, (steps, replays) = decode(core, requests, joins, tokens=1024)
    wanted, none = decode(core, requests, joins, tokens=1024, graphs=False)
    assert steps > replays >= 4 and none == (0, 0)
    assert_same(found, wanted)


def test_decoding_is_replayed_while_prompts_gather(library: ctypes.CDLL) -> None:
    """A prompt waits three steps beside a sequence whose steps are replayed, and the next goes with
    it. Prompts of many rows do not wait, nor one that has begun, nor one beside sequences of
    several adapters, nor one that nobody decodes beside, nor any where no step is recorded. All get
    the tokens that they get alone."""
    core = load().core
    adapter = randomize(_core.Adapter(core, rank=4))
    lengths = (9, 5, 130, 131, 6, 7, 8, 4, *range(130, 135))
    joins = (0, 6, 12, 12, 18, 19, 22, 28, *[35] * 5)
    requests = [
        {"prompt": tokens_of("qwen3", length, number), "max_tokens": 4 if number else 40}
        | {"adapter": adapter if number in (4, 5) else None}
        for number, length in enumerate(lengths)
    ]
    for graphs in (True, False):
        sampler = _core.Sampler(core, tokens=2048, graphs=graphs)
        first, results, replays = {}, {}, []
        for step in range(45):
            for number in (number for number, at in enumerate(joins) if at == step):
                sampler.add(number, **requests[number])
            drawn, done = sampler.step()
            for number, _, _ in drawn:
                first.setdefault(number, step - joins[number])
            results |= {number: sampler.take(number) for number in done}
            replays.append(sampler.replays[1])
        waited = [0, 3, 0, 0, 3, 2, 0, 3] if graphs else [0] * 8
        assert [first[number] for number in range(13)] == [*waited, 0, 0, 0, 1, 1]
        assert replays[8] - replays[5] == 3 * graphs and replays[9] == replays[8]
        for number, asked in enumerate(requests):
            wanted, _ = decode(core, [asked], {}, tokens=512, graphs=False)
            assert_same([results[number]], wanted)


def test_an_adapter_that_learns_is_seen_and_another_is_not_taken_for_it(
    library: ctypes.CDLL,
) -> None:
    """In place, weights change under the recording; a new adapter, at the old one's address even,
    has recordings of its own."""
    core, prompt = load().core, tokens_of("qwen3", 9)
    asked = {"prompt": prompt, "max_tokens": 6, "temperature": 0.0, "num_samples": 2}
    sampler, seen = _core.Sampler(core, tokens=512), []
    for seed in range(4):
        if seed % 2 == 0:
            adapter = None  # frees the old one's memory
            adapter = _core.Adapter(core, rank=2 + seed)
        randomize(adapter, seed)
        sampler.add(seed, adapter=adapter, **asked)
        while sampler.active:
            for done in sampler.step()[1]:
                seen.append(sampler.take(done))
        wanted, _ = decode(core, [asked | {"adapter": adapter}], {}, tokens=512, graphs=False)
        assert_same(seen[-1:], wanted)
    assert sampler.replays[1] >= 8


def test_a_replay_after_scratch_has_moved_is_recorded_anew(library: ctypes.CDLL) -> None:
    """Attention of 64 rows cuts its keys into chunks, which take more scratch than there was. Long
    prompts come first, so that the arena has its size already."""
    core = load().core
    asked = {"prompt": tokens_of("qwen3", 9), "max_tokens": 24, "seed": 5}
    crowd = {"prompt": tokens_of("qwen3", 2), "max_tokens": 3, "num_samples": 63}
    found = []
    for graphs in (True, False):
        sampler, results = _core.Sampler(core, tokens=8192, graphs=graphs), {}
        for number in range(4):
            sampler.add(number, tokens_of("qwen3", 150, seed=number), max_tokens=1)
        for step in range(60):
            if step == 4:
                sampler.add(8, **asked)
            if step == 12:
                sampler.add(9, **crowd)
                free = core.plan(4, 8)["free"]
            results |= {done: sampler.take(done) for done in sampler.step()[1]}
            if len(results) == 6:
                break
        found.append([results[8], results[9]])
        assert sampler.replays[1] >= 15 or not graphs
        grown = free - core.plan(4, 8)["free"]
        assert grown == (
            64 * 6 * 64 * 12 * 4 - MIB if graphs else 0
        )  # of scratch, and nothing else
    assert_same(*found)


def test_a_recording_is_not_replayed_when_scratch_has_moved(library: ctypes.CDLL) -> None:
    dev, graph = Device("cuda-emulated"), ctypes.c_void_p()
    memory = Memory(dev, 64)
    dev.check(dev.c.record(dev.pointer))
    dev.c.zero(dev.pointer, memory.pointer, 64)
    dev.check(dev.c.recorded(dev.pointer, ctypes.byref(graph)))
    assert dev.c.replay(dev.pointer, graph) == 1
    assert not memory.read(64).any()
    dev.check(dev.c.reserve(dev.pointer, 1 << 24))
    assert dev.c.replay(dev.pointer, graph) == 0
    dev.c.graph_close(dev.pointer, graph)


# ---- what is given back in another thread ----


@pytest.mark.parametrize("what", ("memory", "a recording"))
def test_what_is_given_back_while_work_is_recorded_waits_for_nothing_and_spoils_nothing(
    library: ctypes.CDLL, what: str
) -> None:
    """The thread that gives it back goes on at once; it is freed when the device's own waits."""
    dev = Device("cuda-emulated")
    memory, graph, again = dev.put(np.zeros(64), "float"), ctypes.c_void_p(), ctypes.c_void_p()
    dev.check(dev.c.record(dev.pointer))
    dev.c.zero(dev.pointer, memory.pointer, 256)
    dev.check(dev.c.recorded(dev.pointer, ctypes.byref(graph)))

    def give_back() -> None:
        if what == "memory":
            del dev.held
        else:
            dev.c.graph_close(dev.pointer, graph)

    dev.held = Memory(dev, MIB)
    thread = threading.Thread(target=give_back)
    before = library.cuda_emulated_used(0)
    dev.check(dev.c.record(dev.pointer))
    dev.c.zero(dev.pointer, memory.pointer, 128)
    thread.start()
    thread.join()
    assert library.cuda_emulated_used(0) == before
    dev.c.zero(dev.pointer, memory.pointer.value + 128, 128)
    dev.check(dev.c.recorded(dev.pointer, ctypes.byref(again)))
    assert library.cuda_emulated_used(0) == before
    memory.write(np.ones(64, np.float32))  # waits
    assert library.cuda_emulated_used(0) <= before - MIB * (what == "memory")
    assert dev.c.replay(dev.pointer, again) == 1
    assert not memory.read(256).any()
    dev.c.graph_close(dev.pointer, again)


def test_adapters_that_are_dropped_in_another_thread_leave_decoding_alone(
    library: ctypes.CDLL,
) -> None:
    """Each request is of another adapter, so that steps are recorded again and again."""
    core, ended = load().core, threading.Event()
    used = [randomize(_core.Adapter(core, rank=4), seed) for seed in range(20)]
    asked = {"prompt": tokens_of("qwen3", 9), "max_tokens": 4}
    wanted = [decode(core, [asked | {"adapter": one}], {}, tokens=64)[0] for one in used]
    dropped = [_core.Adapter(core, rank=1) for _ in range(2000)]

    def drop() -> None:
        while dropped and not ended.wait(2e-4):
            dropped.pop()

    thread = threading.Thread(target=drop)
    thread.start()
    try:
        for one, result in zip(used, wanted, strict=True):
            found, (steps, replays) = decode(core, [asked | {"adapter": one}], {}, tokens=64)
            assert_same(found, result)
            assert steps == 3 and replays == 2
    finally:
        ended.set()
        thread.join()
    assert len(dropped) < 1900


# ---- a card that can't be used ----


def test_an_old_driver_and_an_old_card_are_told(card: CardMaker) -> None:
    for options, sentence in (
        ({"driver": 12040}, "the NVIDIA driver is for CUDA 12.4, and tinsmith was built with 13.0"),
        ({"driver": 12040}, "it needs driver 580 or newer"),
        ({"driver": 0}, "no NVIDIA driver"),
        ({"major": 7, "minor": 5}, "has compute capability 7.5, and tinsmith needs 8.0 or more"),
        ({"size": MIB // 2}, "the largest op of a step needs 1.0 MiB, and the card can give 0.5"),
    ):
        card(**options)
        assert sentence in _core.devices()["cuda-emulated"]
        with pytest.raises((RuntimeError, MemoryError), match="cuda-emulated: "):
            load()
    card()
    assert _core.devices()["cuda-emulated"] == ""


LOST = "The GPU is lost to this process: start the server again"


@pytest.mark.parametrize("after", (0, 3, 40, 200))
def test_a_card_lost_in_a_step_is_told_there_and_ever_after(
    library: ctypes.CDLL, card: CardMaker, after: int
) -> None:
    core, data = load().core, [datum(tokens_of("qwen3", 12))]
    adapter = randomize(_core.Adapter(core, rank=4))
    sampler = _core.Sampler(core, tokens=512)
    call(adapter, data)
    library.cuda_emulated_lose(after)
    with pytest.raises(RuntimeError, match=f"unspecified launch failure. {LOST}"):
        for _ in range(20):
            call(adapter, data)
    sampler.add(1, tokens_of("qwen3", 5), max_tokens=3)
    for later in (
        lambda: call(adapter, data, backward=False),
        lambda: adapter.optim_step(**ADAM),
        lambda: adapter.read("weights"),  # what a checkpoint would be made of
        lambda: adapter.write("weights", np.zeros(adapter.size, np.float32)),
        lambda: adapter.snapshot(),
        lambda: _core.Adapter(core, rank=2),
        lambda: _core.Sampler(core, tokens=512),
        sampler.step,
    ):
        with pytest.raises(RuntimeError, match=LOST):
            later()


def test_a_client_is_told_that_the_card_is_lost_and_checkpoints_stay_whole(
    library: ctypes.CDLL, card: CardMaker, tiny_model_dir: Path, tmp_path: Path
) -> None:
    from tinker import AdamParams, RequestFailedError, SamplingParams
    from tinker.types import ModelInput
    from tinsmith.server.backend import Backend
    from tinsmith.server.service.config import ServerConfig

    data = [make_datum([1, 2, 3, 4], [2, 3, 4, 5])]
    with (
        Backend(
            ServerConfig({"tiny": tiny_model_dir}, checkpoints=tmp_path, device="cuda-emulated")
        ) as backend,
        backend.service_client() as service,
    ):
        client = service.create_lora_training_client("tiny", rank=4).result()
        client.forward_backward(data, "cross_entropy").result()
        client.optim_step(AdamParams(learning_rate=0.01)).result()
        path = client.save_state("whole").result().path
        logp = logprobs(client.forward(data, "cross_entropy").result())
        sampling = client.save_weights_and_get_sampling_client().result()
        files = sorted(tmp_path.rglob("*"))
        library.cuda_emulated_lose(100)
        for later in (
            lambda: client.forward_backward(data, "cross_entropy"),
            lambda: client.optim_step(AdamParams(learning_rate=0.01)),
            lambda: client.save_state("torn"),
            lambda: sampling.sample(ModelInput.from_ints([1, 2]), 1, SamplingParams(max_tokens=2)),
        ):
            with pytest.raises(RequestFailedError, match=LOST):
                later().result()
        assert sorted(tmp_path.rglob("*")) == files
    library.cuda_emulated_lose(-1)  # the server is started again
    with (
        Backend(
            ServerConfig({"tiny": tiny_model_dir}, checkpoints=tmp_path, device="cuda-emulated")
        ) as backend,
        backend.service_client() as service,
    ):
        client = service.create_training_client_from_state_with_optimizer(path).result()
        again = logprobs(client.forward(data, "cross_entropy").result())
    np.testing.assert_array_equal(again[0], logp[0])
