"""What a training step keeps of its layers, and what it makes again: whatever the plan, the numbers
are bit for bit those of a step that keeps everything, and the memory is the plan's."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinsmith
from support.distill_cases import distill, pair
from support.emulated_card import emulated_card
from support.midway import interrupt_midway
from support.packed_weights import quantise_large, whole
from support.tiny_models import (
    DEVICE,
    WEIGHTS,
    Datum,
    call,
    cpu_only,
    datum,
    folder,
    randomize,
    tokens_of,
)
from tinsmith import _core
from tinsmith.checkpoints.lora import LoraSpec
from tinsmith.checkpoints.optimizers import AdamParams
from tinsmith.cli.commands import main
from tinsmith.engine.bases import inspect_models
from tinsmith.engine.errors import RequestError
from tinsmith.engine.training import Batch, OptimJob, TrainJob
from tinsmith.engine.worker import Worker
from tinsmith.models.registry import load_model, read_config
from tinsmith.models.weight_dtypes import BITS

pytestmark = [pytest.mark.usefixtures("on"), pytest.mark.pairs]

LAYERS, LONG, MIB = 5, 66, 1 << 20


def deep() -> _core.Model:
    """A random Qwen3 of five layers, three of them with a window, on the device that the test runs
    on."""
    return deep_on(DEVICE.get(), WEIGHTS.get())


@functools.cache
def deep_on(device: str, weights: str) -> _core.Model:
    """Its matrices of whole blocks are kept in `weights`, if that is a type."""
    config, frequencies = read_config(folder("qwen3"))
    full, sliding = "full_attention", "sliding_attention"
    mixers = (full, sliding, sliding, full, sliding)
    config |= {"layers": LAYERS, "mixers": mixers, "feeds": ("mlp",) * LAYERS, "window": 9}
    config |= {"width": 256, "ffn": 256} if weights.endswith("_k") else {}
    slots = _core.Model(config, frequencies, device=device, threads=1).slots
    packed = {
        (slot, layer): weights
        for slot, layer, _, rows, cols in slots
        if weights in BITS and rows > 1 and cols == whole(weights, cols)
    }
    model = _core.Model(config, frequencies, packed=packed, device=device, threads=1)
    rng = np.random.default_rng(0)
    for slot, layer, _, rows, cols in slots:
        noise = rng.normal(size=(rows, cols)).astype(np.float32)
        tensor = 1 + 0.3 * noise[0] if rows == 1 else noise * np.float32(1.3 / cols**0.5)
        if weights.endswith("_k") and (slot, layer) in packed:
            model.load(slot, layer, quantise_large(tensor, weights), 0, weights)
            continue
        bits = tensor.astype(np.float32).view(np.uint32)
        model.load(slot, layer, tensor if rows == 1 else (bits >> 16).astype(np.uint16))
    model.seal()
    return model


def adapter_of(**options: Any) -> _core.Adapter:
    """An adapter on a model that holds no step's memory."""
    deep().trim()
    return randomize(_core.Adapter(deep(), **{"rank": 4, **options}))


def arena(adapter: _core.Adapter) -> int:
    """The bytes that steps have taken."""
    return adapter.model.arena_bytes


def one(length: int = LONG, seed: int = 0) -> Datum:
    """A datum whose loss's gradient depends on its log-probabilities, a third of it zero."""
    rng = np.random.default_rng([length, seed])
    advantages = rng.normal(size=length) * (rng.random(length) > 1 / 3)
    return datum(tokens_of("qwen3", length, seed), logprobs=-rng.random(length) * 4,
                 advantages=advantages)  # fmt: skip


def step(adapter: _core.Adapter, data: list[Datum]) -> tuple[bytes, ...]:
    """One forward_backward: log-probabilities, loss and gradients, to be compared bit for bit."""
    logp, loss = call(adapter, data, "importance_sampling")
    gradients = adapter.read("gradients")
    assert np.any(gradients)
    return (*(rows.tobytes() for rows in logp), np.float64(loss).tobytes(), gradients.tobytes())


def plan(limit: int = 0, tokens: int = LONG) -> dict[str, int]:
    return deep().plan(4, tokens, limit)


def limit_of(found: dict[str, int]) -> int:
    """The least limit under which a step is planned so."""
    return found["step"] + found["scratch"]


