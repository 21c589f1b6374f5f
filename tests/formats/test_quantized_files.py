"""Folders whose matrices are in FP8 or in bitsandbytes' NF4: the numbers are torch's and
bitsandbytes' own, a model of them is the model of the widened numbers bit for bit, and what does
not fit together is refused in a sentence."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from support.quantized_files import FP8, METHODS, NF4, Change, fp8, written
from support.tiny_models import SPECS, Spec, call, datum, make, randomize, tokens_of
from tinsmith import _core
from tinsmith.checkpoints import checkpoint
from tinsmith.cli import commands
from tinsmith.formats import nf4, quantization, safetensors_io
from tinsmith.models import registry

SIZES = {"hidden_size": 128, "intermediate_size": 192, "vocab_size": 300, "head_dim": 64}
SHOWN = "model.layers.1.mlp.down_proj.weight"
SPEC = Spec("qwen3", {**SPECS["qwen3"].config, **SIZES}, torch.bfloat16)


@pytest.fixture(scope="module", params=METHODS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def base(kind: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    path = tmp_path_factory.mktemp(kind) / "m"
    return path, written(SPEC, path, kind)


# ---- numbers ----


def test_the_tensors_are_the_formulas_bit_for_bit(base) -> None:
    path, numbers = base
    with quantization.open_folder(path) as tensors:
        assert set(numbers) <= set(tensors) and not any("absmax" in name for name in tensors)
        for name, wanted in numbers.items():
            np.testing.assert_array_equal(tensors[name], wanted, name)


def test_nf4_is_bitsandbytes_bit_for_bit(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    w = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    for nested in (False, True):
        codes, state = functional.quantize_4bit(w, quant_type="nf4", compress_statistics=nested)
        wanted = functional.dequantize_4bit(codes, state).float().numpy()
        parts = {f"x.{key}": value for key, value in state.as_dict(packed=True).items()}
        file = tmp_path / "model.safetensors"
        safetensors.torch.save_file({"x": codes, **parts}, file)
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": NF4}))
        with quantization.open_folder(tmp_path) as tensors:
            np.testing.assert_array_equal(tensors["x"], wanted)


def test_a_model_is_that_of_its_widened_numbers_bit_for_bit(base, kind, tmp_path: Path) -> None:
    """Log-probabilities, and a call's gradients."""
    path, _ = base
    stored = registry.load_model(path)
    assert set(stored.packed.values()) == {kind}
    content = json.loads((path / "config.json").read_text())
    del content["quantization_config"]
    shutil.copytree(path, tmp_path / "wide")
    (tmp_path / "wide/config.json").write_text(json.dumps(content))
    with quantization.open_folder(path) as tensors:
        wide = {
            name: torch.from_numpy(safetensors_io.widen(tensors[name]).copy()) for name in tensors
        }
    safetensors.torch.save_file(wide, tmp_path / "wide/model.safetensors")
    one, results = datum(tokens_of("qwen3", 70)), []
    for model in (stored, registry.load_model(tmp_path / "wide")):
        adapter = randomize(_core.Adapter(model.core, rank=4))
        results.append((call(adapter, [one])[0][0], adapter.read("gradients")))
    for found, wanted in zip(*results, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert stored.weight_bytes < 0.8 * registry.load_model(path, weights="bf16").weight_bytes


def test_a_merge_is_wide(
    base, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, numbers = base
    model = registry.load_model(path)
    adapter = _core.Adapter(model.core, rank=2)  # whose B is zero
    meta = checkpoint.Meta(
        "m", 2, 32.0, 0, attn=True, mlp=True, unembed=True, kind="weights", step=0,
        user_metadata={}, created="2026-11-21T12:00:00+00:00", ttl_seconds=None,
    )  # fmt: skip
    checkpoint.save(tmp_path / "a", model.family, adapter, meta, optimizer=False)
    assert commands.main(["export", str(path), str(tmp_path / "a"), str(tmp_path / "out")]) == 0
    assert f"what {path} has in {kind.upper()} is in bf16 there" in capsys.readouterr().out
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    with safetensors_io.open_folder(tmp_path / "out") as tensors:
        found = safetensors_io.widen(tensors[SHOWN])
    np.testing.assert_allclose(found, numbers[SHOWN], rtol=2**-8)


def test_info_says_what_it_is_kept_in(base, kind, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["info", str(base[0])]) == 0
    assert f"of its matrices in {kind}" in capsys.readouterr().out
    assert commands.main(["info", str(base[0]), "--weights", "bf16"]) == 0
    assert f"of the files are {kind.upper()}, which is widened" in capsys.readouterr().out


def test_one_scale_for_a_matrix(tmp_path: Path) -> None:
    make(SPEC, tmp_path / "m")
    tensors = safetensors.torch.load_file(tmp_path / "m/model.safetensors")
    wanted = fp8(tensors, SHOWN, None)
    safetensors.torch.save_file(tensors, tmp_path / "m/model.safetensors")
    content = json.loads((tmp_path / "m/config.json").read_text())
    content["quantization_config"] = FP8 | {"weight_block_size": None}
    (tmp_path / "m/config.json").write_text(json.dumps(content))
    with quantization.open_folder(tmp_path / "m") as found:
        np.testing.assert_array_equal(found[SHOWN], wanted)
    model = registry.load_model(tmp_path / "m")
    assert model.packed == {("w_down", 1): "fp8"}


# ---- what is refused ----


def without(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: torch.Tensor) -> Change:
    return lambda tensors: tensors.__setitem__(name, tensor)


def broken(name: str, number: float) -> Change:
    """A number of a tensor is another one."""
    return lambda tensors: tensors[name].reshape(-1)[5:6].copy_(torch.tensor([number]))


def nested(**said: object) -> Change:
    """A matrix's JSON says something else."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        state = json.loads(tensors[SHOWN + nf4.STATE].numpy().tobytes()) | said
        text = bytearray(json.dumps(state).encode())
        tensors[SHOWN + nf4.STATE] = torch.frombuffer(text, dtype=torch.uint8)

    return change


REFUSED: list[tuple[str, Change, str]] = [
    ("fp8", without(f"{SHOWN}_scale_inv"), f"the files have no {SHOWN}_scale_inv, which belongs"),
    ("fp8", put(f"{SHOWN}_scale_inv", torch.ones(2, 5)), r"is \(2, 5\); it should be \(2, 6\)"),
    ("fp8", put(f"{SHOWN}_scale_inv", torch.ones(2, 6, dtype=torch.int32)), "is I32; it should be"),
    ("fp8", broken(f"{SHOWN}_scale_inv", np.inf), f"{SHOWN} has -?inf at"),
    ("fp8", broken(SHOWN, np.nan), f"{SHOWN} has nan at"),
    ("fp8", broken(f"{SHOWN}_scale_inv", 1e37), f"{SHOWN} has -?inf at"),
    ("fp8", put(SHOWN, torch.zeros(0, 192).to(torch.float8_e4m3fn)), "it should be a matrix"),
    ("nf4", nested(nested_offset=int("1" + 400 * "0")), "has the nested_offset 1000"),
    ("nf4", without(f"{SHOWN}.absmax"), f"the files have no {SHOWN}.absmax, which belongs"),
    ("nf4", broken(f"{SHOWN}.quant_map", 0.3), "should have NF4's 16 levels"),
    ("nf4", put(f"{SHOWN}.absmax", torch.ones(7, dtype=torch.uint8)), "has 7 numbers; it should"),
    ("nf4", put(f"{SHOWN}.nested_absmax", torch.full((2,), np.nan)), f"{SHOWN} has nan at"),
    ("nf4", put(SHOWN, torch.ones(9, dtype=torch.uint8)), "has 9 numbers; it should have 12288"),
    ("nf4", put(SHOWN + nf4.STATE, torch.ones(9, dtype=torch.uint8)), "is not JSON"),
]


@pytest.mark.parametrize(("kind", "change", "sentence"), REFUSED)
def test_what_does_not_fit_is_named(kind, change: Change, sentence: str, tmp_path: Path) -> None:
    written(SPEC, tmp_path / "m", kind, change)
    with pytest.raises(ValueError, match=sentence):
        registry.load_model(tmp_path / "m")


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (FP8 | {"fmt": "e5m2"}, "has fmt 'e5m2', which is not supported"),
        (FP8 | {"activation_scheme": "static"}, "has activation_scheme 'static'"),
        (FP8 | {"weight_block_size": [0, 128]}, r"has weight_block_size \[0, 128\]; it should be"),
        (FP8 | {"weight_block_size": "128"}, "has weight_block_size '128'; it should be"),
        (FP8 | {"new": 1}, "has new 1, which is not supported"),
        (NF4 | {"bnb_4bit_quant_type": "fp4"}, "has bnb_4bit_quant_type 'fp4'"),
        (NF4 | {"load_in_4bit": False, "load_in_8bit": True}, "has load_in_4bit False"),
        (NF4 | {"bnb_4bit_quant_storage": "bfloat16"}, "has bnb_4bit_quant_storage 'bfloat16'"),
        ({"quant_method": "gptq"}, "is 'gptq', which is not supported; only fp8, bitsandbytes is"),
    ],
)
def test_another_setting_is_refused_by_name(base, said, sentence, tmp_path: Path) -> None:
    content = json.loads((base[0] / "config.json").read_text()) | {"quantization_config": said}
    shutil.copytree(base[0], tmp_path / "m")
    (tmp_path / "m/config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=sentence):
        registry.load_model(tmp_path / "m")
