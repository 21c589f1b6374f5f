"""The emulator's modes on the real device: work that waits until the host waits for it (lazy), and
tensor cores that cut their sums (truncating). Long sums, one model's training and sampling, and
how each test of the device gets its mode (emulated_mode.py)."""

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support import environment
from support.emulated_mode import BY_NAME, MODE, MODES, TURN, Choice, Mode, mode_called
from support.expert_cases import CASES
from support.op_cases import make_matmul
from support.op_devices import Device, Memory, emulated_library, set_mode
from support.op_tolerance import compare
from support.tiny_models import call, cut, datum, error, folder, loaded_on, randomize, tokens_of
from support.training_cases import autograd
from tinsmith import _core
from tinsmith.models.registry import load_model

EAGER, LAZY, TRUNCATING = (MODES[name] for name in ("eager", "lazy", "truncating"))


@pytest.fixture
def mode() -> Iterator[Callable[[Mode], None]]:
    """Sets the emulator's mode; it is what it was afterwards."""
    emulated_library()
    yield set_mode
    set_mode()


@pytest.mark.parametrize("K", (1024, 2048))
def test_long_sums_err_no_more_than_tensor_cores_do(mode: Callable[[Mode], None], K: int) -> None:
    """The stand-in's product, and a gradient of LoRA, whose sums over rows are our own kernel's."""
    mode(TRUNCATING)
    rng, dev = np.random.default_rng(K), Device("cuda-emulated")
    sizes = {"a_turned": 0, "b_turned": 0, "b_bf16": 1, "accumulate": 0}
    compare(dev, "matmul", make_matmul(rng, 9, 40, K, **sizes))
    build = CASES["lora_backward"][0]
    compare(dev, "lora_backward", build(rng, T=K, widths=(40, 7), D=24, R=5))


def train(name: str) -> tuple[list[np.ndarray], _core.Adapter]:
    """A call with two chunks of logits, a step and another call: log-probabilities and gradients
    of each."""
    adapter = randomize(
        _core.Adapter(load_model(folder(name), device="cuda-emulated").core, rank=4)
    )
    data = [datum(tokens_of(name, length)) for length in (41, 1, 30)]
    found = []
    for _ in range(2):
        logp, _ = call(adapter, data)
        found += [*logp, adapter.read("gradients")]
        adapter.optim_step(
            learning_rate=0.01, beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=0.0, grad_clip_norm=1.0
        )
    return found, adapter


def sample(adapter: _core.Adapter, name: str) -> list[np.ndarray]:
    """Requests that share a prompt's pages, one that comes later, and recorded steps between."""
    sampler, found = _core.Sampler(adapter.model, tokens=1024), {}
    prompts = [tokens_of(name, 70), tokens_of(name, 70), tokens_of(name, 5)]
    for number, prompt in enumerate(prompts[:2]):
        sampler.add(number, prompt, adapter=adapter, max_tokens=6, seed=number, num_samples=2)
    for step in range(60):
        if step == 4:
            sampler.add(2, prompts[2], adapter=adapter, max_tokens=6, temperature=0.0)
        found |= {done: sampler.take(done)["samples"] for done in sampler.step()[1]}
    assert len(found) == 3 and sampler.replays[1] > 2
    samples = [one for number in sorted(found) for one in found[number]]
    return [one[key] for one in samples for key in ("tokens", "logprobs")]


def test_training_and_sampling_have_the_same_bits_when_work_waits(
    mode: Callable[[Mode], None],
) -> None:
    """Adapters are dropped while the second is used, so that their memory is given back between."""
    results = []
    for chosen in (EAGER, LAZY):
        mode(chosen)
        found, adapter = train("qwen3")
        dropped = [_core.Adapter(adapter.model, rank=1) for _ in range(3)]
        found += sample(adapter, "qwen3")
        del dropped
        results.append(found)
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_sampled_tokens_logprob_is_the_trainers_where_sums_are_cut(
    mode: Callable[[Mode], None],
) -> None:
    mode(TRUNCATING)
    adapter = train("qwen3")[1]
    sampler, prompt = _core.Sampler(adapter.model, tokens=512), tokens_of("qwen3", 9)
    sampler.add(1, prompt, adapter=adapter, max_tokens=7, seed=4)
    while sampler.active:
        sampler.step()
    [drawn] = sampler.take(1)["samples"]
    whole = np.concatenate([prompt, drawn["tokens"]]).astype(np.int32)
    [logp], _ = call(adapter, [datum(whole[:-1], whole[1:])], backward=False)
    np.testing.assert_array_equal(logp[len(prompt) - 1 :], drawn["logprobs"])