def rungs() -> Iterator[dict[str, int]]:
    """Every plan there is, from everything kept to nothing: each under the largest limit that is
    too little for the one before it. Each has its limit, and takes all of it."""
    limit = 1 << 50
    while (found := plan(limit))["kept"]:
        assert limit_of(found) <= limit
        limit = limit_of(found)
        assert plan(limit)["step"] == found["step"]
        yield found | {"limit": limit}
        limit -= 1


def least() -> int:
    """The smallest limit of a step of LONG tokens."""
    return limit_of(plan(1))


def test_every_plan_gives_the_same_bits_in_the_memory_that_it_said() -> None:
    wanted = step(adapter_of(), [one()])
    kept = []
    for found in rungs():
        adapter = adapter_of(step_bytes=found["limit"], step_tokens=LONG)
        assert adapter.bytes == found["adapter"] * 3 // 4  # without gradients
        assert step(adapter, [one()]) == wanted, found
        assert arena(adapter) == found["step"], found
        kept.append((found["kept"], found["attention_kept"]))
    most = [(layers, LAYERS) for layers in range(LAYERS, 0, -1)]
    assert kept == [*most, *((1, layers) for layers in range(LAYERS - 1, 0, -1))]


def test_without_a_limit_everything_is_kept() -> None:
    found = plan()
    assert (found["kept"], found["attention_kept"]) == (LAYERS, LAYERS)
    assert found["step_most"] == (found["all"] - found["weights"]) // 2
    adapter = adapter_of()
    step(adapter, [one()])
    assert (adapter.bytes, arena(adapter)) == (found["adapter"], found["step"])


def test_a_datum_longer_than_the_rows_of_a_step_trains_in_the_memory_there_is() -> None:
    """Micro-batches of 20 rows, and two datums that are longer, one of them too long to be kept."""
    data = [one(9), one(LONG), one(7, 1), one(30), one(11, 2), one(3)]
    wanted = step(adapter_of(step_tokens=20), data)
    limit = least()
    assert plan(limit, 30)["kept"] > 1 and plan(limit, 20)["kept"] == LAYERS
    adapter = adapter_of(step_tokens=20, step_bytes=limit)
    assert step(adapter, data) == wanted
    assert arena(adapter) <= limit


def test_what_does_not_fit_at_all_is_refused_and_changes_nothing() -> None:
    limit = least() - 1
    adapter = adapter_of(step_tokens=20, step_bytes=limit)
    wanted = step(adapter_of(step_tokens=20), [one(9)])
    sentence = (
        rf"a training step of {LONG} tokens needs at least \d+\.\d\d MiB on device {DEVICE.get()}, "
        r"with nothing kept that can be computed again, and may take \d+\.\d\d MiB"
    )
    deep().trim()
    with pytest.raises(MemoryError, match=sentence):
        call(adapter, [one(9), one(), one(9)], "importance_sampling")
    assert not adapter.read("gradients").any() and adapter.pending == (0.0, 0.0, 0.0)
    assert arena(adapter) == 0
    assert step(adapter, [one(9)]) == wanted
    logp = call(adapter, [one()], "importance_sampling", backward=False)[0]  # needs less
    assert np.isfinite(logp[0]).all()


def test_the_longest_datum_of_the_plan_is_the_longest_that_trains() -> None:
    limit = least()
    longest = plan(limit)["longest"]
    assert longest == LONG and plan(10 * limit)["longest"] == deep().config["context"]
    step(adapter_of(step_bytes=limit), [one(longest)])
    with pytest.raises(MemoryError, match=f"a training step of {longest + 1} tokens needs"):
        step(adapter_of(step_bytes=limit), [one(longest + 1)])


