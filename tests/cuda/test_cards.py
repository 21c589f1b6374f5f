"""Several GPUs in a machine, and several streams on one: which card a device is on, whatever thread
asks; what is refused; and that nothing of one device is another's. On the emulator, which pretends
two cards and runs work only when the host waits for it."""

import ctypes
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from support.distill_cases import distill, pair
from support.emulated_card import MIB, emulated_card, emulated_cards
from support.op_cases import CASES
from support.op_devices import Device
from support.op_tolerance import compare, put_pages, run
from support.tiny_models import call, datum, folder, loaded_on, randomize, tokens_of
from tinsmith import _core
from tinsmith.engine.devices import card_bytes, cards, choose_device
from tinsmith.models.registry import load_model

FIRST, SECOND = "cuda-emulated", "cuda-emulated:1"


@pytest.fixture(autouse=True)
def library() -> Iterator[ctypes.CDLL]:
    """The emulated device's library, with two cards and work that waits."""
    with emulated_cards(2) as library:
        yield library


# ---- names ----


def test_the_cards_are_listed() -> None:
    found = cards(FIRST)
    assert [card.device for card in found] == [FIRST, SECOND]
    assert found[0].title == "an emulated card" and found[0].capability == (9, 0)
    assert card_bytes(SECOND) == found[1].bytes == 2048 * MIB
    assert card_bytes("cuda-emulated:2") is None


def test_doctor_shows_each_card() -> None:
    from tinsmith.cli.doctor import card_lines

    assert card_lines(FIRST) == [
        f"  {name}: an emulated card, 2.00 GiB, compute capability 9.0" for name in (FIRST, SECOND)
    ]


def test_a_card_that_a_test_made_is_itself_again_whatever_is_on_it() -> None:
    with emulated_card() as make:
        make(50 * MIB, major=8)
        held = load_model(folder("qwen3"), device=FIRST)
        assert card_bytes(FIRST) != 2048 * MIB
    assert cards(FIRST)[0].capability == (9, 0)
    assert card_bytes(FIRST) == 2048 * MIB
    del held


def test_an_ordinal_that_is_not_there_is_told_with_how_many_there_are() -> None:
    sentence = "cuda-emulated:2: there is no such GPU: this machine has 2 that it may use"
    with pytest.raises(RuntimeError, match=sentence):
        choose_device("cuda-emulated:2")
    with pytest.raises(RuntimeError, match=sentence):
        load_model(folder("qwen3"), device="cuda-emulated:2")


@pytest.mark.parametrize("name", ("cuda:", "cuda:x", "cuda:-1", "cuda:1 ", "cuda1", "cpu:1", "gpu"))
def test_a_name_that_is_no_devices_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="there is no device"):
        choose_device(name)
    with pytest.raises(RuntimeError, match="there is no device"):
        load_model(folder("qwen3"), device=name)


def test_the_first_card_has_two_names() -> None:
    assert choose_device("cuda-emulated:0") == FIRST
    assert load_model(folder("qwen3"), device="cuda-emulated:0").core.device == FIRST
    assert load_model(folder("qwen3"), device=SECOND).core.device == SECOND


# ---- the card that work is on ----


def test_memory_is_the_cards_own_and_is_given_back_from_any_thread(library: ctypes.CDLL) -> None:
    before = [library.cuda_emulated_used(card) for card in (0, 1)]
    held = [load_model(folder("qwen3"), device=SECOND)]
    assert library.cuda_emulated_used(0) == before[0]
    assert library.cuda_emulated_used(1) > before[1] + MIB
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert library.cuda_emulated_used(1) == before[1]
    assert library.cuda_emulated_current(-1) == 0, "the caller's own card is current again"