def test_a_models_gradient_errs_no_more_than_torchs_where_sums_are_cut(
    mode: Callable[[Mode], None],
) -> None:
    mode(TRUNCATING)
    ours, torchs = [], []
    for seed in range(3):
        core = loaded_on("qwen3", "cuda-emulated").core
        adapter = randomize(_core.Adapter(core, rank=5, alpha=8.0), seed)
        data = [datum(tokens_of("qwen3", length, seed)) for length in (37, 70)]
        found, _ = call(adapter, data)
        arguments = ("qwen3", adapter, data, found, "cross_entropy", None)
        exact, bf16 = (autograd(*arguments, dtype) for dtype in (torch.float64, torch.bfloat16))
        flat = [
            np.concatenate([side[2][key].ravel() for key in sorted(exact[2])])
            for side in (exact, bf16)
        ]
        gradients = cut(adapter, adapter.read("gradients"))
        own = np.concatenate([gradients[key].ravel() for key in sorted(exact[2])])
        ours.append(error(own, flat[0]))
        torchs.append(error(flat[1], flat[0]))
    assert np.prod(ours) <= 1.1 ** len(ours) * np.prod(torchs)


def test_an_upload_of_more_than_the_pinned_memory_waits_for_its_parts(
    mode: Callable[[Mode], None],
) -> None:
    mode(LAZY)
    dev, wanted = Device("cuda-emulated"), np.arange(9 << 17)  # 9 MiB
    memory = Memory(dev, wanted.nbytes)
    dev.c.upload(dev.pointer, memory.pointer, wanted.ctypes.data, wanted.nbytes)
    np.testing.assert_array_equal(memory.read(wanted.nbytes).view(np.int64), wanted)


def test_memory_that_is_given_back_is_read_first_by_work_that_waits(
    mode: Callable[[Mode], None],
) -> None:
    mode(LAZY)
    dev = Device("cuda-emulated")
    given, kept = dev.put(np.ones(64), "float"), dev.put(np.zeros(64), "float")
    dev.c.copy(dev.pointer, kept.pointer, given.pointer, 256)
    del given
    held = [ctypes.c_void_p() for _ in range(2)]
    for one in held:  # frees what was given back
        dev.check(dev.c.alloc(dev.pointer, ctypes.byref(one), 1 << 20))
    np.testing.assert_array_equal(kept.read(256).view(np.float32), np.ones(64))
    for one in held:
        dev.c.release(dev.pointer, one, 1 << 20)


# ---- which mode a test is in ----

TESTS = [f"test_ops.py::test_op[cuda-emulated-{number}]" for number in range(1000)]


def test_the_turns_put_every_test_in_every_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MODE, raising=False)
    found, seeds = [], []
    for turn in range(len(BY_NAME)):
        monkeypatch.setenv(TURN, str(turn))
        chosen = [Choice().of(test) for test in TESTS]
        assert chosen == [Choice().of(test) for test in TESTS]
        found.append([said.partition(":")[0] for said in chosen])
        seeds.append({mode_called(said).seed for said in chosen})
        counts = [found[-1].count(name) for name in BY_NAME]
        assert min(counts) > 150, "one run has each mode often"
    assert all(set(modes) == set(BY_NAME) for modes in zip(*found, strict=True))
    assert all(len(own) == len(TESTS) for own in seeds) and not seeds[0] & seeds[1]


def test_a_mode_can_be_forced_and_a_seed_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE, "reversed")
    assert {mode_called(Choice().of(test)).order for test in TESTS} == {1}
    monkeypatch.setenv(MODE, "random:7")
    assert {Choice().of(test) for test in TESTS} == {"random:7"}
    assert mode_called("random:7") == Mode(order=2, seed=7) and mode_called("") == Mode()


FAILING = """
from support import op_devices as engine

def test_it():
    engine.emulated_library()
    print("it ran in", engine.modes[0])
    assert False
"""


def failing(folder: Path, variable: str, value: str) -> tuple[int, str]:
    """How pytest ends over a test that fails, where a variable has a value, and what it says."""
    (folder / "test_failing.py").write_text(FAILING)
    rules = ["-p", "conftest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder]
    own = {key: text for key, text in environment().items() if key not in (MODE, TURN)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *rules, folder / "test_failing.py"],
        capture_output=True,
        text=True,
        env={**own, variable: value},
    )
    return done.returncode, done.stdout + done.stderr


def test_a_failures_report_has_its_mode_which_repeats_it(tmp_path: Path) -> None:
    emulated_library()
    code, said = failing(tmp_path, TURN, "3")
    assert code == 1
    [again] = re.findall(r"^\S+; (\S+) puts it there again$", said, re.M)
    variable, _, mode = again.partition("=")
    assert variable == MODE and f"it ran in {mode_called(mode)}" in said
    assert f"it ran in {mode_called(mode)}" in failing(tmp_path, variable, mode)[1]


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        (MODE, "slow", "TINSMITH_EMULATE is 'slow': it is MODE or MODE:SEED, of eager, lazy,"),
        (MODE, "random:a", "TINSMITH_EMULATE is 'random:a': it is MODE or MODE:SEED"),
        (TURN, "-1", "TINSMITH_EMULATE_TURN is '-1': it is a number from 0 on"),
    ],
)
def test_a_mode_that_is_none_is_refused(
    tmp_path: Path, variable: str, value: str, why: str
) -> None:
    code, said = failing(tmp_path, variable, value)
    assert code == 4 and why in said and "Traceback" not in said
