"""The CUDA device, emulated where there is no GPU, beside the CPU and beside torch in bf16: logits,
every LoRA gradient, and the losses of ten steps, all against float64.

Torch's side is transformers' model in bf16 with PEFT's matrices in float32, as PEFT trains it. One
draw of tokens and matrices says little, because two roundings in bf16 differ by luck: the errors of
several are compared by their geometric mean."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.leftovers import VARIABLE, noted
from support.tiny_models import (
    SPECS,
    Datum,
    call,
    cut,
    datum,
    error,
    folder,
    loaded_on,
    randomize,
    tokens_of,
)
from support.training_cases import ADAM, autograd, compared, torch_losses
from tinsmith import _core
from tinsmith.models.registry import load_model

on_gpus = pytest.mark.parametrize("on", ("cuda", "cuda-emulated"), indirect=True)

SEEDS = range(8)
# How much more than torch a device may err: as a whole, and a matrix's gradient by itself, whose
# eight draws still differ by luck.
WHOLE, EACH = 1.05, 1.25
# A mixture's row near a tie goes to another expert in bf16, by luck: then all gradients differ.
MIXED_WHOLE, MIXED_EACH = 1.4, 2.0  # of the median
LOSSES = 1.5  # a loss is one number, in which errors of either sign meet: luck again, of four draws
LENGTHS = (37, 1, 70)


def test_a_device_is_there_or_a_sentence_says_why_not() -> None:
    found = _core.devices()
    assert sorted(found) == ["cpu", "cpu-bf16", "cpu-int16", "cuda", "cuda-emulated"]
    for device_name, reason in found.items():
        assert not reason or reason.startswith(f"{device_name}: "), reason
        if reason:
            with pytest.raises(RuntimeError, match=device_name):
                load_model(folder("qwen3"), device=device_name)
    with pytest.raises(RuntimeError, match="there is no device 'abacus'"):
        load_model(folder("qwen3"), device="abacus")


def adapter_on(device_name: str, spec: str, seed: int) -> _core.Adapter:
    core = loaded_on(spec, device_name).core
    return randomize(_core.Adapter(core, rank=5, alpha=8.0), seed)


def sequences(spec: str, seed: int) -> list[Datum]:
    """Three sequences of plain cross-entropy; of the first, all the vocabulary is a target."""
    first, *rest = (datum(tokens_of(spec, length, seed)) for length in LENGTHS)
    vocab = SPECS[spec].config["vocab_size"]
    every = np.tile(np.arange(vocab, dtype=np.int32), (len(first.tokens), 1))
    weights = (every == first.targets[:, None]).astype(np.float32)
    return [
        replace(first, targets=every, inputs={"weights": weights}),
        *(replace(one, inputs={"weights": np.ones(one.targets.shape, np.float32)}) for one in rest),
    ]


def errors(device_name: str, spec: str, seed: int) -> dict[str, tuple[float, float]]:
    """What the device and torch in bf16 err against float64, by what was compared."""
    data, adapter = sequences(spec, seed), adapter_on(device_name, spec, seed)
    found, _ = call(adapter, data)
    flat = np.concatenate([one.ravel() for one in found])
    arguments = (spec, adapter, data, found, "cross_entropy", None)
    exact, torchs = (autograd(*arguments, dtype) for dtype in (torch.float64, torch.bfloat16))
    gradients = cut(adapter, adapter.read("gradients"))
    compares = {"logits": (flat, torchs[0], exact[0])}
    for what, keys in (compared(list(gradients)) | {"gradient": list(gradients)}).items():
        sides = (gradients, torchs[2], exact[2])
        compares[what] = [np.concatenate([side[key].ravel() for key in keys]) for side in sides]
    return {
        what: (error(ours, truth), error(theirs, truth))
        for what, (ours, theirs, truth) in compares.items()
    }


Tell = Callable[[dict[str, tuple[float, float]]], None]


@pytest.fixture
def tell(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Tell:
    """Tells each ratio with its bar: as a property of the test, and in ratios.jsonl (leftovers.py).
    Then fails with all that are above."""

    def told(ratios: dict[str, tuple[float, float]]) -> None:
        for key, (ratio, bar) in ratios.items():
            row = {"key": key, "ratio": round(float(ratio), 5), "bar": bar}
            record_property("ratio", row)
            noted("ratios.jsonl", {"test": request.node.nodeid} | row)
        above = {key: one for key, one in ratios.items() if not one[0] <= one[1]}
        lines = [f"  {key}: {ratio:.4f}, bar {bar}" for key, (ratio, bar) in above.items()]
        head = f"{len(above)} of {len(ratios)} ratios to torch's error in bf16 are above their bars"
        assert not above, "\n".join([head, *lines])

    return told


@on_gpus
@pytest.mark.parametrize("spec", SPECS)
def test_logits_and_every_gradient_err_no_more_than_torchs_in_bf16(
    on: str, spec: str, tell: Tell
) -> None:
    draws = [errors(on, spec, seed) for seed in SEEDS]
    mixture = any(".experts." in key for key in draws[0])
    whole, each, middle = (
        (MIXED_WHOLE, MIXED_EACH, np.median) if mixture else (WHOLE, EACH, np.mean)
    )
    ratios = {}
    for key in draws[0]:
        logs = [np.log(draw[key][0] / draw[key][1]) for draw in draws]
        bar = whole if key in ("logits", "gradient") else each
        ratios[key] = float(np.exp(middle(logs))), bar
    tell(ratios)


@on_gpus
def test_ten_losses_are_the_cpus_to_torchs_error_in_bf16(on: str, tell: Tell) -> None:
    """Of one family: ten steps of the others, one draw each, are in test_optimizer.py."""
    spec, ours, torchs = "qwen2-tied", [], []
    for seed in SEEDS[:4]:
        data = [datum(tokens_of(spec, length, seed)) for length in LENGTHS]
        sides = {}
        for device_name in ("cpu", on):
            adapter, losses = adapter_on(device_name, spec, seed), []
            for _ in range(10):
                losses.append(call(adapter, data)[1])
                adapter.optim_step(**ADAM)
            sides[device_name] = np.array(losses)
        start = adapter_on("cpu", spec, seed)
        exact, bf16 = (
            np.array(torch_losses(spec, start, data, 10, ADAM, dtype)[0])
            for dtype in (torch.float64, torch.bfloat16)
        )
        np.testing.assert_allclose(sides["cpu"], exact, rtol=1e-4)
        assert exact[9] < 0.9 * exact[0]  # it learned: the losses could have differed
        ours.append(sides[on] / sides["cpu"] - 1)
        torchs.append(bf16 / exact - 1)
    tell({"ten losses": (float(np.linalg.norm(ours) / np.linalg.norm(torchs)), LOSSES)})


def test_all_ratios_are_told_and_all_above_their_bars_fail(
    tell: Tell, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    ratios = {"a": (1.2, 1.05), "b": (0.9, 1.05), "c": (float("nan"), 1.25)}
    with pytest.raises(AssertionError, match="2 of 3 ratios") as failure:
        tell(ratios)
    told = str(failure.value)
    assert "  a: 1.2000, bar 1.05" in told and "  c: nan, bar 1.25" in told and "b:" not in told
    rows = [json.loads(line) for line in (tmp_path / "ratios.jsonl").read_text().splitlines()]
    assert [(row["key"], row["bar"]) for row in rows] == [("a", 1.05), ("b", 1.05), ("c", 1.25)]
    assert {row["test"] for row in rows} == {request.node.nodeid}
    properties = [row for name, row in request.node.user_properties if name == "ratio"]
    assert [row["key"] for row in properties] == ["a", "b", "c"]
