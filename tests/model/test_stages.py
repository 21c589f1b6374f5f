"""A model in several stages, each with consecutive layers on a device of its own: gradients,
losses, steps, samples and their log-probabilities have the bits of one device. On the CPU, and
on four emulated cards, where no kernel may be given another card's memory."""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.distill_cases import distill, pair
from support.emulated_card import emulated_cards
from support.tiny_models import SPECS, Spec, call, make, randomize, tokens_of
from support.training_cases import ADAM, batch
from tinsmith import _core
from tinsmith.engine.devices import choose_device
from tinsmith.models.registry import LoadedModel, load_model

LENGTHS = (23, 1, 70, 7, 30, 12)
DEEP: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": 5},
    "qwen3-tied": {"num_hidden_layers": 4},
    "qwen2-window": {"num_hidden_layers": 6, "max_window_layers": 3},
    "qwen3_5": {
        "num_hidden_layers": 5,
        "layer_types": ["linear_attention"] * 3 + ["full_attention", "linear_attention"],
    },
    "qwen3_5_moe": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "gpt_oss": {"num_hidden_layers": 4},
}
ON_CARDS = ("qwen3-tied", "qwen3_5", "qwen3_5_moe")


def deep(name: str) -> Spec:
    """A model with more layers than the one in SPECS."""
    return replace(SPECS[name], config={**SPECS[name].config, **DEEP[name]})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a deep model, made once."""
    made = cache(lambda name: make(deep(name), tmp_path_factory.mktemp(name)))
    return made


@pytest.fixture
def four_cards() -> Iterator[ctypes.CDLL]:
    """A machine with four emulated cards, whose work waits until the host does."""
    with emulated_cards(4) as library:
        yield library


def on(folder: Path, device: str, stages: int = 1, **options: Any) -> LoadedModel:
    return load_model(folder, device=choose_device(device, stages=stages), threads=1, **options)


def bits(found: Any) -> Any:
    """Arrays as bytes, however deep they are."""
    if isinstance(found, np.ndarray):
        return found.tobytes()
    if isinstance(found, dict):
        return {key: bits(value) for key, value in found.items()}
    return [bits(one) for one in found] if isinstance(found, list | tuple) else found


def adapter_on(model: LoadedModel, **options: Any) -> _core.Adapter:
    given = {"rank": 3, "alpha": 6.0, "seed": 1, "step_tokens": 48} | options
    return randomize(_core.Adapter(model.core, **given))


def trained(model: LoadedModel, name: str, optimizer: str = "adamw") -> list[Any]:
    """Two steps of several micro-batches each, with a clipped gradient."""
    settings: dict[str, float] = dict(ADAM) if optimizer == "adamw" else {
        "learning_rate": 1e-2, "beta1": 0.9, "damping": 1e-3, "rank_lr_correction_exponent": 0.5,
    }  # fmt: skip
    adapter = adapter_on(model, optimizer=optimizer)
    found: list[Any] = []
    for seed in range(2):
        found.append(call(adapter, batch(name, LENGTHS, seed)))
        found.append(adapter.read("gradients"))
        found.append(adapter.optim_step(**{**settings, "grad_clip_norm": 0.01}))
        found.append(adapter.read("weights"))
    found.append(adapter.read("m"))
    return bits(found)


def sampled(model: LoadedModel, name: str) -> list[Any]:
    """Two requests that share a prompt of more than a page, one after the other, and a third one;
    each with log-probabilities and the best ids."""
    adapter = adapter_on(model).snapshot()
    sampler = _core.Sampler(model.core, tokens=1024)
    prompt = tokens_of(name, 70)
    found = []
    for number, weights in enumerate((adapter, adapter, None)):
        sampler.add(
            number, prompt, weights, num_samples=2, max_tokens=9, seed=5 + number, topk_sample=2,
            prompt_logprobs=True, topk_prompt=3,
        )  # fmt: skip
        while sampler.active:
            sampler.step()
        found.append(sampler.take(number))
    assert sampler.reused > 0
    return bits(found)


def compare(work: Callable[[LoadedModel], Any], one: LoadedModel, many: LoadedModel) -> None:
    wanted, found = work(one), work(many)
    assert [n for n, (a, b) in enumerate(zip(wanted, found, strict=True)) if a != b] == []


@pytest.mark.parametrize("stages", (2, 3, 4))
@pytest.mark.parametrize("name", DEEP)
def test_training_and_samples_have_the_bits_of_one_device(
    name: str, stages: int, folders: Callable[[str], Path]
) -> None:
    one, many = on(folders(name), "cpu"), on(folders(name), "cpu", stages)
    assert many.core.device == ",".join(["cpu"] * stages)
    compare(lambda model: trained(model, name), one, many)
    compare(lambda model: sampled(model, name), one, many)


@pytest.mark.parametrize("name", ON_CARDS, ids=lambda name: f"cuda-emulated-{name}")
def test_four_cards_have_the_bits_of_one(
    name: str, folders: Callable[[str], Path], four_cards: ctypes.CDLL
) -> None:
    one = on(folders(name), "cuda-emulated")
    before = [four_cards.cuda_emulated_used(card) for card in range(4)]
    many = on(folders(name), "cuda-emulated", 4)
    used = [four_cards.cuda_emulated_used(card) - at for card, at in enumerate(before)]
    assert many.core.device == "cuda-emulated,cuda-emulated:1,cuda-emulated:2,cuda-emulated:3"
    rows = many.core.stage_plan(3)
    assert all(row["weights"] + row["own"] > 0 for row in rows)
    assert all(bytes_ >= row["weights"] for bytes_, row in zip(used, rows, strict=True))
    compare(lambda model: trained(model, name), one, many)
    compare(lambda model: sampled(model, name), one, many)


def test_an_optimizer_with_matrices_has_the_bits_of_one_device(
    folders: Callable[[str], Path],
) -> None:
    for name in ("qwen3", "qwen3_5_moe"):
        one, many = on(folders(name), "cpu"), on(folders(name), "cpu", 3)
        compare(lambda model, name=name: trained(model, name, "dimuon"), one, many)


def test_packed_weights_have_the_bits_of_one_device(folders: Callable[[str], Path]) -> None:
    for weights in ("int8", "int4"):
        one = on(folders("qwen3-tied"), "cpu", weights=weights)
        many = on(folders("qwen3-tied"), "cpu", 2, weights=weights)
        compare(lambda model: trained(model, "qwen3-tied"), one, many)
        compare(lambda model: sampled(model, "qwen3-tied"), one, many)


def taught(model: LoadedModel, name: str) -> list[Any]:
    """Calls with teachers: the run itself, another adapter, the base model."""
    data = [pair(name, 9, 11, 30, seed) for seed in range(4)]
    adapter = adapter_on(model)
    teacher = randomize(_core.Adapter(model.core, rank=2), 7).snapshot()
    found: list[Any] = []
    for teaches in (None, teacher, model.core):
        found.append(distill(adapter, data, teacher=teaches))
        found.append(adapter.read("gradients"))
    return bits(found)


def test_a_teacher_is_in_stages_too(folders: Callable[[str], Path]) -> None:
    one, many = on(folders("qwen3"), "cpu"), on(folders("qwen3"), "cpu", 3)
    compare(lambda model: taught(model, "qwen3"), one, many)
    with pytest.raises(ValueError, match="teacher's model is on device cpu, the student's on cpu,"):
        distill(adapter_on(many), [pair("qwen3", 9, 11, 30)], teacher=one.core)


@pytest.mark.usefixtures("four_cards")
@pytest.mark.parametrize("device", ["cuda-emulated"])
def test_a_teacher_is_on_cards_too(device: str, folders: Callable[[str], Path]) -> None:
    name = "qwen3-tied"
    one, many = on(folders(name), device), on(folders(name), device, 4)
    compare(lambda model: taught(model, name), one, many)


def test_little_memory_changes_no_bit(folders: Callable[[str], Path]) -> None:
    name = "qwen3"
    one, many = on(folders(name), "cpu"), on(folders(name), "cpu", 3)
    wanted = bits(call(adapter_on(one), batch(name, LENGTHS)))
    least = adapter_on(many).step_least(70)
    for most in (least, least * 5 // 4, least * 2):
        adapter = adapter_on(many)
        adapter.limit(most, most)
        assert bits(call(adapter, batch(name, LENGTHS))) == wanted
    adapter.limit(least - 1, least - 1)
    with pytest.raises(MemoryError, match="on device cpu,cpu,cpu, with nothing kept"):
        call(adapter, batch(name, LENGTHS))


def test_the_trainer_scores_what_was_sampled(folders: Callable[[str], Path]) -> None:
    name = "qwen3_5"
    model = on(folders(name), "cpu", 4)
    adapter = adapter_on(model)
    sampler = _core.Sampler(model.core, tokens=512)
    prompt = tokens_of(name, 70)
    sampler.add(1, prompt, adapter.snapshot(), max_tokens=20, seed=3)
    while sampler.active:
        sampler.step()
    (sample,) = sampler.take(1)["samples"]
    tokens = np.concatenate([prompt, sample["tokens"]]).astype(np.int32)
    counts = np.ones(1, np.int32)
    scored = adapter.forward(tokens[:-1], counts * (len(tokens) - 1), tokens[1:], counts)
    assert scored[len(prompt) - 1 :].tobytes() == sample["logprobs"].tobytes()


def test_a_plan_has_each_stage(folders: Callable[[str], Path]) -> None:
    many = on(folders("qwen3"), "cpu", 3).core
    rows, whole = many.stage_plan(4), many.plan(4)
    assert [row["device"] for row in rows] == ["cpu"] * 3
    assert rows[0]["first"] == 0 and rows[-1]["end"] == 5
    assert sorted(row["end"] - row["first"] for row in rows) == [1, 2, 2]
    assert all(a["end"] == b["first"] for a, b in pairwise(rows))
    for key, total in (("weights", "held"), ("adapter", "adapter"), ("step", "step")):
        assert sum(row[key] for row in rows) in range(whole[total] - 4096, whole[total] + 4096)
    assert sum(row["cache"] for row in rows) == whole["cache"]


def test_what_can_not_be_is_told(folders: Callable[[str], Path], four_cards: ctypes.CDLL) -> None:
    folder = folders("qwen3-tied")
    with pytest.raises(ValueError, match="a model of 4 layers can have 4 stages, not 5"):
        on(folder, "cpu", 5)
    with pytest.raises(ValueError, match="stages are from 1 to 16; 17 came"):
        choose_device("cpu", stages=17)
    with pytest.raises(ValueError, match="5 stages need 5 GPUs, and this machine has 4 GPUs"):
        choose_device("cuda-emulated", stages=5)
    assert choose_device("cuda-emulated:2", stages=2) == "cuda-emulated:2,cuda-emulated"
    config = on(folder, "cpu").core.config
    frequencies = np.ones(config["rotary"] // 2, np.float32)
    with pytest.raises(RuntimeError, match="need devices of one kind, not cpu and cuda-emulated"):
        _core.Model(config, frequencies, device="cpu,cuda-emulated")
    with pytest.raises(RuntimeError, match="can't share the memory of cuda-emulated:1"):
        _core.Model(config, frequencies, device="cuda-emulated:1,cuda-emulated:1")
    many = on(folder, "cpu", 2).core
    with pytest.raises(ValueError, match="a model with 2 stages has no single memory"):
        many.memory()