def test_rows_follow_a_limit_only_where_they_must() -> None:
    """Rows decide how gradients are summed; what is kept does not."""
    rows = plan(tokens=0)["step_tokens"]
    roomy, narrow = plan(tokens=rows), plan(1, tokens=rows)["step"]
    assert roomy["kept"] == LAYERS and narrow < 0.6 * roomy["step"]
    assert plan(narrow + roomy["scratch"], tokens=0)["step_tokens"] == rows
    assert plan(narrow // 3, tokens=0)["step_tokens"] < rows


def flat(data: list[Datum]) -> tuple[np.ndarray, ...]:
    return (
        np.concatenate([item.tokens for item in data]),
        np.array([len(item.tokens) for item in data], np.int32),
        np.concatenate([item.targets for item in data]),
        np.ones(len(data), np.int32),
    )


@pytest.mark.parametrize("options", [{}, {"step_tokens": 20, "keep_bytes": 0}], ids=str)
def test_a_kept_forward_may_keep_less(options: dict[str, int]) -> None:
    """Under the least limit, one between, and none."""
    data = flat([one(60), one(3), one(2, 1)])
    dlogp = np.random.default_rng(0).normal(size=len(data[0])).astype(np.float32)
    for limit in (0, least() + 20_000, least() + 70_000):
        once = adapter_of(step_bytes=limit, **options)
        wanted = once.forward_backward(*data, "cross_entropy", {"weights": -dlogp}, {})
        taken, halves = arena(once), adapter_of(step_bytes=limit, **options)
        assert halves.forward(*data, keep=True).tobytes() == wanted[0].tobytes()
        assert halves.backward(dlogp) == wanted[1]
        assert halves.read("gradients").tobytes() == once.read("gradients").tobytes()
        assert arena(halves) == taken


def test_memory_that_grows_under_a_kept_forward_loses_nothing() -> None:
    """Of three micro-batches the first is held; the second keeps more in backward, in an arena that
    is another one then."""
    data = flat([one(9), one(LONG), one(12, 1)])
    dlogp = np.random.default_rng(0).normal(size=len(data[0])).astype(np.float32)
    once = adapter_of(step_tokens=20)
    wanted = once.forward_backward(*data, "cross_entropy", {"weights": -dlogp}, {})
    taken, halves = arena(once), adapter_of(step_tokens=20, step_bytes=least())
    halves.forward(*data, keep=True)
    before, halves.step_bytes = arena(halves), 0
    assert halves.backward(dlogp) == wanted[1]
    assert halves.read("gradients").tobytes() == once.read("gradients").tobytes()
    assert arena(halves) == taken > before


def test_a_kept_forward_that_backward_has_no_room_for_is_refused_there() -> None:
    data, limit = flat([one()]), least() - 1
    adapter, dlogp = adapter_of(step_tokens=20, step_bytes=limit), np.ones(LONG, np.float32)
    assert adapter.forward(*data, keep=True).tobytes() == adapter_of().forward(*data).tobytes()
    with pytest.raises(MemoryError, match="needs at least"):
        adapter.backward(dlogp)
    assert not adapter.read("gradients").any()


def test_a_student_of_a_teacher_keeps_less_too() -> None:
    data = [pair("qwen3", 5, 17, 20), pair("qwen3", 10, 4, 0, seed=1)]
    whole = adapter_of()
    wanted = distill(whole, data)
    gradients, most = whole.read("gradients").tobytes(), arena(whole)
    sizes, limit = [0], most // 3
    while sizes[-1] < most:
        adapter = adapter_of(step_bytes=limit)
        limit += most // 6
        try:
            found = distill(adapter, data)
        except MemoryError as error:
            assert len(sizes) == 1 and "needs at least" in str(error)
            continue
        for ours, theirs in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert adapter.read("gradients").tobytes() == gradients
        sizes.append(arena(adapter))
        assert sizes[-2] <= sizes[-1] <= limit
    assert 0 < sizes[1] < sizes[2] < sizes[-1] == most


def test_an_interrupt_while_layers_are_made_again_changes_nothing() -> None:
    limit = least()
    adapter, wanted = adapter_of(step_tokens=LONG, step_bytes=limit), step(adapter_of(), [one()])
    data = [one()] * 30
    interrupt_midway(
        adapter, adapter.clear_gradients, lambda: call(adapter, data, "importance_sampling")
    )
    assert not adapter.read("gradients").any()
    assert step(adapter, [one()]) == wanted


@cpu_only
def test_info_prints_what_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["info", str(folder("qwen3")), "--rank", "4", "--device", DEVICE.get()]
    assert main([*options, "--tokens", "64"]) == 0
    printed = capsys.readouterr().out
    assert "a training step of 64 tokens, which keeps all of its 2 layers" in printed
    assert "the longest datum that can be trained has 160 tokens, the model's context" in printed
    assert main([*options, "--tokens", "64", "--step-memory", "290K"]) == 0
    printed = capsys.readouterr().out
    assert "which keeps 1 of its 2 layers, attention's part of " in printed
    assert "the longest datum that can be trained has " in printed and "160 tokens" not in printed
    assert main([*options, "--tokens", "64", "--step-memory", "1K"]) == 0
    printed = capsys.readouterr().out
    assert "a training step of 64 tokens, which is more than it may take" in printed
    assert "no datum can be trained in that" in printed


@cpu_only
def test_a_models_own_adapter_is_told_its_memory() -> None:
    model = tinsmith.Model(folder("llama-tied"))
    tokens, found = tokens_of("llama-tied", 150), []
    least = model.core.plan(4, len(tokens) - 1, 1)["step"]
    for memory, wanted in (
        (0, model.core.plan(4)["step_most"]),
        ("700K", 700 << 10),
        (least, least),
    ):
        adapter = model.lora(rank=4, seed=1)
        adapter.step_memory = memory
        assert adapter.step_memory == wanted
        model.core.trim()
        adapter.forward_backward(tokens[:-1], tokens[1:])
        found.append((arena(adapter.core), adapter.core.read("gradients").tobytes()))
        assert found[-1][0] <= adapter.step_memory
    assert found[0][0] > found[1][0] > found[2][0] and len({bits for _, bits in found}) == 1
    wrongs = ((-1, ValueError), (2**64, ValueError), ("6 apples", ValueError), (None, TypeError))
    for wrong, error in wrongs:
        with pytest.raises(error, match=r"step_memory|amount of memory"):
            adapter.step_memory = wrong
    assert adapter.step_memory == least


# ---- in a server, whose memory is said ----


def served(model: Path, memory: int | None) -> tuple[list[bytes], int, int]:
    """What a run of rank 4 gives for two steps on long batches and their log-probabilities; what it
    may take for a step, and what it holds in the end."""
    rng = np.random.default_rng(0)
    shapes = ((128,),) * 20
    ids = rng.integers(0, 290, (2, 128 * len(shapes))).astype(np.int32)
    counts = np.full(len(shapes), 128, np.int32), np.ones(len(shapes), np.int32)
    data = Batch(ids[0], counts[0], ids[1], counts[1], "cross_entropy", {}, {}, shapes)
    worker = Worker(inspect_models({"tiny": model}), threads=1, memory=memory)
    try:
        worker.create("run", "tiny", LoraSpec(rank=4, seed=1)).result(timeout=60)
        found = []
        for seq in (1, 3, 5):
            future = worker.submit("run", seq, TrainJob(data))
            worker.submit("run", seq + 1, OptimJob(AdamParams(learning_rate=0.01)))
            found += [rows.tobytes() for rows in future.result(timeout=60).logprobs]
        lane = worker._engine.runs["run"]
        return found, lane.adapter.step_bytes, worker.memory().result(60).arenas
    finally:
        worker.close()


@cpu_only
def test_a_server_of_little_memory_trains_to_the_same_bits(tiny_model_dir: Path) -> None:
    core = load_model(tiny_model_dir, threads=1).core
    whole = core.plan(4)
    least = core.plan(4, whole["step_tokens"], 1)
    assert least["step"] < whole["step"]
    wanted, limit, held = served(tiny_model_dir, None)
    one = whole["sums"] // 4  # for the gradients of a call of one part
    assert limit > whole["step"] and held == 4 * one + whole["scratch"] + whole["step"]
    step = least["step"] * 9 // 8 + whole["scratch"]
    need = core.weight_bytes + whole["adapter"] + one + step
    found, limit, held = served(tiny_model_dir, need)
    assert found == wanted and limit == step - 3 * one and held == one + step
    with pytest.raises(RequestError, match=r"a run of rank 4 needs .* are free"):
        served(tiny_model_dir, need - 1000)


# ---- on a card that others use too ----


@pytest.fixture
def card(on: str) -> Iterator[Callable[[int], None]]:
    """Sets how much memory the emulated card has free."""
    if on != "cuda-emulated":
        pytest.skip("only the emulated card's memory can be set")
    with emulated_card() as make:
        yield make


def test_a_card_that_others_have_filled_is_trained_on_with_less_kept(
    card: Callable[[int], None],
) -> None:
    """A step may take a half of all memory, but there is not so much free."""
    adapter, limits = adapter_of(step_tokens=LONG), [found["limit"] for found in rungs()]
    wanted = step(adapter_of(), [one()])
    kept = adapter_of()  # what was given back is free from the device's next work on
    assert kept.bytes
    card(limits[4])
    assert step(adapter, [one()]) == wanted
    assert arena(adapter) == plan(limits[4])["step"]
    other = adapter_of(step_tokens=LONG)
    card(plan(1)["step"] // 2)
    with pytest.raises(MemoryError, match=rf"a training step of {LONG} tokens needs .* can give"):
        step(other, [one()])