def test_ops_run_on_the_second_card_whatever_card_is_current(library: ctypes.CDLL) -> None:
    dev = Device(SECOND)
    build, sizes = CASES["attention"]
    for current in (0, 1):
        library.cuda_emulated_current(current)
        compare(dev, "attention", build(np.random.default_rng(0), **sizes[-1]))
        assert library.cuda_emulated_current(-1) == current
    library.cuda_emulated_current(0)


def test_two_cards_compute_in_two_threads() -> None:
    """The same training and sampling on each; the bits are those of one alone."""
    wanted, found, failures = work(FIRST), {}, []

    def guarded(name: str) -> None:
        try:
            found[name] = work(name)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(name,)) for name in (FIRST, SECOND)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for name in (FIRST, SECOND):
        for one, other in zip(found[name], wanted, strict=True):
            np.testing.assert_array_equal(one, other)


def work(name: str) -> list[np.ndarray]:
    """Log-probabilities, gradients and samples of a model on a device."""
    core = load_model(folder("qwen3"), device=name).core
    adapter = randomize(_core.Adapter(core, rank=4))
    logp, _ = call(adapter, [datum(tokens_of("qwen3", 20)), datum(tokens_of("qwen3", 7))])
    sampler = _core.Sampler(core, tokens=512)
    sampler.add(1, tokens_of("qwen3", 9), adapter=adapter, max_tokens=5, num_samples=2, seed=3)
    while sampler.active:
        sampler.step()
    samples = sampler.take(1)["samples"]
    return [*logp, adapter.read("gradients"), *(one["tokens"] for one in samples)]


# ---- two streams of one card ----


def test_two_devices_of_one_card_keep_their_sums_apart() -> None:
    """Attention of a few long sequences, whose chunks have blocks of their own: the last block that
    comes joins them. Two such kernels, of two devices, run at the same time."""
    build = CASES["attention"][0]
    args = build(np.random.default_rng(1), spans=((1, 700),), H=6, G=2, E=34)
    pair = [Device(FIRST) for _ in range(2)]
    wanted = run(pair[0], "attention", args)
    prepared = [prepare_attention(dev, args) for dev in pair]
    for dev, (_, _, arguments, _) in zip(pair, prepared, strict=True):
        dev.c.attention(*arguments)
    for dev, (y, lse, _, _) in zip(pair, prepared, strict=True):
        dev.check(dev.c.sync(dev.pointer))
        for memory, name, kind in ((y, "y", "real"), (lse, "lse", "float")):
            got = dev.decode(memory.read(memory.size_bytes), kind, np.shape(wanted[name]))
            np.testing.assert_array_equal(got, wanted[name])


def prepare_attention(dev: Device, args: dict) -> tuple:
    """y, lse, the arguments of a call, and what must live until it is done."""
    k, v = put_pages(dev, args["k_pages"], args["v_pages"])
    q, spans = dev.put(args["q"], "real"), dev.put(args["spans"], "Span")
    given = [q, k, v, spans, dev.put(args["pages"], "int32_t")]
    T, H, E = (args[name] for name in "THE")
    y, lse = dev.put(np.zeros((T, H, E)), "real"), dev.put(np.zeros((T, H)), "float")
    pointers = [dev.pointer, *(one.pointer for one in (y, lse, *given))]
    scalars = ("S", "T", "H", "G", "E", "window", "whole")
    arguments = [*pointers, *(args[name] for name in scalars)]
    dev.c.rehearse(dev.pointer)
    dev.c.attention(*arguments)
    dev.check(dev.c.reserve(dev.pointer, dev.c.rehearsed(dev.pointer)))
    return y, lse, arguments, given


# ---- a teacher elsewhere ----


def test_a_teacher_on_another_card_is_refused() -> None:
    teacher = load_model(folder("qwen3"), device=SECOND).core
    adapter = randomize(_core.Adapter(loaded_on("qwen3", FIRST).core, rank=4))
    with pytest.raises(ValueError, match=f"{SECOND}.*{FIRST}"):
        distill(adapter, [pair("qwen3", 5, 9, 6)], {}, teacher)
